"""What belongs to an image besides its pixels: the number of its class; a mask or numbers in classes of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from stagewright.data.augment import View
from stagewright.data.formats.records import Record


class Labels:
    """One class number per image.

    A record's label is read before its sample is drawn, so that one that can't be read makes the record a bad one, and
    drawn with the view of the image.
    """

    name = "label"  # of their field
    follows_view = False  # whether a label depends on how its image is cropped

    def allocate(self, samples: int, side: int) -> Tensor:
        """Memory for the labels of some samples, on the CPU."""
        return torch.zeros(samples, dtype=torch.int64)

    def read(self, record: Record, height: int, width: int) -> Tensor:
        """The label of an image of this size; raises `BadRecordError` if it has none that can be used."""
        return torch.tensor(record.label)

    def draw(self, label: Tensor, view: View, target: Tensor) -> None:
        """Fill one row of `allocate` with a label as it belongs to a view of its image."""
        target.numpy()[...] = label.numpy()  # not by torch, for which threads wait for each other
