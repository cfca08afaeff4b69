"""Which samples the microbatches of a run have, and which of them a rank will ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stagewright.data.images import Draw
from stagewright.data.order import Indices, Order


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
