"""`--track`: send the events of a run to TensorBoard, Weights & Biases or MLflow.

A thread sends them, so that training never waits for a tracker; once a run has started, what goes wrong is a warning.
"""

from __future__ import annotations

import importlib
import importlib.util
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from stagewright.config.sections import Config
from stagewright.config.toml import as_tables
from stagewright.errors import UserError, printable
from stagewright.events import Evaluated, Step, Usage
from stagewright.metrics import IMAGES, Unit
from stagewright.report.markdown import as_row
from stagewright.voice import Voice

CLOSE_SECONDS = 30.0  # to send what is still queued when the run ends
MOST_QUEUED = 100_000  # events
_LONGEST_PARAMETER = 250  # characters that MLflow accepts


class Tracker(Protocol):
    """The part of a tracking service that a run needs."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def require_tracker(config: Config) -> None:
    """An error where the tracker's package is not installed."""
    name = config.run.track  # packages have the names of their trackers
    if name in _OPEN and importlib.util.find_spec(name) is None:
        raise UserError(f"--track {name} needs the package {name}, which is not installed; pip install {name}")


@contextmanager
def tracked(config: Config, folder: Path, voice: Voice, unit: Unit = IMAGES) -> Iterator[Callable[[object], None]]:
    """Yield the function that takes the events of a run, and close the tracker at the end."""
    if config.run.track == "none":
        yield lambda event: None
        return
    sender = _Sender(_open(config, folder), config.run.track, voice, unit)
    try:
        yield sender.take
    finally:
        sender.close()


class _Sender:
    """A thread that sends events to a tracker, one after the other."""

    def __init__(self, tracker: Tracker, name: str, voice: Voice, unit: Unit = IMAGES) -> None:
        self._unit = unit
        self._tracker = tracker
        self._name = name
        self._voice = voice
        self._step = 0
        self._is_behind = False
        self._events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="tracker", daemon=True)
        self._thread.start()

    def take(self, event: object) -> None:
        """Queue an event; a tracker that is too far behind loses some."""
        if self._thread.is_alive() and self._events.qsize() < MOST_QUEUED:
            self._events.put(event)
        elif self._thread.is_alive() and not self._is_behind:
            self._is_behind = True
            self._voice.warn(f"{self._name} is {MOST_QUEUED} events behind and loses some; the run folder has them all")

    def close(self) -> None:
        self._events.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._voice.warn(
                f"{self._name} did not take all events in {CLOSE_SECONDS:.0f} s; the run folder has them all"
            )

    def _send(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                values = values_of(event, self._unit)
                self._step = event.batch + 1 if isinstance(event, Step) else self._step
                if values:
                    self._tracker.log(self._step, values)
            self._tracker.close()
        except Exception as error:  # of the network, the disk, another release of the package
            words = " ".join(str(error).split())[:200]
            self._voice.warn(f"{self._name} stopped taking events: {type(error).__name__}: {words}; training continues")


def values_of(event: object, unit: Unit = IMAGES) -> dict[str, float]:
    """The numbers of an event, by the names that trackers show; none for most kinds of events."""
    if isinstance(event, Step):
        found = {"loss": event.loss, "lr": event.lr}
        if event.images_per_second:
            found[f"{unit.name}_per_second"] = unit.of(event.images_per_second)
        found |= {} if event.loss_scale is None else {"loss_scale": event.loss_scale}
        return {f"train/{name}": value for name, value in found.items()}
    if isinstance(event, Evaluated):
        return {"eval/loss": event.loss} | {f"eval/{name}": value for name, value in event.metrics.items()}
    return _use(event) if isinstance(event, Usage) else {}


def _use(use: Usage) -> dict[str, float]:
    found: dict[str, float | None] = {"machine/cores": use.cores, "machine/memory_bytes": use.memory}
    for rank in use.ranks:
        found[f"rank{rank.rank}/memory_bytes"] = rank.memory
        found[f"rank{rank.rank}/cores"] = rank.cores
        found[f"rank{rank.rank}/torch_bytes"] = rank.torch_memory
    for gpu in use.gpus:
        found[f"gpu{gpu.index}/memory_bytes"] = gpu.memory
        found[f"gpu{gpu.index}/utilisation"] = gpu.utilisation
        found[f"gpu{gpu.index}/watts"] = gpu.power
        found[f"gpu{gpu.index}/celsius"] = gpu.temperature
    return {f"use/{name}": float(value) for name, value in found.items() if value is not None}


def _open(config: Config, folder: Path) -> Tracker:
    parameters = {
        f"{section}.{name}": value for section, values in as_tables(config).items() for name, value in values.items()
    }
    try:
        return _OPEN[config.run.track](folder, parameters)
    except Exception as error:
        words = " ".join(str(error).split())[:200]
        raise UserError(
            f"--track {config.run.track} could not start: {type(error).__name__}: {words}; "
            "set it up as its own manual says, or leave --track out"
        ) from error


class _TensorBoard:
    def __init__(self, folder: Path, parameters: Mapping[str, Any]) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"))
        rows = "\n".join(as_row((name, str(value))) for name, value in parameters.items())
        self._writer.add_text("config", f"| option | value |\n|---|---|\n{rows}", 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """wandb's own setting WANDB_MODE says whether it is online, offline or disabled."""

    def __init__(self, folder: Path, parameters: Mapping[str, Any]) -> None:
        module = importlib.import_module("wandb")
        self._run = module.init(project="stagewright", name=folder.name, dir=str(folder), config=dict(parameters))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """MLflow's own setting MLFLOW_TRACKING_URI says where it keeps runs."""

    def __init__(self, folder: Path, parameters: Mapping[str, Any]) -> None:
        mlflow = importlib.import_module("mlflow")
        with mlflow.start_run(run_name=folder.name) as run:  # closed at once: an active run belongs to one thread
            mlflow.log_params({name: printable(str(value))[:_LONGEST_PARAMETER] for name, value in parameters.items()})
        self._id = run.info.run_id
        self._client = mlflow.MlflowClient()
        self._client.update_run(self._id, status="RUNNING")
        self._metric = importlib.import_module("mlflow.entities").Metric

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[self._metric(name, value, now, step) for name, value in values.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self._id)


_OPEN: Mapping[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
}
