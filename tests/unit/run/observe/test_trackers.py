"""`--track`, with stand-ins for the packages of the trackers."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagewright.cli.main import main
from stagewright.config.toml import make_config
from stagewright.events import Evaluated, GpuUsage, RankUsage, Saved, Step, Usage
from stagewright.metrics import ThroughputUnit
from stagewright.run.observe.trackers import require_tracker, tracked, values_of
from stagewright.voice import SILENT, Voice

STEP = Step(4, 0, 2.5, 0.1, 1.0, 300.0)
USE = Usage(1.0, 2.0, 900, (GpuUsage("GPU-a", 3, 80, 0.5, 250.0),), (RankUsage(1, 70, 0.5, 60),))


class Log:
    """Everything that any stand-in was given, and what it does when it gets something."""

    def __init__(self) -> None:
        self.on_log: Callable[[], object] = lambda: None
        self.values: list[tuple[int, str, float]] = []
        self.config: Any = None
        self.is_closed = False


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    given = Log()

    class Writer:
        def __init__(self, folder: str) -> None:
            self.folder = folder

        def add_text(self, name: str, text: str, step: int) -> None:
            given.config = text

        def add_scalar(self, name: str, value: float, step: int) -> None:
            given.values.append((step, name, value))

        def close(self) -> None:
            given.is_closed = True

    class Run:
        info = types.SimpleNamespace(run_id="r1")

        def __enter__(self) -> Run:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def log(self, values: dict[str, float], step: int) -> None:
            given.on_log()
            given.values += [(step, name, value) for name, value in values.items()]

        def finish(self) -> None:
            given.is_closed = True

    class Client:
        def update_run(self, run: str, status: str) -> None:
            assert (run, status) == ("r1", "RUNNING")

        def log_batch(self, run: str, metrics: list[tuple[str, float, int, int]]) -> None:
            given.values += [(step, name, value) for name, value, _, step in metrics]

        def set_terminated(self, run: str) -> None:
            given.is_closed = True

    def init(**options: Any) -> Run:
        given.config = options["config"]
        return Run()

    def log_params(parameters: dict[str, str]) -> None:
        given.config = parameters

    mlflow = {"start_run": lambda run_name: Run(), "log_params": log_params, "MlflowClient": Client}
    for name, members in {
        "tensorboard": {},
        "torch.utils.tensorboard": {"SummaryWriter": Writer},
        "wandb": {"init": init},
        "mlflow": mlflow,
        "mlflow.entities": {"Metric": lambda *fields: fields},
    }.items():
        made = types.ModuleType(name)
        made.__spec__ = importlib.util.spec_from_loader(name, None)
        for member, value in members.items():
            setattr(made, member, value)
        monkeypatch.setitem(sys.modules, name, made)
    return given


def config(tracker: str) -> Any:
    return make_config({"run": {"track": tracker, "seed": 7}})


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "mlflow"])
def test_every_tracker_gets_steps_evaluations_use_and_configuration(log: Log, tmp_path: Path, tracker: str) -> None:
    warnings: list[str] = []
    require_tracker(config(tracker))
    with tracked(config(tracker), tmp_path, Voice(warn=warnings.append)) as take:
        for record in (STEP, Evaluated(5, 10, 2.0, {"top1": 0.25, "top5": 0.5}), USE, Saved(5, 10, 0.1)):
            take(record)
    assert log.values[:3] == [(5, "train/loss", 2.5), (5, "train/lr", 0.1), (5, "train/images_per_second", 300.0)]
    assert (5, "eval/top1", 0.25) in log.values and (5, "use/gpu3/watts", 250.0) in log.values
    assert log.is_closed and not warnings and "run.seed" in log.config
    assert not [thread for thread in threading.enumerate() if thread.name == "tracker"]


def test_values_of_each_kind_of_event() -> None:
    assert values_of(STEP) == {"train/loss": 2.5, "train/lr": 0.1, "train/images_per_second": 300.0}
    assert values_of(Step(4, 0, 2.5, 0.1, 1.0, 300.0, 1024.0))["train/loss_scale"] == 1024.0
    assert values_of(USE) == {
        "use/machine/cores": 2.0,
        "use/machine/memory_bytes": 900.0,
        "use/rank1/memory_bytes": 70.0,
        "use/rank1/cores": 0.5,
        "use/rank1/torch_bytes": 60.0,
        "use/gpu3/memory_bytes": 80.0,
        "use/gpu3/utilisation": 0.5,
        "use/gpu3/watts": 250.0,
    }


def test_warns_once_when_a_tracker_fails(log: Log, tmp_path: Path) -> None:
    def fail() -> None:
        raise ConnectionError("no route\nto host")

    log.on_log = fail
    warnings: list[str] = []
    with tracked(config("wandb"), tmp_path, Voice(warn=warnings.append)) as take:
        for _ in range(3):
            take(STEP)
    (warning,) = warnings
    assert "wandb" in warning and "ConnectionError: no route to host" in warning


def test_a_run_ends_although_its_tracker_hangs(log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed = threading.Event()
    monkeypatch.setattr("stagewright.run.observe.trackers.CLOSE_SECONDS", 0.1)
    monkeypatch.setattr("stagewright.run.observe.trackers.MOST_QUEUED", 2)
    log.on_log = lambda: freed.wait(30)
    warnings: list[str] = []
    with tracked(config("wandb"), tmp_path, Voice(warn=warnings.append)) as take:
        for _ in range(9):
            take(STEP)
    freed.set()
    assert len(warnings) == 2 and "loses some" in warnings[0] and "0 s" in warnings[1]


def test_a_tracker_that_cannot_start_is_one_line(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(**given: Any) -> None:
        raise RuntimeError("api_key not configured\n(no-tty)")

    monkeypatch.setattr(sys.modules["wandb"], "init", init)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--emulate", "--steps", "1", "--batch", "4", "--runs", str(tmp_path), "--track", "wandb"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert "--track wandb could not start: RuntimeError: api_key not configured (no-tty)" in error


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_one_line(
    tracker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--track", tracker, "--runs", str(tmp_path)])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and f"pip install {tracker}" in error
    assert not list(tmp_path.iterdir())


def test_a_run_sends_its_events_to_the_tracker(log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--emulate", "--steps", "3", "--batch", "4", "--samples", "8", "--eval-every", "0", "--json",
          "--runs", str(tmp_path), "--track", "mlflow"])  # fmt: skip
    summary = json.loads(capsys.readouterr().out)
    losses = [(step, value) for step, name, value in log.values if name == "train/loss"]
    assert [step for step, _ in losses] == [1, 2, 3] and losses[-1][1] == summary["loss"]
    assert [step for step, name, _ in log.values if name == "eval/top1"] == [3]
    assert any(name == "use/rank0/memory_bytes" for _, name, _ in log.values) and log.is_closed


def test_metrics_and_the_unit_of_throughput_have_their_names() -> None:
    assert values_of(Evaluated(5, 10, 2.0, {"mae": 0.5, "iou/3": 1.0})) == {
        "eval/loss": 2.0,
        "eval/mae": 0.5,
        "eval/iou/3": 1.0,
    }
    assert values_of(STEP, ThroughputUnit("tokens", 256))["train/tokens_per_second"] == 256 * 300.0


def test_no_tracker_is_imported_by_default(tmp_path: Path) -> None:
    require_tracker(make_config())
    before = set(sys.modules)
    with tracked(make_config(), tmp_path, SILENT) as take:
        take(STEP)
    assert not {"wandb", "mlflow", "tensorboard"} & (set(sys.modules) - before) and not list(tmp_path.iterdir())


def test_writes_tensorboard_files_where_it_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with tracked(config("tensorboard"), tmp_path, SILENT) as take:
        take(STEP)
    assert list((tmp_path / "tensorboard").iterdir())
