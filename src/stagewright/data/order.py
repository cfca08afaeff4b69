"""The one global order of samples: a pure function of seed, epoch and position."""

from __future__ import annotations

from dataclasses import dataclass
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
