"""Microbatches by number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stagewright.data.order import Order
from stagewright.data.sources import Source


@dataclass(frozen=True, slots=True)
class Loader:
    """Reads the samples of a microbatch, in the type the model computes with."""

    source: Source
    order: Order
    microbatches: int
    dtype: torch.dtype

    def microbatch(self, number: int) -> tuple[Tensor, Tensor]:
        return self._typed(self.source.batch(self.order.microbatch(number, self.microbatches)))

    def piece(self, source: Source, number: int, size: int) -> tuple[Tensor, Tensor]:
        """Samples `number*size` and on of an evaluation source; the last piece may be short."""
        first = number * size
        return self._typed(source.batch(np.arange(first, min(first + size, len(source)))))

    def _typed(self, samples: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, labels = samples
        return (inputs.to(self.dtype) if inputs.is_floating_point() else inputs), labels
