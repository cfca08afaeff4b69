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
from typing import Any

from stagewright.config.sections import Config
from stagewright.config.toml import as_tables
from stagewright.errors import UserError, printable
from stagewright.events import Evaluated, Step, Usage
from stagewright.metrics import IMAGES, ThroughputUnit
from stagewright.report.markdown import as_row
from stagewright.voice import Voice

CLOSE_SECONDS = 30.0  # to send what is still queued when the run ends
MOST_QUEUED = 100_000  # events
_LONGEST_PARAMETER = 250  # characters that MLflow accepts


# What of a tracking service a run needs: a function that gets a step and its values, and one that ends it.
Tracker = tuple[Callable[[int, Mapping[str, float]], object], Callable[[], object]]


def require_tracker(config: Config) -> None:
    """An error where the tracker's package is not installed."""
    name = config.run.track  # packages have the names of their trackers
    if name in _OPEN and importlib.util.find_spec(name) is None:
        raise UserError(f"--track {name} needs the package {name}, which is not installed; pip install {name}")


@contextmanager
def tracked(
    config: Config, folder: Path, voice: Voice, unit: ThroughputUnit = IMAGES
) -> Iterator[Callable[[object], None]]:
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

    def __init__(self, tracker: Tracker, name: str, voice: Voice, unit: ThroughputUnit = IMAGES) -> None:
        self._unit = unit
        self._log, self._close = tracker
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
                    self._log(self._step, values)
            self._close()
        except Exception as error:  # of the network, the disk, another release of the package
            words = " ".join(str(error).split())[:200]
            self._voice.warn(f"{self._name} stopped taking events: {type(error).__name__}: {words}; training continues")


def values_of(event: object, unit: ThroughputUnit = IMAGES) -> dict[str, float]:
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


def _tensorboard(folder: Path, parameters: Mapping[str, Any]) -> Tracker:
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))
    rows = "\n".join(as_row((name, str(value))) for name, value in parameters.items())
    writer.add_text("config", f"| option | value |\n|---|---|\n{rows}", 0)

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(folder: Path, parameters: Mapping[str, Any]) -> Tracker:
    """wandb's own setting WANDB_MODE says whether it is online, offline or disabled."""
    init = importlib.import_module("wandb").init
    run = init(project="stagewright", name=folder.name, dir=str(folder), config=dict(parameters))
    return lambda step, values: run.log(dict(values), step=step), run.finish


def _mlflow(folder: Path, parameters: Mapping[str, Any]) -> Tracker:
    """mlflow's own setting MLFLOW_TRACKING_URI says where it keeps runs."""
    mlflow, metric = importlib.import_module("mlflow"), importlib.import_module("mlflow.entities").Metric
    with mlflow.start_run(run_name=folder.name) as run:  # closed at once: an active run belongs to one thread
        mlflow.log_params({name: printable(str(value))[:_LONGEST_PARAMETER] for name, value in parameters.items()})
    client, own = mlflow.MlflowClient(), run.info.run_id
    client.update_run(own, status="RUNNING")

    def log(step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        client.log_batch(own, metrics=[metric(name, value, now, step) for name, value in values.items()])

    return log, lambda: client.set_terminated(own)


_OPEN: Mapping[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
