"""Comparisons of made runs and benches whose answers are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagewright.bench.compare import Pair, compare_benches
from stagewright.bench.folder import write_json
from stagewright.bench.result import Outcome, Repeat, Row
from stagewright.bench.statistics import Interval, median_interval
from stagewright.cli.main import main
from tests.commands import prints_in_terminal

Make = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> Make:
    """Writes a run folder with made times: 15 slow batches, then a level with a little noise."""

    def make(name: str, rate: float, *, seed: int = 0, steps: int = 60, noise: float = 0.02, **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        batch, mode = changes.get("batch", 64), changes.get("mode", "dp")
        plan = {"mode": mode, "placement": "0:0-1", "cuts": [], "batch": batch, "microbatches": 2}
        (folder / "plan.json").write_text(json.dumps(plan | {"versions": [1], "depths": [1]}))
        precision, model = changes.get("precision", "fp32"), changes.get("model", "vgg-small")
        emulate = str(changes.get("emulate", False)).lower()
        run = f'[run]\nprecision = "{precision}"\nemulate = {emulate}\n'
        (folder / "config.toml").write_text(f'[model]\nname = "{model}"\n{run}')
        (folder / "env.json").write_text(json.dumps({"host": {"cpu": changes.get("cpu", "EPYC"), "cores": 2}}))
        generator = np.random.default_rng(seed)
        lines, end = [], 0.0
        for number in range(steps):
            speed = rate / 3 if number < 15 else rate * (1 + noise * generator.standard_normal())
            step = {"kind": "step", "batch": number, "epoch": 0, "loss": 2.0 - number / 100 + changes.get("loss", 0.0)}
            end += batch / float(speed)
            lines.append(step | {"lr": 0.1, "seconds": end, "images_per_second": 1e6})
        lines.append({"kind": "evaluated", "batch": steps, "samples": 10, "loss": 1.0, "top1": 0.5, "top5": 0.9})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return make


def compared(capsys: pytest.CaptureFixture[str], first: Path, second: Path) -> Any:
    main(["compare", str(first), str(second), "--json"])
    return json.loads(capsys.readouterr().out)


def test_runs_are_compared_in_the_unit_of_their_data(make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run("a", 500.0, seed=1), make_run("b", 500.0, seed=2)
    for folder in (a, b):
        (folder / "job.json").write_text(json.dumps({"unit": "tokens", "per_sample": 256}))
    found = compared(capsys, a, b)
    assert found["unit"] == "tokens/s" and found["pairs"][0]["first"]["value"] == pytest.approx(128_000, rel=0.05)
    (b / "job.json").unlink()
    reasons = compared(capsys, a, b)["reasons"]
    assert reasons == ["different unit: tokens/s, 256 per sample and images/s, 1 per sample"]


def test_runs_of_equal_speed_do_not_differ_significantly(make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(capsys, make_run("a", 500.0, seed=1), make_run("b", 500.0, seed=2))
    (pair,) = found["pairs"]
    assert found["is_comparable"] and not pair["is_significant"]
    assert pair["verdict"].startswith("no significant difference")
    assert pair["first"]["value"] == pytest.approx(500, rel=0.02)
    assert pair["first"]["low"] > 490, "the slow batches at the start do not count"
    assert "losses of all 60 common batches are bit-for-bit equal" in found["notes"]
    assert "top-1 on unknown data after batch 60: A 50.00%, B 50.00%" in found["notes"]


def test_a_faster_run_differs_significantly(make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(capsys, make_run("a", 500.0, seed=1), make_run("b", 600.0, seed=2, mode="stale", loss=0.1))
    (pair,) = found["pairs"]
    assert pair["is_significant"] and pair["verdict"].startswith("B is faster: 1.2")
    assert pair["ratio"]["low"] < 1.2 < pair["ratio"]["high"] < 1.25
    assert "loss over batches 51 to 60: A 1.4550, B 1.5550" in found["notes"]
    assert any(note.startswith("different plan: dp 0:0-1") for note in found["notes"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "resnet8"}, "different model: vgg-small and resnet8"),
        ({"batch": 32}, "different batch: 64 and 32"),
        ({"precision": "bf16"}, "different precision: fp32 and bf16"),
        ({"cpu": "Xeon"}, "different machine: EPYC, 2 cores and Xeon, 2 cores"),
    ],
    ids=lambda value: str(value),
)
def test_runs_of_different_work_are_not_comparable(
    change: dict[str, Any],
    reason: str,
    make_run: Make,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = make_run("a", 500.0), make_run("b", 900.0, **change)
    assert reason in compared(capsys, first, second)["reasons"]
    printed = prints_in_terminal(capsys, monkeypatch, 80, "compare", str(first), str(second))
    assert f"not comparable: {reason}" in printed and "faster" not in printed
    assert max(len(line) for line in printed.splitlines() if "stagewright " not in line) <= 80


def test_emulated_runs_are_compared_by_losses_only(make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make_run("a", 500.0, steps=4, emulate=True), make_run("b", 900.0, loss=0.1, emulate=True)
    main(["compare", str(first), str(second)])
    printed = capsys.readouterr().out
    assert printed.splitlines()[2] == "not comparable: speed: A and B emulated all ranks in one process"
    assert "loss over batches 1 to 4" in printed
    assert "images/s" not in printed and "faster" not in printed and "interval" not in printed
    found = compared(capsys, first, make_run("c", 900.0))
    assert found["pairs"] == [] and found["reasons"] == ["speed: A emulated all ranks in one process"]


def row(name: str, rates: list[float], **changes: Any) -> Row:
    repeats = tuple(Repeat(rate, 1, True, (1.0,), 2.0, "run") for rate in rates)
    common = {"group": "VGG", "data": "synthetic", "kind": "measured", "is_baseline": name == "dp", "mode": "dp"}
    common |= {"model": "vgg16", "precision": "fp32", "batch": 64, "placement": "0:0-1", "device": "cpu"}
    found = Row(name=name, options={}, repeats=repeats, rate=median_interval(rates), **common)  # type: ignore[arg-type]
    return replace(found, **changes)


def outcome(*rows: Row, cpu: str = "EPYC", suite: str = "quick") -> Outcome:
    machine = {"processor": cpu, "torch": "2.13"}
    return Outcome(suite, "Quick", "stagewright bench quick", "2026-11-15", 7, 10, machine, rows)


QUIET = [100.0, 101.0, 99.0, 100.5, 99.5, 100.2, 99.8]


def test_benches_are_compared_per_configuration() -> None:
    faster = [rate * 1.3 for rate in QUIET]
    first = outcome(row("dp", QUIET), row("stale", QUIET), row("gone", QUIET))
    second = outcome(row("dp", QUIET[::-1]), row("stale", faster))
    found = compare_benches("a", "b", first, second)
    assert [pair.is_significant for pair in found.pairs] == [False, True] and found.is_comparable
    assert found.pairs[1].ratio.value == pytest.approx(1.3) and "B is faster: 1.30 x" in found.pairs[1].summary
    assert found.notes == ("only in one of them: gone, synthetic",)
    assert compare_benches("b", "a", second, first).notes == found.notes, "whichever of them has it"


def test_the_smaller_of_two_times_is_faster() -> None:
    """What is measured in milliseconds is better the smaller it is."""
    faster = [0.7 * milliseconds for milliseconds in QUIET]
    first, second = (replace(outcome(row("copy", values)), unit="ms") for values in (QUIET, faster))
    assert compare_benches("a", "b", first, second).pairs[0].summary.startswith("B is faster: 0.70 x")
    assert compare_benches("b", "a", second, first).pairs[0].summary.startswith("B is slower: 1.43 x")
    assert "different unit: ms and images/s" in compare_benches("a", "b", first, outcome(row("copy", QUIET))).reasons


def test_a_wide_interval_does_not_say_that_nothing_is_slower() -> None:
    noisy = [60.0, 140.0, 80.0, 120.0, 100.0, 90.0, 110.0]
    pair = compare_benches("a", "b", outcome(row("dp", noisy)), outcome(row("dp", noisy[::-1]))).pairs[0]
    assert not pair.is_significant and "to know whether B is slower" in pair.summary
    quiet = [100 + rate / 1000 for rate in QUIET]
    pair = compare_benches("a", "b", outcome(row("dp", quiet)), outcome(row("dp", quiet[::-1]))).pairs[0]
    assert not pair.is_significant and "slower" not in pair.summary


@pytest.mark.parametrize(("is_rate", "is_known"), [(True, True), (False, False)], ids=["speeds", "times"])
def test_more_of_a_speed_is_not_slower_but_more_of_a_time_may_be(is_rate: bool, is_known: bool) -> None:
    one = Interval(1.0, 0.99, 1.01)
    pair = Pair("what", one, one, Interval(1.03, 1.0, 1.06), is_rate=is_rate)
    assert not pair.is_significant and ("to know whether B is slower" not in pair.summary) is is_known


def test_benches_of_different_machines_or_work_are_not_comparable() -> None:
    first, second = outcome(row("dp", QUIET)), outcome(row("dp", QUIET, batch=32), cpu="Xeon")
    reasons = compare_benches("a", "b", first, second).reasons
    assert reasons == ("VGG, dp, synthetic: different batch: 64 and 32", "different processor: EPYC and Xeon")


def test_a_prediction_is_never_significant() -> None:
    predicted = row("dp", [200.0], kind="predicted", repeats=())
    found = compare_benches("a", "b", outcome(predicted), outcome(replace(predicted, rate=median_interval([100.0]))))
    assert found.pairs[0].summary == "predicted: B is 0.50 x A" and not found.pairs[0].is_significant


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["compare", *arguments])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1 and "Traceback" not in error
    return error


def test_unreadable_folders_are_reported_in_one_line(
    make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("a", 500.0)
    assert "not a run folder" in fails(capsys, str(run), str(tmp_path / "nowhere"))
    empty = make_run("empty", 500.0, steps=0)
    assert "0 timed batches" in fails(capsys, str(run), str(empty))
    bench = tmp_path / "bench"
    bench.mkdir()
    write_json(asdict(outcome(row("dp", QUIET))), bench / "bench.json")
    assert "compare two runs or two benches" in fails(capsys, str(run), str(bench))
    (bench / "bench.json").write_text('{"suite": 3}')
    assert "is not a bench outcome" in fails(capsys, str(bench), str(bench))
    (bench / "bench.json").write_text("{")
    assert "is not JSON" in fails(capsys, str(bench), str(bench))
    other = tmp_path / "other"
    other.mkdir()
    write_json(asdict(outcome(row("dp", QUIET))), bench / "bench.json")
    write_json(asdict(outcome(row("sync", QUIET))), other / "bench.json")
    assert "no configuration in common" in fails(capsys, str(bench), str(other))
