"""Studies of learning: what is trained, what is found of it, and that a study runs from file to page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from stagewright.bench.learning.findings import Finding, Speed, Study, findings_of, in_points, mean_interval, target_of
from stagewright.bench.learning.pages import describe_study, headlines, show_study, study_page
from stagewright.bench.learning.runs import TrainedRun, earlier_runs
from stagewright.bench.learning.trials import StudyOptions, open_study, trial_runs_of
from stagewright.bench.result import make_cleaner
from stagewright.cli.main import main
from stagewright.report.html import as_html
from stagewright.report.markdown import as_markdown
from stagewright.report.page import Curves
from tests.soak import soak


def learnt(trial: str, seed: int, *top1: float, diverged: str = "") -> TrainedRun:
    """A run that is scored every ten batches, which are an epoch."""
    return TrainedRun(
        "R", trial, seed, tuple((10 * (n + 1), score) for n, score in enumerate(top1)), 10, None, diverged
    )


def found(*runs: TrainedRun, baseline: str = "sync", speed: float | None = None) -> list[Finding]:
    keys = dict.fromkeys(run.key for run in runs)
    speeds = {} if speed is None else {key: Speed(speed, "measured here", 2) for key in keys}
    return findings_of(runs, {"R": baseline}, dict.fromkeys(keys, 640), speeds)


def test_an_interval_of_a_mean_is_students() -> None:
    interval = mean_interval([1.0, 2.0, 6.0])
    assert interval.value == 3.0
    assert interval.high - 3.0 == pytest.approx(4.303 * np.std([1, 2, 6], ddof=1) / math.sqrt(3))
    assert mean_interval([4.0]).low == mean_interval([4.0]).high == 4.0


@pytest.mark.parametrize(
    ("count", "factor"), [(2, 12.706), (3, 4.303), (10, 2.262), (11, 2.228), (12, 2.201), (31, 2.042), (1001, 1.962)]
)
def test_the_factor_is_students(count: int, factor: float) -> None:
    values = [0.0] * (count // 2) + [1.0] * (count - count // 2)
    interval = mean_interval(values)
    assert interval.high - interval.value == pytest.approx(factor * np.std(values, ddof=1) / math.sqrt(count), rel=4e-4)


@pytest.mark.parametrize("count", [2, 3, 5, 14])
def test_the_interval_covers_what_it_should(count: int) -> None:
    generator = np.random.default_rng(count)
    hits = sum(mean_interval(list(generator.normal(0.9, 0.01, count))).holds(0.9) for _ in range(1000))
    assert 920 <= hits <= 975, hits


def test_verdicts() -> None:
    runs = [learnt("sync", seed, 0.5, 0.90 + 0.01 * seed) for seed in range(3)]
    runs += [learnt("same", seed, 0.5, 0.90 + 0.01 * seed + shift) for seed, shift in enumerate((-0.001, 0.002, 0.0))]
    runs += [learnt("low", seed, 0.5, 0.89 + 0.01 * seed + shift) for seed, shift in enumerate((-0.001, 0.001, 0.0))]
    runs += [learnt("one", 1, 0.5, 0.905)]
    runs += [learnt("wild", 0, 0.3, diverged="the loss of batch 14 is nan"), learnt("wild", 1, 0.5, 0.91)]
    sync, same, low, one, wild = found(*runs)
    assert sync.is_baseline and sync.difference is None
    assert same.summary == "as accurate as the baseline within noise (+0.03 points, -0.35 to +0.41)"
    assert low.summary == "lower by 1.00 points (-1.25 to -0.75)"  # although each seed's own accuracy varies as much
    assert low.accuracy is not None and low.accuracy.value == pytest.approx(0.90)
    (_, equal) = found(learnt("sync", 0, 0.9), learnt("twin", 0, 0.9))
    assert equal.summary == "equal (one seed: no interval)"
    assert one.summary == "lower by 0.50 points (one seed: no interval)"
    assert wild.summary == "1 of 2 runs diverged: the loss of batch 14 is nan"


def test_what_diverged_counts_for_neither_side_and_one_pair_proves_nothing() -> None:
    gone = "the loss of batch 14 is nan"
    runs = [learnt("sync", 0, 0.9), learnt("sync", 1, 0.2, diverged=gone), learnt("sync", 2, 0.3, diverged=gone)]
    runs += [learnt("better", seed, 0.8, 0.95, 0.91) for seed in (2, 0, 1)]
    sync, better = found(*runs)
    assert sync.accuracy is not None and sync.accuracy.value == 0.9
    assert better.pairs == [pytest.approx(0.01)] and better.summary == "higher by 1.00 points (one seed: no interval)"
    assert better.accuracy is not None and better.accuracy.value == pytest.approx(0.91)  # the last, not the best
    assert [run.seed for run in better.runs] == [0, 1, 2]
    assert sync.epochs_to(0.5) is None  # one of three reaches it
    assert [round(interval.value, 4) for _, interval in sync.curve()] == [round((0.9 + 0.2 + 0.3) / 3, 4)]


def test_a_run_that_ended_in_its_first_epoch_does_not_shorten_it() -> None:
    early = TrainedRun("R", "sync", 1, (), 3, None, "nan")
    (sync,) = found(TrainedRun("R", "sync", 0, ((5, 0.5), (20, 0.9)), 10), early)
    assert sync.per_epoch == 10 and [epoch for epoch, _ in sync.curve()] == [0.5, 2.0]


def test_a_target_is_half_points_and_reached_exactly() -> None:
    for base, target in ((0.915, 0.905), (0.145, 0.135), (0.833, 0.82)):
        assert target_of(found(learnt("sync", 0, base))) == target
    assert target_of(found(learnt("a", 0, 0.5), learnt("sync", 0, 0.9))) == 0.89  # the baseline's, wherever it stands
    (sync,) = found(learnt("sync", 0, 0.175))
    assert sync.epochs_to(0.17500000000000002) == 1.0
    assert in_points(-1e-6) == "+0.00" and in_points(-0.0037) == "-0.37"


def test_time_to_a_target_is_that_of_half_of_the_runs() -> None:
    runs = [learnt("sync", 0, 0.5, 0.8, 0.9), learnt("sync", 1, 0.5, 0.7, 0.8), learnt("sync", 2, 0.8, 0.8, 0.8)]
    (sync,) = found(*runs, speed=64.0)
    assert sync.epochs_to(0.8) == 2.0
    assert sync.seconds_to(0.8) == 2.0 * 640 / 64.0
    assert sync.epochs_to(0.85) is None and sync.seconds_to(0.85) is None  # one of three reaches it
    (two,) = found(learnt("sync", 0, 0.9, 0.9), learnt("sync", 1, 0.5, 0.5))
    assert two.epochs_to(0.8) == 1.0  # one of two
    assert target_of([sync]) == pytest.approx(0.82)  # a point below the mean of 0.833


def test_the_shipped_study_asks_what_the_advice_is_about() -> None:
    trial_runs = trial_runs_of(StudyOptions(data="tensors:a", val="tensors:b", seeds=2), open_study(StudyOptions()))
    assert {trial_run.seed for trial_run in trial_runs} == {0, 1}
    assert all(trial_run.config.run.emulate for trial_run in trial_runs)
    assert {(trial_run.config.data.source, trial_run.config.data.val) for trial_run in trial_runs} == {
        ("tensors:a", "tensors:b")
    }
    assert [trial_run.seed for trial_run in trial_runs] == [0] * 12 + [1] * 12  # seed by seed
    modes = {
        (trial_run.key[1], trial_run.config.plan.staleness, trial_run.config.optimizer.predict)
        for trial_run in trial_runs
    }
    assert ("2 stages, lag 1, predict", 1, True) in modes and ("4 stages, lag 1", 1, False) in modes
    for group in {trial_run.key[0] for trial_run in trial_runs}:
        assert sum(trial_run.configuration.is_baseline for trial_run in trial_runs if trial_run.key[0] == group) == 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "needs training and validation images; give --data and --val"),
        (["--data", "synthetic", "--seeds", "0"], "--seeds is 0; give at least 1"),
        (["--data", "synthetic", "--target", "120"], "--target is 120; give a top-1 accuracy"),
        (["--data", "synthetic", "--study", "/nowhere.toml"], "/nowhere.toml: No such file"),
        (["--data", "synthetic", "--jobs", "0"], "--jobs is 0; give at least 1"),
        (["--data", "synthetic", "--jobs", "2", "--real"], "--jobs is 2, but --real measures one run at a time"),
        (["--data", "ofrecord:x"], "--data ofrecord:x gives training images only; give --val as well"),
        (["--data", "synthetic", "--set", "run.steps=5"], "run.steps is 5, but a study trains whole epochs"),
        (["--data", "synthetic", "--set", "run.seed=5"], "run.seed is 5, but a study trains whole epochs"),
        (
            ["--data", "synthetic", "--reuse", "/nowhere"],
            "/nowhere/learning.json: No such file or directory; give a",
        ),
        (["--data", "synthetic", "--reuse", "/nowhere", "--real"], "timed earlier, but --real compares times"),
        (["--data", "synthetic", "--only", "nothing"], "--only 'nothing' matches none of 12"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "learning", *arguments])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1 and line in error


@pytest.mark.parametrize(
    ("head", "options", "line"),
    [
        ("steps = 7", "{}", "steps is 7, but a study trains whole epochs with seeds 0, 1, ...; use run.epochs"),
        ("repeats = 9", "{}", "repeats is 9, but a study trains whole epochs with seeds 0, 1, ...; use --seeds"),
        ("", "{ run = { steps = 1 } }", "run.steps is 1, but a study trains whole epochs"),
        ("", "{ run = { seed = 5 } }", "run.seed is 5, but a study trains whole epochs"),
    ],
)
def test_what_a_study_would_ignore_is_refused(
    head: str, options: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "study.toml"
    study.write_text(f'title = "x"\n{head}\n[[group]]\nname = "g"\n[[group.trial]]\nname = "t"\noptions = {options}\n')
    with pytest.raises(SystemExit):
        main(["bench", "learning", "--study", str(study), "--data", "synthetic", "--runs", str(tmp_path / "runs")])
    assert line in capsys.readouterr().err


def test_a_page_has_tables_curves_and_every_run(tmp_path: Path) -> None:
    runs = [learnt("sync", seed, 0.5, 0.9) for seed in range(2)] + [learnt("stale", 0, 0.4, 0.8)]
    study = Study(
        "Lag", "2026-01-01", "stagewright bench learning", {"GPU": "none"}, tuple(found(*runs, speed=1.0)), {"R": 0.85}
    )
    text = as_markdown(study_page(study))
    sync, stale, slow = found(*runs, learnt("slow", 0, 0.6, 0.95), speed=64.0)
    stale = replace(stale, speed=Speed(128.0, "measured here", 4))
    raced = replace(study, findings=(sync, stale, slow), targets={"R": 0.8})
    assert list(headlines(raced)) == [
        "R reaches 80.0% first with stale: after 10 s on 4, sync after 20 s on 2 (measured here)."
    ]
    of_sync = study_page(raced).blocks[2:5]
    assert all(isinstance(block, Curves) for block in of_sync)
    by_epoch, last, by_time = ([(p.x, round(p.y, 6)) for p in block.curves[0].points] for block in of_sync)
    assert by_epoch == [(1.0, 50.0), (2.0, 90.0)] and last == [(2.0, 90.0)] and by_time == [(10.0, 50.0), (20.0, 90.0)]
    runs = [learnt("sync", seed, 0.9 + 0.05 * seed) for seed in range(2)]  # whose interval reaches beyond
    assert "- 100.00%" in as_markdown(study_page(replace(study, findings=tuple(found(*runs)))))
    for part in (
        "lower by 10.00 points",
        "90.00%",
        "top-1 against epochs",
        "top-1 against time",
        "measured here",
        "first with sync",
    ):
        assert part in text
    assert "</html>" in as_html(study_page(study))
    assert json.loads(json.dumps(describe_study(study)))["findings"][1]["difference"]["value"] == pytest.approx(-0.1)
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    show_study(console, study, tmp_path)
    assert all(len(line) <= 80 or str(tmp_path) in line for line in console.export_text().splitlines())


def write_study(folder: Path, runs: list[TrainedRun]) -> str:
    study = Study("Lag", "2026-01-01", "stagewright", {"GPU": folder.name}, tuple(found(*runs)), {})
    folder.mkdir()
    (folder / "learning.json").write_text(json.dumps(describe_study(study)))
    return str(folder)


def test_runs_with_equal_settings_are_taken_over_under_their_new_names(tmp_path: Path) -> None:
    options = StudyOptions(data="tensors:a", val="tensors:b", seeds=2, only="ResNet-18")
    trial_runs = trial_runs_of(options, open_study(options))
    first, second = trial_runs[1], trial_runs[-1]
    runs = [
        replace(learnt("other", first.seed, 0.5, 0.75), settings=first.settings.replace("cutout = 0\n", "")),  # older
        replace(learnt("other", second.seed, 0.5, diverged="nan"), settings=second.settings),
        replace(learnt("other", 7, 0.9), settings="of nobody"),
    ]
    a, b = write_study(tmp_path / "a", runs[:1]), write_study(tmp_path / "b", runs[1:])
    earlier = earlier_runs([a, b], trial_runs)
    known = earlier.runs
    assert earlier.machines == {a: {"GPU": "a"}, b: {"GPU": "b"}}
    assert [(run.key, run.seed, run.origin) for run in known] == [
        (first.key, first.seed, a),
        (second.key, second.seed, b),
    ]
    assert known[0].scores == runs[0].scores and known[1].diverged == "nan"
    assert [run.settings for run in known] == [first.settings, second.settings]
    study = Study("Lag", "2026-01-01", "stagewright", {}, tuple(found(*(replace(r, group="R") for r in known))), {})
    text = as_markdown(study_page(replace(study, elsewhere={"x": {"GPU": "one"}, "y": {"GPU": "one"}})))
    assert (
        "Environment of reused runs" in text and "Runs of x, y." in text and "## Environment\n" not in text
    )  # nothing ran here
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "learning.json").write_text(
        json.dumps(describe_study(replace(study, elsewhere=earlier.machines)))
    )
    assert earlier_runs([str(tmp_path / "c")], trial_runs).machines == earlier.machines  # at second hand
    waiting = [trial_run for trial_run in trial_runs if trial_run.settings not in {run.settings for run in known}]
    assert len(waiting) == len(trial_runs) - 2


def test_a_study_of_other_settings_is_no_help(tmp_path: Path) -> None:
    options = StudyOptions(data="tensors:a", val="tensors:b", seeds=1, only="ResNet-18")
    trial_runs = trial_runs_of(options, open_study(options))
    settings = trial_runs[0].settings.replace("epochs = 60", "epochs = 40")
    runs = [replace(learnt(trial_runs[0].key[1], 0, 0.5), group="ResNet-18", settings=settings)]
    tables = {"machine": {}, "elsewhere": {}, "findings": [{"learnt": [asdict(run) for run in runs]}]}
    (tmp_path / "learning.json").write_text(json.dumps(tables))
    with pytest.raises(
        ValueError, match=r"none of its 1 runs .* of the 6 asked for \(first: run.epochs is 40 there, 60 here\)"
    ):
        earlier_runs([str(tmp_path)], trial_runs)
    anonymous = replace(
        runs[0], settings=make_cleaner()(trial_runs[0].settings.replace("tensors:a", "tensors:/home/me/a"))
    )
    (tmp_path / "learning.json").write_text(
        json.dumps(
            {"machine": {}, "findings": [{"learnt": [asdict(anonymous), asdict(replace(runs[0], settings="?"))]}]}
        )
    )
    with pytest.raises(ValueError, match="none of its 2 runs"):
        earlier_runs([str(tmp_path)], trial_runs)
    (tmp_path / "learning.json").write_text("[1]")
    with pytest.raises(ValueError, match="was not written by bench learning"):
        earlier_runs([str(tmp_path)], trial_runs)


_TINY = """
title = "tiny"
[options]
model = { name = "tests.models:plain", classes = 7 }
plan = { batch = 32, microbatches = 2 }
data = { samples = 64, image = 8 }
run = { epochs = 2 }
[[group]]
name = "R"
baseline = "sync"
[[group.trial]]
name = "sync"
options = { plan = { mode = "sync", placement = "0:0" } }
[[group.trial]]
name = "wild"
options = { plan = { mode = "sync", placement = "0:0" }, optimizer = { lr = 1e30 } }
"""


@soak
def test_a_study_from_file_to_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.toml").write_text(_TINY)
    options = ["--study", str(tmp_path / "tiny.toml"), "--data", "synthetic", "--seeds", "1", "--runs", str(tmp_path)]
    main(["bench", "learning", *options, "--json"])
    told = json.loads(capsys.readouterr().out)
    folder = Path(told["folder"])
    assert {path.name for path in folder.iterdir()} == {"learning.json", "report.md", "report.html", "logs.zip"}
    sync, wild = told["findings"]
    assert [score for score, _ in sync["learnt"][0]["scores"]] == [2, 4]
    (tmp_path / "later").mkdir()
    main(["bench", "learning", *options[:-1], str(tmp_path / "later"), "--reuse", str(folder), "--json"])
    later = json.loads(capsys.readouterr().out)
    assert [f["learnt"][0]["scores"] for f in later["findings"]] == [f["learnt"][0]["scores"] for f in told["findings"]]
    assert "2 runs are reused from" in (Path(later["folder"]) / "report.md").read_text()
    assert not (Path(later["folder"]) / "logs.zip").exists()  # nothing ran
    assert re.match(r"1 of 1 runs diverged: the loss of batch \d is (nan|inf)", wild["verdict"])
