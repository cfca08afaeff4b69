"""How samples are loaded, and how many of them may be bad. Which samples the microbatches of a run have, and which of them a rank will ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import torch

from stagewright.data.order import Indices, Order
from stagewright.data.records import DataError
from stagewright.data.sources import Bad, Draw


class Decode(StrEnum):
    """Where images are decoded."""

    CPU = "cpu"
    GPU = "gpu"
    ONCE = "once"  # on the CPU, and kept on the device


@dataclass(frozen=True, slots=True)
class Loading:
    """The type and device of samples, the threads, how far they work ahead, and how many records may be bad."""

    dtype: torch.dtype = torch.float32
    threads: int = 1
    ahead: int = 4  # microbatches
    max_bad: int = 0
    tell: Callable[[Bad], None] = lambda bad: None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    decode: Decode = Decode.CPU

    def __post_init__(self) -> None:
        for flag, value, least in (("--loader-threads", self.threads, 1), ("--ahead", self.ahead, 0)):
            if value < least:
                raise ValueError(f"{flag} is {value}; give at least {least}")
        if self.max_bad < 0:
            raise ValueError(f"--max-bad is {self.max_bad}; give the bad records to allow, from 0 on")


class BadRecords:
    """Records that could not be used, each counted once; too many end the run."""

    def __init__(self, loading: Loading) -> None:
        self._most = loading.max_bad
        self._tell = loading.tell
        self._seen: set[int] = set()

    def count(self, bad: Bad) -> None:
        if bad.index in self._seen:
            return
        self._seen.add(bad.index)
        self._tell(bad)
        if len(self._seen) > self._most:
            raise DataError(
                f"{len(self._seen)} bad records, {self._most} are allowed; the last: {bad.reason}; "
                "mend the data, or allow more with --max-bad"
            )


class Numbering(Protocol):
    """The samples of each microbatch."""

    @property
    def size(self) -> int:
        """The most samples a microbatch has."""
        ...

    def indices(self, number: int) -> Indices: ...

    def draw(self, number: int) -> Draw | None:
        """What chooses the samples' random part; nothing in evaluation."""
        ...


@dataclass(frozen=True, slots=True)
class Training:
    """Microbatches of the run's order, augmented anew each epoch."""

    order: Order
    microbatches: int

    @property
    def size(self) -> int:
        return self.order.batch // self.microbatches

    def indices(self, number: int) -> Indices:
        return self.order.microbatch(number, self.microbatches)

    def draw(self, number: int) -> Draw:
        return Draw(self.order.seed, self.order.epoch_of(number // self.microbatches))


@dataclass(frozen=True, slots=True)
class Pieces:
    """Every sample once, from the first to the last; the last piece may be short."""

    samples: int
    size: int

    def indices(self, number: int) -> Indices:
        first = number * self.size
        return np.arange(first, min(first + self.size, self.samples))

    def draw(self, number: int) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Share:
    """The microbatches one replica asks for: every `step`-th of a numbering, before `stop`."""

    numbering: Numbering
    step: int
    stop: int
