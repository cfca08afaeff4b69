"""Which samples make up which batch: the same order for every plan, a pure function of seed, epoch and position.

`Order` is the order of a run, samplers cut it into microbatches, a `ReplicaSlice` is what one replica loads of it, and
a `Position` is the place in it that a checkpoint saves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np

from stagewright.data.formats.fields import Indices as Indices
from stagewright.errors import UserError, counted


class DataChanged(UserError):
    """The data set is not the one that the run started with."""


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
            raise UserError(
                f"the data set has {counted(self.samples, 'sample')} but a batch takes {self.batch}; "
                f"use --batch {self.samples} or less"
            )

    @property
    def batches(self) -> int:
        """Batches per epoch; the partial batch at the end is dropped."""
        return self.samples // self.batch

    def microbatch(self, number: int, microbatches: int) -> Indices:
        """The samples of microbatch `number` of the whole run, with `microbatches` per batch."""
        batch, piece = divmod(number, microbatches)
        epoch, position = divmod(batch, self.batches)
        size = self.batch // microbatches
        first = position * self.batch + piece * size
        if not self.shuffle:
            return np.arange(first, first + size)
        return permutation(self.seed, epoch, self.samples)[first : first + size]


@dataclass(frozen=True, slots=True)
class AugmentSeed:
    """What decides the random augmentation of a sample, together with its index."""

    seed: int
    epoch: int


class Sampler(Protocol):
    """The samples of each microbatch."""

    @property
    def size(self) -> int:
        """The largest number of samples in a microbatch."""
        ...

    def indices(self, number: int) -> Indices: ...

    def augment_seed(self, number: int) -> AugmentSeed | None:
        """How to augment the samples; None in evaluation."""
        ...


@dataclass(frozen=True, slots=True)
class TrainingSampler:
    """Microbatches in the run's order, augmented differently in each epoch."""

    order: Order
    microbatches: int

    @property
    def size(self) -> int:
        return self.order.batch // self.microbatches

    def indices(self, number: int) -> Indices:
        return self.order.microbatch(number, self.microbatches)

    def augment_seed(self, number: int) -> AugmentSeed:
        return AugmentSeed(self.order.seed, number // self.microbatches // self.order.batches)


@dataclass(frozen=True, slots=True)
class EvaluationSampler:
    """Every sample once, from first to last; the last microbatch may be smaller."""

    samples: int
    size: int

    def indices(self, number: int) -> Indices:
        first = number * self.size
        return np.arange(first, min(first + self.size, self.samples))

    def augment_seed(self, number: int) -> None:
        return None


@dataclass(frozen=True, slots=True)
class ReplicaSlice:
    """The microbatches that one replica loads: every `step`-th of a sampler's, before `stop`."""

    sampler: Sampler
    step: int
    stop: int


@dataclass(frozen=True, slots=True)
class Position:
    """The next batch of a run: its number within its epoch, and the data set it refers to."""

    seed: int
    epoch: int
    batch: int  # within the epoch
    fingerprint: str

    @staticmethod
    def at(order: Order, batch: int, fingerprint: str) -> Position:
        """The position before batch `batch` of the whole run."""
        epoch, within = divmod(batch, order.batches)
        return Position(order.seed, epoch, within, fingerprint)

    def in_batches_of(self, order: Order, batch: int) -> Position:
        """The same place in an order with another batch size; `batch` is the size it is counted in so far."""
        samples = self.batch * batch
        if samples % order.batch:
            raise DataChanged(
                f"the checkpoint is {samples} samples into its epoch, not a multiple of --batch {order.batch}; "
                f"use --batch {batch}"
            )
        return replace(self, batch=samples // order.batch)

    def resume(self, order: Order, fingerprint: str) -> int:
        """The batch of the whole run to resume with; an error if its samples would differ."""
        if fingerprint != self.fingerprint:
            raise DataChanged(
                f"the data set changed: its fingerprint is {fingerprint}, but the checkpoint was made with "
                f"{self.fingerprint}; restore the old data or start a new run"
            )
        if order.seed != self.seed:
            raise DataChanged(
                f"--seed is {order.seed} but the checkpoint was made with {self.seed}; use --seed {self.seed}"
            )
        if self.batch >= order.batches:
            raise DataChanged(
                f"the checkpoint is at batch {self.batch} of its epoch, but an epoch has "
                f"{counted(order.batches, 'batch', 'es')} of {order.batch}; use the --batch of the checkpoint"
            )
        return self.epoch * order.batches + self.batch
