"""Runs of a study as commands: how many at the same time, which are reused, and what counts as diverged."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.learning import runs
from benchmarks.learning.findings import Study
from benchmarks.learning.pages import describe_study, study_page
from benchmarks.learning.runs import TrainedRun, earlier_runs, train_runs
from benchmarks.learning.trials import StudyOptions, TrialRun, open_study, trial_runs_of
from stagewright.bench.anonymous import make_cleaner
from stagewright.config.toml import make_config
from stagewright.errors import RunFailed
from stagewright.events import Evaluated, Step, encode
from stagewright.report.markdown import as_markdown
from stagewright.run.train import run
from stagewright.voice import SILENT
from tests.benchmarks.learning.made import findings, trained


def steps_of(count: int, per_epoch: int) -> list[Step]:
    return [Step(batch, batch // per_epoch, 1.0, 0.1, 1.0, 64.0) for batch in range(count)]


class FakeCommand:
    """A stand-in for a training command: it ends when polled a second time, a fourth beside one that fails."""

    alive: ClassVar[list[FakeCommand]] = []
    stopped: ClassVar[int | None] = None  # how many were still running when the launcher's context ended
    most: ClassVar[int] = 0
    error: ClassVar[str] = ""  # of those whose seed is 1

    def __init__(self, words: list[str], stdout: Path, stderr: Path) -> None:
        settings = Path(words[words.index("--config") + 1])
        self.looks = 0
        self.is_faulty = bool(self.error) and "seed = 1" in settings.read_text()
        folder = settings.parent / "runs" / "one"
        folder.mkdir(parents=True)
        records = [*steps_of(6, 3), Evaluated(6, 8, 1.0, {"top1": 0.5, "top5": 0.9})]
        (folder / "metrics.jsonl").write_text("\n".join(map(encode, records)) + '\n{"batch": 7, "to')
        stdout.write_text(json.dumps({"images_per_second": 12.5}))
        stderr.write_text(f"a warning\nstagewright: {self.error if self.is_faulty else 'fine'}\n")
        FakeCommand.alive.append(self)
        FakeCommand.most = max(FakeCommand.most, len(FakeCommand.alive))

    def poll(self) -> int | None:
        self.looks += 1
        return self.wait() if self.looks > (1 if self.is_faulty or not self.error else 3) else None

    def wait(self) -> int:
        if self in FakeCommand.alive:
            FakeCommand.alive.remove(self)
        return 2 if self.is_faulty else 0


class FakeChildren:
    """The launcher of those commands; leaving its context stops those that run."""

    def __enter__(self) -> FakeChildren:
        return self

    def __exit__(self, *_: object) -> None:
        FakeCommand.stopped = len(FakeCommand.alive)

    def start(self, words: list[str], environment: dict[str, str], *, stdout: Path, stderr: Path) -> FakeCommand:
        assert environment == {"OMP_NUM_THREADS": "1"}
        return FakeCommand(words, stdout, stderr)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> type[FakeCommand]:
    monkeypatch.setattr(runs, "Children", FakeChildren)
    monkeypatch.setattr(runs, "POLL_SECONDS", 0.0)
    for name, value in (("alive", []), ("most", 0), ("stopped", None), ("error", "")):
        monkeypatch.setattr(FakeCommand, name, value)
    return FakeCommand


def trial_runs(seeds: int = 2, **changes: Any) -> list[TrialRun]:
    options = StudyOptions(data="synthetic", seeds=seeds, only="ResNet-18, 4", **changes)
    return trial_runs_of(options, open_study(options))


def trained_from(asked: list[TrialRun], jobs: int, folder: Path, known: list[TrainedRun]) -> list[list[TrainedRun]]:
    calls: list[list[TrainedRun]] = []
    train_runs(asked, jobs, folder, SILENT, lambda found: calls.append(list(found)), known)
    return calls


def test_trains_every_run_with_at_most_jobs_at_the_same_time(command: type[FakeCommand], tmp_path: Path) -> None:
    asked = trial_runs()
    calls = trained_from(asked, 4, tmp_path, [])
    assert command.most == 4 and command.stopped == 0
    assert [len(found) for found in calls] == list(range(1, len(asked) + 1))
    assert {(run.key, run.seed) for run in calls[-1]} == {(trial_run.key, trial_run.seed) for trial_run in asked}
    assert all(run.scores == ((6, 0.5),) and run.per_epoch == 3 and run.rate is None for run in calls[-1])
    assert {run.settings for run in calls[-1]} == {trial_run.settings for trial_run in asked}


def test_does_not_train_known_runs(command: type[FakeCommand], tmp_path: Path) -> None:
    asked = trial_runs()
    known = [TrainedRun(*trial_run.key, trial_run.seed, (), 3, settings=trial_run.settings) for trial_run in asked[:-1]]
    calls = trained_from(asked, 4, tmp_path, known)
    assert command.most == 1 and [len(found) for found in calls] == [len(asked) - 1, len(asked)]
    assert (
        len(trained_from(asked, 4, tmp_path / "none", [*known, *calls[-1][-1:]])) == 1
    )  # called once, although none runs


@pytest.mark.parametrize(
    "error",
    [
        "the loss of batch 14 is nan (stage 1)",
        "the loss of batch 3 is -inf; x",
        "gradients overflow fp16 at any loss scale (batch 9)",
    ],
)
def test_a_diverged_run_is_a_result(error: str, command: type[FakeCommand], tmp_path: Path) -> None:
    command.error = error
    calls = trained_from(trial_runs(), 8, tmp_path, [])[-1]
    assert {run.seed: bool(run.diverged) for run in calls} == {0: False, 1: True}
    assert error.startswith(next(run.diverged for run in calls if run.diverged))


def test_recognises_the_error_of_a_run_that_diverges(tmp_path: Path) -> None:
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": "tests.models:plain", "classes": 7},
        "data": {"samples": 64, "image": 8},
        "plan": {"batch": 32, "microbatches": 2, "placement": "0:0", "mode": "sync"},
        "optimizer": {"lr": 1e30},
        "run": {"steps": 8, "emulate": True, "runs": str(tmp_path)},
    }
    with pytest.raises((ValueError, RunFailed)) as caught:
        run(make_config(tables))
    assert runs.DIVERGED.search(str(caught.value))


def test_any_other_failure_ends_all_runs(command: type[FakeCommand], tmp_path: Path) -> None:
    command.error = "no such file"
    with pytest.raises(ValueError, match=r"seed 1: no such file; its files are .*logs.zip:3"):
        trained_from(trial_runs(seeds=3), 5, tmp_path, [])
    assert command.stopped is not None and command.stopped > 0


def test_batches_per_epoch_are_those_of_the_first_epoch(tmp_path: Path) -> None:
    (tmp_path / "runs" / "x").mkdir(parents=True)
    file = tmp_path / "runs" / "x" / "metrics.jsonl"
    for steps, per_epoch in ((2, 2), (5, 5), (8, 5)):
        file.write_text("".join(f"{encode(step)}\n" for step in steps_of(steps, 5)))
        assert runs.batches_per_epoch(tmp_path) == per_epoch


def write_study(folder: Path, runs: list[TrainedRun]) -> str:
    study = Study("Lag", "2026-01-01", "stagewright", {"GPU": folder.name}, tuple(findings(*runs)), {})
    folder.mkdir()
    (folder / "learning.json").write_text(json.dumps(describe_study(study)))
    return str(folder)


def test_reuses_runs_with_equal_settings_under_their_new_names(tmp_path: Path) -> None:
    options = StudyOptions(data="tensors:a", val="tensors:b", seeds=2, only="ResNet-18")
    trial_runs = trial_runs_of(options, open_study(options))
    first, second = trial_runs[1], trial_runs[-1]
    runs = [
        replace(
            trained("other", first.seed, 0.5, 0.75), settings=first.settings.replace("cutout = 0\n", "")
        ),  # written before that option existed
        replace(trained("other", second.seed, 0.5, diverged="nan"), settings=second.settings),
        replace(trained("other", 7, 0.9), settings="of nobody"),
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
    study = Study("Lag", "2026-01-01", "stagewright", {}, tuple(findings(*(replace(r, group="R") for r in known))), {})
    text = as_markdown(study_page(replace(study, elsewhere={"x": {"GPU": "one"}, "y": {"GPU": "one"}})))
    assert (
        "Environment of reused runs" in text and "Runs of x, y." in text and "## Environment\n" not in text
    )  # nothing ran here
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "learning.json").write_text(
        json.dumps(describe_study(replace(study, elsewhere=earlier.machines)))
    )
    assert (
        earlier_runs([str(tmp_path / "c")], trial_runs).machines == earlier.machines
    )  # through a study that itself reused them
    waiting = [trial_run for trial_run in trial_runs if trial_run.settings not in {run.settings for run in known}]
    assert len(waiting) == len(trial_runs) - 2


def test_refuses_to_reuse_a_study_without_equal_settings(tmp_path: Path) -> None:
    options = StudyOptions(data="tensors:a", val="tensors:b", seeds=1, only="ResNet-18")
    trial_runs = trial_runs_of(options, open_study(options))
    settings = trial_runs[0].settings.replace("epochs = 60", "epochs = 40")
    runs = [replace(trained(trial_runs[0].key[1], 0, 0.5), group="ResNet-18", settings=settings)]
    tables = {"machine": {}, "elsewhere": {}, "findings": [{"learnt": [asdict(run) for run in runs]}]}
    (tmp_path / "learning.json").write_text(json.dumps(tables))
    with pytest.raises(ValueError, match=r"none of its 1 runs .* of the 6 asked for; "):
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
    with pytest.raises(ValueError, match="was not written by a study"):
        earlier_runs([str(tmp_path)], trial_runs)
