"""Hands a run's records to a tracker that the user chose; what goes wrong with one is a warning."""

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

from stagewright.config.load import as_tables
from stagewright.config.sections import Config
from stagewright.events import Evaluated, Step, Use

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_PATIENCE = 30.0  # seconds for what is still to be told when the run ends
_MOST_WAITING = 100_000
_LONGEST_PARAMETER = 250  # characters that mlflow takes


class Tracker(Protocol):
    """Where numbers go."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def require_tracker(config: Config) -> None:
    """An error where the tracker's package is not installed."""
    package = _PACKAGES.get(config.run.track)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(
            f"--track {config.run.track} needs the package {package}, which is not installed; pip install {package}"
        )


@contextmanager
def tracked(config: Config, folder: Path, warn: Callable[[str], None]) -> Iterator[Callable[[object], None]]:
    """Give back what takes records; they are told by a thread of its own, so that no run waits for a tracker."""
    if config.run.track == "none":
        yield lambda record: None
        return
    telling = _Telling(_open(config, folder), config.run.track, warn)
    try:
        yield telling.take
    finally:
        telling.close()


class _Telling:
    """A thread that tells a tracker one record after the other."""

    def __init__(self, tracker: Tracker, name: str, warn: Callable[[str], None]) -> None:
        self._tracker = tracker
        self._name = name
        self._warn = warn
        self._step = 0
        self._is_behind = False
        self._records: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._tell, name="tracker", daemon=True)
        self._thread.start()

    def take(self, record: object) -> None:
        """Keep a record until the tracker has time for it; a tracker that is far behind loses some."""
        if self._thread.is_alive() and self._records.qsize() < _MOST_WAITING:
            self._records.put(record)
        elif self._thread.is_alive() and not self._is_behind:
            self._is_behind = True
            self._warn(f"{self._name} is {_MOST_WAITING} records behind and loses some; the run's own files have all")

    def close(self) -> None:
        self._records.put(None)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            self._warn(f"{self._name} did not take everything within {_PATIENCE:.0f} s; the run's own files have it")

    def _tell(self) -> None:
        try:
            while (record := self._records.get()) is not None:
                values = values_of(record)
                self._step = record.batch + 1 if isinstance(record, Step) else self._step
                if values:
                    self._tracker.log(self._step, values)
            self._tracker.close()
        except Exception as error:  # a network, a full disk, another release of the package
            words = " ".join(str(error).split())[:200]
            self._warn(f"{self._name} stopped taking records: {type(error).__name__}: {words}; the run goes on")


def values_of(record: object) -> dict[str, float]:
    """The numbers of a record, by the names that trackers show."""
    if isinstance(record, Step):
        found = {"loss": record.loss, "lr": record.lr, "images_per_second": record.images_per_second}
        found |= {} if record.loss_scale is None else {"loss_scale": record.loss_scale}
        return {f"train/{name}": value for name, value in found.items()}
    if isinstance(record, Evaluated):
        return {"eval/loss": record.loss, "eval/top1": record.top1, "eval/top5": record.top5}
    return _use(record) if isinstance(record, Use) else {}


def _use(use: Use) -> dict[str, float]:
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
        raise ValueError(
            f"--track {config.run.track} could not start: {type(error).__name__}: {words}; "
            "set it up by its own settings, or leave --track out"
        ) from error


class _TensorBoard:
    def __init__(self, folder: Path, parameters: Mapping[str, Any]) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"))
        rows = "\n".join(f"| {name} | {value} |" for name, value in parameters.items())
        self._writer.add_text("config", f"| option | value |\n|---|---|\n{rows}", 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Online, offline or off is wandb's own setting (WANDB_MODE)."""

    def __init__(self, folder: Path, parameters: Mapping[str, Any]) -> None:
        module = importlib.import_module("wandb")
        self._run = module.init(project="stagewright", name=folder.name, dir=str(folder), config=dict(parameters))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """Where it keeps runs is mlflow's own setting (MLFLOW_TRACKING_URI)."""

    def __init__(self, folder: Path, parameters: Mapping[str, Any]) -> None:
        mlflow = importlib.import_module("mlflow")
        with mlflow.start_run(run_name=folder.name) as run:  # no longer: an active run belongs to one thread
            mlflow.log_params({name: str(value)[:_LONGEST_PARAMETER] for name, value in parameters.items()})
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
