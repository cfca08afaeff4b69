"""What belongs to an image besides its pixels: by default the number of its class.

`sources.ImageSource` reads a record's label before it draws the sample, so that a label that can't be read makes the
record a bad one, and draws it with the view of the image.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from stagewright.data.augment import View
from stagewright.data.formats.records import Record


class Labels(Protocol):
    """Reads and draws the labels of records."""

    @property
    def name(self) -> str:
        """Of their field."""
        ...

    @property
    def follows_view(self) -> bool:
        """Whether a label depends on how its image is cropped."""
        ...

    def allocate(self, samples: int, side: int) -> Tensor:
        """Memory for the labels of some samples, on the CPU."""
        ...

    def read(self, record: Record, height: int, width: int) -> Tensor:
        """The label of an image of this size; raises `BadRecordError` if it has none that can be used."""
        ...

    def draw(self, label: Tensor, view: View, target: Tensor) -> None:
        """Fill one row of `allocate` with a label as it belongs to a view of its image."""
        ...


class ClassLabels:
    """One class number per image."""

    name = "label"
    follows_view = False

    def allocate(self, samples: int, side: int) -> Tensor:
        return torch.zeros(samples, dtype=torch.int64)

    def read(self, record: Record, height: int, width: int) -> Tensor:
        return torch.tensor(record.label)

    def draw(self, label: Tensor, view: View, target: Tensor) -> None:
        target.numpy()[...] = label.numpy()  # not by torch, for which threads wait for each other
