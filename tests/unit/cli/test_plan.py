"""`stagewright plan` and `stagewright value`: plans, prices, profiles, and what they refuse."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from stagewright.cli.plan import Tried, decide
from stagewright.cluster.placement import parse_placement
from stagewright.cluster.topology import Cluster, Level, Link, Machine
from stagewright.plan.make import make_plan, read_plan
from stagewright.planning.planner import choose
from stagewright.profile.profile import Unit
from tests.commands import fails, prints, prints_in_terminal
from tests.unit.planning.laws import make_made_setting


def test_plan_writes_the_whole_experiment_for_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    options = ["--cluster", "rtx-2080ti-4", "--batch", "64", "--precision", "fp16", "-o", str(file)]
    out = prints(capsys, "plan", "vgg16", *options, "--report", str(page))
    assert "x dp" in out and "dp 4" in out and "90 %" in out
    assert f"train --model vgg16 --device cuda --precision fp16 --plan {file}" in out
    written = json.loads(file.read_text())
    assert written["plan"]["batch"] == 64 and read_plan(file.read_text(), str(file)).batch == 64
    about = written["experiment"]
    assert (about["model"], about["device"], about["precision"]) == ("vgg16", "cuda", "fp16")
    assert about["cluster"] == "rtx-2080ti-4" and written["command"] in out.replace("\n", " ")
    assert "Candidates" in page.read_text() and "Memory by part" in page.read_text()


def test_a_plan_file_of_the_first_format_is_read() -> None:
    plan = make_plan(parse_placement("0:0.0:1"), batch=8, microbatches=4, cuts=["u1"])
    assert read_plan(json.dumps(plan.describe()), "old") == plan
    with pytest.raises(ValueError, match="format 'stagewright-plan-3' but this version reads stagewright-plan-2"):
        read_plan(json.dumps({"format": "stagewright-plan-3", "plan": plan.describe()}), "new")


def test_plan_json_has_stages_links_memory_setting_and_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(prints(capsys, "plan", "alexnet", "--cluster", "rtx-3090-2", "--batch", "64", "--json"))
    assert found["evidence"] == "unknown host" and found["setting"]["batch"] == 64
    best = found["candidates"][found["best"]]
    assert best["low"] < best["images_per_second"] < best["high"]
    assert [stage["stage"] for stage in best["stages"]] == list(range(len(best["plan"]["versions"])))
    assert set(best["memory_by_part_mib"][0]) >= {"weights", "activations"}
    parallel = next(c for c in found["candidates"] if c["plan"]["mode"] == "dp" and len(c["memory_mib"]) == 2)
    assert parallel["slow_host"] < parallel["images_per_second"] <= parallel["fast_host"]
    assert found["winner"] is not None or "no winner" in found["measure"]


def test_plan_alone_answers_for_this_machine_by_a_cached_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("stagewright.run.profile.busy_seconds", lambda **_: 0.0)  # other tests run meanwhile
    first = prints(capsys, "plan", "resnet8")
    (profile,) = (tmp_path / "stagewright" / "profiles").iterdir()
    stamp = profile.stat().st_mtime_ns
    assert "resnet8 on this machine, fp32" in first and "stagewright train --model resnet8 --device cpu" in first
    found = json.loads(prints(capsys, "plan", "resnet8", "--json"))
    assert profile.stat().st_mtime_ns == stamp and found["evidence"] == "measured here"
    command = shlex.split(found["command"])
    assert command[:2] == ["stagewright", "train"]
    prints(capsys, *command[1:], "--steps", "1", "--runs", str(tmp_path / "runs"))


def test_plans_that_were_trained_are_decided_by_their_measured_speed() -> None:
    level = Level(Link("inside", 1e10, 1e-6), ((0, 1),))
    units = [Unit(f"u{n}", "made", 1e-3, 2e-3, 1000, 100, 100, 100, 100) for n in range(4)]
    choice = choose(make_made_setting(Cluster((Machine(2, "fast", (level,)),)), units), 8)
    assert len(choice.candidates) > 2
    decided = decide(choice, [Tried(0, 50.0), Tried(1, 60.0), Tried(2, None, "out of memory")])
    assert decided.best is choice.candidates[1] and decided.decided
    assert decide(choice, [Tried(0, None, "failed")]) is choice


def test_value_prices_whole_boxes_and_their_electricity(capsys: pytest.CaptureFixture[str]) -> None:
    clusters = ["--cluster", "rtx-2080ti-4", "--cluster", "rtx-4090-1", "--precision", "fp16"]
    found = json.loads(prints(capsys, "value", "resnet50", *clusters, "--kwh", "0.3", "--json"))
    first, second = found["clusters"]
    assert first["usd"] > 4 * 340 and second["usd"] > 1770 and "board" in first["prices"][1]
    assert first["per_dollar"] == pytest.approx(first["images_per_second"] / first["usd"])
    assert "2023-07" in first["prices"][0] and first["low"] < first["images_per_second"] < first["high"]
    assert first["year_usd"] == pytest.approx(first["watts"] / 1000 * 8760 * 0.3)
    assert first["epoch_usd_interval"][0] < first["epoch_usd"] < first["epoch_usd_interval"][1]
    assert "sentence" in found["break_even"]
    dearer = json.loads(prints(capsys, "value", "resnet50", *clusters, "--price", "rtx-2080ti-22=1000", "--json"))
    assert dearer["clusters"][0]["usd"] == pytest.approx(first["usd"] + 4 * 660)


def test_value_and_plan_name_the_evidence_of_devices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("value", "vgg-small", "--cluster", "rtx-4090-4", "--cluster", "titan-v-8", "--batch", "64")
    shown = prints_in_terminal(capsys, monkeypatch, 80, *words)
    _, header, first, *_ = shown.splitlines()
    assert header.split()[2] == "lag" and first[: header.index("lag") + 3].split()[-1].isdigit()
    assert "…" not in shown  # a long plan wraps before a number is cut
    assert "fp32 speed of rtx-4090: by its data sheet" in shown
    titan = prints(capsys, "plan", "vgg-small", "--cluster", "titan-v-8", "--devices", "2", "--batch", "64")
    assert "data sheet" not in titan


def test_a_narrow_terminal_cuts_no_number_and_what_train_alone_takes_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("plan", "alexnet", "--cluster", "rtx-3090-2", "--batch", "64")
    wide = prints(capsys, *words)
    narrow = prints_in_terminal(capsys, monkeypatch, 70, *words)
    assert "by host" in wide and "by host" not in narrow and "…" not in narrow
    sentences = [line for line in narrow.splitlines() if "stagewright " not in line]
    assert max(map(len, sentences)) <= 70
    best, own = ("stale 1-1", "sync 1-1")
    assert f"* {best}" in wide and f"train by itself avoids lag and would take {own}" in wide
    assert f"takes {best}" in wide
    assert "train by itself" not in prints(capsys, *words, "--mode", "stale"), "sync was not searched"
    several = prints(capsys, "plan", "alexnet", "--cluster", "titan-v-16", "--batch", "64")
    assert "train by itself" not in several, "train finds no layout of several machines"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "vgg16", "--cluster", "titan-v", "--batch", "8"], ["unknown cluster", "titan-v-8"]),
        (["simulate", "vgg16", "--batch", "8"], ["no cluster", "--profile"]),
        (
            ["simulate", "vgg16", "--batch", "8", "--profile", "f", "--devices", "4"],
            ["--devices 4", "without --cluster"],
        ),
        (
            ["plan", "vgg16", "--batch", "8", "--profile", "f", "--software", "oneflow"],
            ["--software oneflow", "--profile f"],
        ),
        (["plan", "vgg16", "--batch", "8", "--profile", "f", "--data", "imagenet"], ["--data imagenet", "--profile f"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8"], ["no batch", "--batch"]),
        (["simulate", "vgg17", "--cluster", "titan-v-8", "--batch", "8"], ["vgg17", "vgg19"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--devices", "9"], ["9 devices", "has 8"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--placement", "0:8"], ["0:8", "0:7"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--software", "torch"], ["torch", "pytorch"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--plan", "/no/file"], ["/no/file"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--profile", "/no/file"], ["/no/file"]),
        (["plan", "vgg16", "--cluster", "titan-v-8", "--batch", "0"], ["--batch is 0"]),
        (["plan", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--microbatches", "0"], ["--microbatches is 0"]),
        (["plan", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--microbatches", "16"], ["16", "2, 4, 8"]),
        (["value", "vgg16"], ["--cluster"]),
        (["plan", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--try", "2"], ["--try", "titan-v-8"]),
        (["value", "vgg16", "--cluster", "titan-v-8", "--price", "titan-v"], ["DEVICE=USD"]),
        (["value", "vgg16", "--cluster", "titan-v-8", "--price", "titan-x=9"], ["'titan-x'", "have titan-v"]),
        (["profile", "vgg-small", "--samples", "a"], ["'a'", "8,16"]),
        (["profile", "vgg-small", "--together", "0"], ["--together is 0"]),
        (["profile", "vgg-small", "--pipedream", "/no/file", "--samples", "8"], ["/no/file"]),
    ],
)
def test_wrong_options_of_planning_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    line = fails(capsys, *arguments)
    assert all(word in line for word in words), line


def test_plans_with_an_imported_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = "forward_compute_time=2.0, backward_compute_time=4.0, activation_size=1000.0, parameter_size=4000.0"
    graph, profile = tmp_path / "graph.txt", str(tmp_path / "profile.json")
    graph.write_text(
        "".join(f"node{n} -- ReLU -- {numbers}\n" for n in (1, 2, 3)) + "\tnode1 -- node2\n\tnode2 -- node3\n"
    )
    prints(capsys, "profile", "alexnet", "--pipedream", str(graph), "--samples", "32", "-o", profile)
    rest = ["--profile", profile, "--cluster", "titan-v-8", "--devices", "2", "--batch", "64"]
    found = json.loads(prints(capsys, "plan", "alexnet", *rest, "--explain", "node2", "--json"))
    assert found["unit"]["forward"] == pytest.approx(2e-3)
    staged = json.loads(prints(capsys, "simulate", "alexnet", *rest, "--placement", "0:0.0:1", "--json"))
    assert staged["plan"]["cuts"][0] in ("node2", "node3")
    assert "imported as alexnet" in fails(capsys, "plan", "vgg16", *rest)
    run = ["train", "--model", "alexnet", "--placement", "0:0.0:1", "--batch", "2", "--steps", "1"]
    assert "was imported" in fails(capsys, *run, "--profile", profile)
    assert "--output p.json" in fails(capsys, "plan", "alexnet", *rest, "-o", "p.json")
    assert "--cut" in fails(capsys, "simulate", "alexnet", *rest, "--placement", "0:0.0:1", "--cut", "features.3")


def test_refuses_the_profile_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "p.json")
    prints(capsys, "profile", "tests.models:plain", "--image", "8", "--samples", "2,4", "-o", file)
    line = fails(capsys, "simulate", "vgg-small", "--profile", file, "--cluster", "titan-v-8", "--batch", "8")
    assert "the model is vgg-small" in line
    run = ["train", "--model", "vgg-small", "--batch", "64", "--microbatches", "1"]
    prints(capsys, "profile", "vgg-small", "--samples", "2,4", "-o", file)
    runs = tmp_path / "runs"
    assert "2 to 4 samples" in fails(capsys, *run, "--profile", file, "--runs", str(runs), "--steps", "1")
    assert not runs.exists()
