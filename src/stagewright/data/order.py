"""The one global order of samples: a pure function of seed, epoch and position. Where a run is in its data: enough to go on from there, and to see that the data is still the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, samples: int) -> Indices:
    """A permutation drawn from a counter-based generator keyed by seed and epoch."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(samples)


@dataclass(frozen=True, slots=True)
class Order:
    """Which samples make up which batch; the same for every plan."""

    samples: int
    batch: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.samples < self.batch:
            raise ValueError(
                f"the data set has {self.samples} samples but a batch takes {self.batch}; "
                f"use --batch {self.samples} or less"
            )

    @property
    def batches(self) -> int:
        """Batches of an epoch; the partial one at its end is dropped."""
        return self.samples // self.batch

    def epoch_of(self, batch: int) -> int:
        return batch // self.batches

    def microbatch(self, number: int, microbatches: int) -> Indices:
        """The samples of microbatch `number` of the whole run, `microbatches` of which make a batch."""
        batch, piece = divmod(number, microbatches)
        epoch, position = divmod(batch, self.batches)
        size = self.batch // microbatches
        first = position * self.batch + piece * size
        if not self.shuffle:
            return np.arange(first, first + size)
        return permutation(self.seed, epoch, self.samples)[first : first + size]


class DataChanged(ValueError):
    """The data set is not the one that a run began with."""


@dataclass(frozen=True, slots=True)
class Position:
    """The next batch of a run: its number within an epoch, and the data set it counts in."""

    seed: int
    epoch: int
    batch: int  # of the epoch
    fingerprint: str

    @staticmethod
    def at(order: Order, batch: int, fingerprint: str) -> Position:
        """The position before batch `batch` of the whole run."""
        epoch, within = divmod(batch, order.batches)
        return Position(order.seed, epoch, within, fingerprint)

    def counted_by(self, batch: int, order: Order) -> Position:
        """The same place in batches of another size; `batch` is the size it is counted in so far."""
        samples = self.batch * batch
        if samples % order.batch:
            raise DataChanged(
                f"the checkpoint is {samples} samples into its epoch, which --batch {order.batch} does not divide; "
                f"use --batch {batch}"
            )
        return replace(self, batch=samples // order.batch)

    def resume(self, order: Order, fingerprint: str) -> int:
        """The batch of the whole run to go on with; an error if the samples would be others."""
        if fingerprint != self.fingerprint:
            raise DataChanged(
                f"the data set changed: its fingerprint is {fingerprint}, but the checkpoint was made with "
                f"{self.fingerprint}; put the old data back, or start a new run"
            )
        if order.seed != self.seed:
            raise DataChanged(
                f"--seed is {order.seed} but the checkpoint was made with {self.seed}; use --seed {self.seed}"
            )
        if self.batch >= order.batches:
            raise DataChanged(
                f"the checkpoint is at batch {self.batch} of its epoch, but an epoch has {order.batches} batches of "
                f"{order.batch}; use the --batch of the checkpoint"
            )
        return self.epoch * order.batches + self.batch
