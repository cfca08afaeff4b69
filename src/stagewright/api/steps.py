"""What a script's loop sees of each batch, and the batches that it may bring itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from stagewright.data.own import Samples, fields_of

_PACKAGE = str(Path(__file__).parents[1])


class Step:
    """One trained batch, as a script's loop sees it; the same on every rank."""

    def __init__(self, batch: int, epoch: int, lr: float, loss: Callable[[], float], *, is_replayed: bool) -> None:
        self.batch = batch  # from 0, over the whole run
        self.epoch = epoch  # from 0
        self.lr = lr  # of the first group of parameters
        self.is_replayed = is_replayed  # trained before the run was resumed: seen again, not trained again
        self._loss = loss
        self._known: float | None = None

    @property
    def loss(self) -> float:
        """The mean loss of the batch; reading it waits for the device."""
        if self._known is None:
            self._known = self._loss()
        return self._known

    def __repr__(self) -> str:
        return f"Step(batch={self.batch}, epoch={self.epoch}, loss={self.loss:.6g}, lr={self.lr:g})"


class OneBatch:
    """The samples of one batch, as a dataset."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._fields = fields_of(batch, "a batch")

    def __len__(self) -> int:
        return len(next(iter(self._fields.values())))

    def __getitem__(self, index: int) -> Any:
        if isinstance(self._batch, torch.Tensor):
            return self._batch[index]
        if isinstance(self._batch, dict):
            return {name: tensor[index] for name, tensor in self._batch.items()}
        return tuple(tensor[index] for tensor in self._batch)


def batches_of(data: Any) -> Iterable[Any] | None:
    """Data that are batches to iterate over; None where they are samples by index."""
    if isinstance(data, DataLoader | IterableDataset):
        return data
    return data if isinstance(data, Iterable) and not isinstance(data, str | tuple | Samples) else None


def where_called() -> str:
    """The file and line of the script that called the engine."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "?" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
