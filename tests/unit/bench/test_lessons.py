"""Lessons as commands: how many at a time, which are known, what they leave, and what counts as diverged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stagewright.bench.learning import runs
from stagewright.bench.learning.runs import TrainedRun, train_runs
from stagewright.bench.learning.study import default_jobs, make_study, measured_speeds
from stagewright.bench.learning.trials import StudyOptions, TrialRun, open_study, trial_runs_of


class Command:
    """A stand-in for a training command, over when it was looked at twice."""

    alive: ClassVar[list[Command]] = []
    most: ClassVar[int] = 0
    ended: ClassVar[list[str]] = []
    error: ClassVar[str] = ""  # of those whose seed is 1
    stubborn: ClassVar[bool] = False

    def __init__(self, words: list[str], stdout: Any, stderr: Any, env: dict[str, str]) -> None:
        settings = Path(words[words.index("--config") + 1])
        self.looks = 0
        self.is_faulty = bool(self.error) and "seed = 1" in settings.read_text()
        folder = settings.parent / "runs" / "one"
        folder.mkdir(parents=True)
        steps = [{"batch": batch, "epoch": batch // 3} for batch in range(6)]
        (folder / "metrics.jsonl").write_text(
            "\n".join(json.dumps(line) for line in [*steps, {"batch": 6, "top1": 0.5}]) + '\n{"batch": 7, "to'
        )
        stdout.write(json.dumps({"images_per_second": 12.5}))
        stderr.write(f"a warning\nstagewright: {self.error if self.is_faulty else 'fine'}\n")
        Command.alive.append(self)
        Command.most = max(Command.most, len(Command.alive))

    def poll(self) -> int | None:
        self.looks += 1
        return self.wait() if self.looks > 1 else None

    def wait(self, timeout: float | None = None) -> int:
        if self.stubborn and timeout is not None:
            raise runs.subprocess.TimeoutExpired("train", timeout)
        if self in Command.alive:
            Command.alive.remove(self)
        return 2 if self.is_faulty else 0

    def terminate(self) -> None:
        Command.ended.append("asked")

    def kill(self) -> None:
        Command.ended.append("killed")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> type[Command]:
    monkeypatch.setattr(runs.subprocess, "Popen", Command)
    monkeypatch.setattr(runs, "POLL_SECONDS", 0.0)
    for name, value in (("alive", []), ("most", 0), ("ended", []), ("error", ""), ("stubborn", False)):
        monkeypatch.setattr(Command, name, value)
    return Command


def trial_runs(seeds: int = 2, **changes: Any) -> list[TrialRun]:
    options = StudyOptions(data="synthetic", seeds=seeds, only="ResNet-18, 4", **changes)
    return trial_runs_of(options, open_study(options))


def learnt_from(asked: list[TrialRun], jobs: int, folder: Path, known: list[TrainedRun]) -> list[list[TrainedRun]]:
    heard: list[list[TrainedRun]] = []
    train_runs(asked, jobs, folder, lambda text: None, lambda found: heard.append(list(found)), known)
    return heard


def test_every_lesson_runs_so_many_at_a_time_and_all_are_heard_of(command: type[Command], tmp_path: Path) -> None:
    asked = trial_runs()
    heard = learnt_from(asked, 4, tmp_path, [])
    assert command.most == 4 and not command.ended
    assert [len(found) for found in heard] == list(range(1, len(asked) + 1))
    assert {(run.key, run.seed) for run in heard[-1]} == {(trial_run.key, trial_run.seed) for trial_run in asked}
    assert all(run.scores == ((6, 0.5),) and run.per_epoch == 3 and run.rate is None for run in heard[-1])
    assert {run.settings for run in heard[-1]} == {trial_run.settings for trial_run in asked}


def test_known_lessons_do_not_run(command: type[Command], tmp_path: Path) -> None:
    asked = trial_runs()
    known = [TrainedRun(*trial_run.key, trial_run.seed, (), 3, settings=trial_run.settings) for trial_run in asked[:-1]]
    heard = learnt_from(asked, 4, tmp_path, known)
    assert command.most == 1 and [len(found) for found in heard] == [len(asked) - 1, len(asked)]
    assert (
        len(learnt_from(asked, 4, tmp_path / "none", [*known, *heard[-1][-1:]])) == 1
    )  # told once, although none runs


@pytest.mark.parametrize(
    "error",
    [
        "the loss of batch 14 is nan (stage 1)",
        "the loss of batch 3 is -inf; x",
        "gradients overflow fp16 at any loss scale (batch 9)",
    ],
)
def test_a_lag_that_is_too_much_is_a_result(error: str, command: type[Command], tmp_path: Path) -> None:
    command.error = error
    heard = learnt_from(trial_runs(), 8, tmp_path, [])[-1]
    assert {bool(run.diverged) for run in heard if run.seed == 1} == {True} and heard[0].diverged == ""
    assert error.startswith(next(run.diverged for run in heard if run.diverged))


@pytest.mark.parametrize(("stubborn", "ended"), [(False, {"asked"}), (True, {"asked", "killed"})])
def test_another_failure_ends_all_of_them(
    stubborn: bool, ended: set[str], command: type[Command], tmp_path: Path
) -> None:
    command.error = "no such file"
    command.stubborn = stubborn
    with pytest.raises(ValueError, match=r"seed 1: no such file; its files are .*logs.zip:3"):
        learnt_from(trial_runs(seeds=3), 5, tmp_path, [])
    assert set(command.ended) == ended


def test_epochs_are_counted_as_far_as_a_run_came(tmp_path: Path) -> None:
    (tmp_path / "runs" / "x").mkdir(parents=True)
    file = tmp_path / "runs" / "x" / "metrics.jsonl"
    for steps, per_epoch in ((2, 2), (5, 5), (8, 5)):
        file.write_text("".join(json.dumps({"batch": b, "epoch": b // 5}) + "\n" for b in range(steps)))
        assert runs.batches_per_epoch(tmp_path) == per_epoch


def test_times_are_the_median_of_real_runs_one_at_a_time() -> None:
    asked = trial_runs(seeds=3, is_real=True)
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
