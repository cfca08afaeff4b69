"""A study from its file to a folder, and what it concludes from its runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.learning.runs import TrainedRun
from benchmarks.learning.study import default_jobs, make_study, measured_speeds
from benchmarks.learning.trials import StudyOptions, open_study, trial_runs_of
from tests.marks import soak

TINY = """
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


def test_measured_speed_is_the_median_of_real_runs() -> None:
    options = StudyOptions(data="synthetic", seeds=3, only="ResNet-18, 4", is_real=True)
    asked = trial_runs_of(options, open_study(options))
    of_lag_1 = [trial_run for trial_run in asked if "lag 1" in trial_run.key[1]]
    rates = (100.0, 300.0, 120.0)
    learnt = [TrainedRun(*one.key, one.seed, ((3, 0.5),), 3, rate) for one, rate in zip(of_lag_1, rates, strict=True)]
    speed = measured_speeds(asked, learnt)["ResNet-18", "4 stages, lag 1"]
    assert (speed.images_per_second, speed.source, speed.devices) == (120.0, "measured here", 4)
    assert default_jobs(StudyOptions(is_real=True), asked) == 1 and default_jobs(StudyOptions(), asked) >= 1


def test_a_study_knows_its_samples_baselines_and_targets() -> None:
    options = StudyOptions(data="synthetic", seeds=1, only="ResNet-18")
    asked = trial_runs_of(options, open_study(options))
    learnt = [TrainedRun(*trial_run.key, 0, ((6, 0.9),), 3) for trial_run in asked]
    study = make_study("t", "c", asked, learnt, {}, 85.0)
    assert [finding.is_baseline for finding in study.findings] == [True] + [False] * (len(asked) - 1)
    assert study.targets == {"ResNet-18": 0.85} and {finding.samples for finding in study.findings} == {3 * 512}
    assert make_study("t", "c", asked, learnt, {}, None).targets == {"ResNet-18": 0.89}


@soak
def test_a_study_leaves_reports_and_can_be_reused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    options = ["--study", str(tmp_path / "tiny.toml"), "--data", "synthetic", "--seeds", "1", "--runs", str(tmp_path)]
    main(["learning", *options, "--json"])
    first = json.loads(capsys.readouterr().out)
    folder = Path(first["folder"])
    assert {path.name for path in folder.iterdir()} == {"learning.json", "report.md", "report.html", "logs.zip"}
    sync, wild = first["findings"]
    assert [score for score, _ in sync["learnt"][0]["scores"]] == [2, 4]
    (tmp_path / "later").mkdir()
    main(["learning", *options[:-1], str(tmp_path / "later"), "--reuse", str(folder), "--json"])
    later = json.loads(capsys.readouterr().out)
    assert [f["learnt"][0]["scores"] for f in later["findings"]] == [
        f["learnt"][0]["scores"] for f in first["findings"]
    ]
    assert "2 runs are reused from" in (Path(later["folder"]) / "report.md").read_text()
    assert not (Path(later["folder"]) / "logs.zip").exists()  # nothing ran
    assert re.match(r"1 of 1 runs diverged: the loss of batch \d is (nan|inf)", wild["verdict"])
