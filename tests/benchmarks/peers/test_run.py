"""Comparisons with stock PyTorch, with settings too small to mean anything: what they report, never how fast."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.outcome import Outcome, new_outcome, outcome_page, show
from benchmarks.peers.cases import SUITES
from benchmarks.peers.run import open_ranks, with_case
from stagewright.bench.compare import compare
from stagewright.bench.demo.ranks import Segment
from stagewright.bench.result import read_outcome
from stagewright.report.page import Table

pytestmark = pytest.mark.xdist_group("peers")  # which are trained once


@pytest.fixture(scope="module")
def overhead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    main(["overhead", "--repeats", "2", "--steps", "1", "--json", "--runs", str(runs)])
    (folder,) = runs.iterdir()
    return folder


def test_overhead_trains_both_sides_on_the_same_work(overhead: Path) -> None:
    outcome = read_outcome(overhead, Outcome)
    assert outcome.command.startswith("python -m benchmarks overhead --repeats 2 --steps 1") and outcome.is_whole
    ours, theirs = outcome.rows
    assert (ours.name, theirs.name, outcome.unit) == ("sync", "torch 1F1B", "microseconds/microbatch")
    assert all(len(row.repeats) == 2 and min(repeat.rate for repeat in row.repeats) > 0 for row in outcome.rows)
    (ratio,) = outcome.ratios
    assert (ratio.ours, ratio.theirs, ratio.goal) == ("sync", "torch 1F1B", "<= 0.5")
    assert ratio.ratio.low <= ratio.ratio.value <= ratio.ratio.high
    losses = [[repeat.loss for repeat in row.repeats] for row in outcome.rows]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_peers_leave_reports_and_can_be_compared(overhead: Path) -> None:
    assert {path.name for path in overhead.iterdir()} == {"bench.json", "report.md", "report.html"}
    text = (overhead / "report.md").read_text()
    assert "## Comparisons" in text and "sync / torch 1F1B" in text and "## Every repeat" in text
    found = compare(overhead, overhead)
    assert [pair.ratio.value for pair in found.pairs] == [1.0, 1.0] and found.unit == "microseconds/microbatch"


def made(name: str, seconds: dict[str, tuple[float, ...]]) -> Outcome:
    """An outcome of a suite whose sides took so many seconds per segment; about 1 s unless given."""
    suite = SUITES[name]
    outcome = new_outcome(name, suite.title, 3, unit=suite.unit)
    for case in suite.cases:
        busy = ({"busy": 0.67}, {"busy": 0.5})
        timed = {
            side: [Segment(one, 2.0, 0.0, 0.92, busy) for one in seconds.get(side.name, (1.0, 1.0 + 0.1 * number, 1.0))]
            for number, side in enumerate(case.sides)
        }
        outcome = with_case(outcome, case, timed, case.steps)
    return outcome


@pytest.mark.parametrize("name", sorted(SUITES))
def test_tables_fit_80_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = made(name, {})
    show(Console(width=80, force_terminal=True, color_system=None), outcome, Path("runs/x"))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    pairings = [pairing for case in SUITES[name].cases for pairing in case.pairings]
    assert len(outcome.ratios) == len(pairings) and len(outcome.rows) == sum(len(c.sides) for c in SUITES[name].cases)
    for pairing in pairings:
        assert f"{pairing.ours.name} / {pairing.theirs.name}" in printed
    assert "95 % interval" in printed and f"stagewright bench {name}" in printed
    assert "the busiest rank computes 67% of the time" in printed
    are_on_cpu = {case.workload.setting.device == "cpu" for case in SUITES[name].cases}
    assert ("uses 0.92 cores" in printed) is (True in are_on_cpu)
    met = [ratio.is_met for ratio in outcome.ratios]
    assert f"{met.count(True)} of {len(met)} goal" in printed and ("give more --repeats" in printed) is (None in met)


def test_brackets_of_names_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = made("overhead", {})
    named = replace(outcome.ratios[0], ours="sync [a]")
    show(Console(width=80), replace(outcome, ratios=(named,), command="stagewright bench x --only '[b]'"), Path("runs"))
    printed = capsys.readouterr().out
    assert "sync [a] / torch 1F1B" in printed and "--only '[b]'" in printed


def test_a_ratio_is_ours_over_theirs_repeat_by_repeat() -> None:
    """sync takes half the time of 1F1B in every repeat: twice the images per second, half the microseconds."""
    for name, expected in (("peers", 2.0), ("overhead", 0.5)):
        outcome = made(name, {"sync": (1.0, 3.0, 2.0), "torch 1F1B": (2.0, 6.0, 4.0)})
        ratio = next(ratio for ratio in outcome.ratios if ratio.ours == "sync")
        assert (ratio.ratio.low, ratio.ratio.value, ratio.ratio.high) == pytest.approx((expected,) * 3)
        assert ratio.first.value / ratio.second.value == pytest.approx(expected)


def test_speeds_count_the_steps_of_each_side() -> None:
    """A side of 6 batches per segment and one of 30: both take 1 s."""
    outcome = made("gpu", {})
    rows = {row.name: row for row in outcome.rows if row.group.startswith("vgg16") and row.group.endswith("bf16")}
    assert rows["stale"].rate is not None and rows["stale"].rate.value == 30 * 224
    assert rows["torch DDP"].rate is not None and rows["torch DDP"].rate.value == 6 * 224


def test_a_rank_that_fails_is_reported_in_one_line(tmp_path: Path) -> None:
    case = SUITES["overhead"].cases[0]
    with ExitStack() as stack, pytest.raises(ValueError, match=r"^sync rank \d ended with code 1: FileNotFound.*$"):
        open_ranks(stack, {case.sides[0]: tmp_path / "no.json"}, tmp_path, case.workload)


def test_the_page_has_every_pairing_in_one_table() -> None:
    """The table of docs/performance.md."""
    outcome = made("gpu", {"stale": (0.5, 0.5, 0.5)})
    table = next(block for block in outcome_page(outcome).blocks if isinstance(block, Table))
    assert table.columns[1:] == ("images/s", "ours", "theirs", "ratio", "95 % interval", "goal", "met")
    assert [row[1] for row in table.rows][:3] == ["stale / torch DDP", "stale / bound", "dp / torch DDP"]
    assert {row[-1] for row in table.rows} == {"yes", "not known"}
