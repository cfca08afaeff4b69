"""Which runs a study trains, and which studies are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.learning import study
from benchmarks.learning.trials import StudyOptions, open_study, trial_runs_of


def test_the_shipped_study_trains_every_trial_with_every_seed() -> None:
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
        ([], "needs training and validation data; give --data and --val"),
        (["--data", "synthetic", "--seeds", "0"], "--seeds is 0; give at least 1"),
        (["--data", "synthetic", "--target", "120"], "--target is 120; give at least 0.01 and at most 100"),
        (["--data", "synthetic", "--study", "/nowhere.toml"], "/nowhere.toml: No such file"),
        (["--data", "synthetic", "--jobs", "0"], "--jobs is 0; give at least 1"),
        (["--data", "synthetic", "--jobs", "2", "--real"], "--jobs 2 changes nothing with --real"),
        (["--data", "ofrecord:x"], "--data ofrecord:x gives training data only; give --val as well"),
        (["--data", "synthetic", "--set", "run.steps=5"], "run.steps is 5, but a study trains whole epochs"),
        (["--data", "synthetic", "--set", "run.seed=5"], "run.seed is 5, but a study trains whole epochs"),
        (
            ["--data", "synthetic", "--reuse", "/nowhere"],
            "/nowhere/learning.json: No such file or directory; give a",
        ),
        (["--data", "synthetic", "--reuse", "/nowhere", "--real"], "--reuse /nowhere can't be used with --real"),
        (["--data", "synthetic", "--only", "nothing"], "--only 'nothing' matches none of 12"),
    ],
)
def test_bad_options_are_reported_in_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "train_runs", None)  # nothing is trained
    with pytest.raises(SystemExit) as caught:
        main(["learning", *arguments])
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
def test_refuses_what_a_study_would_ignore(
    head: str, options: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "study.toml"
    study.write_text(f'title = "x"\n{head}\n[[group]]\nname = "g"\n[[group.trial]]\nname = "t"\noptions = {options}\n')
    with pytest.raises(SystemExit):
        main(["learning", "--study", str(study), "--data", "synthetic", "--runs", str(tmp_path / "runs")])
    assert line in capsys.readouterr().err
