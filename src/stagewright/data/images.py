"""Images as samples: records decoded, cropped and normalised; a bad one gives way to the next that is good."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stagewright.data.augment import Augmentation, View
from stagewright.data.decode import Decoder, Pixels, decode_at
from stagewright.data.normalize import Normalization
from stagewright.data.order import Indices
from stagewright.data.records import BadRecord, DataError, Record, Records
from stagewright.data.render import render


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that could not be used."""

    index: int
    reason: str  # begins with its name


@dataclass(frozen=True, slots=True)
class Draw:
    """What chooses the random part of a training sample, apart from its index."""

    seed: int
    epoch: int


class ImageSource:
    """Encoded images as a source of samples."""

    def __init__(self, records: Records, augmentation: Augmentation, normalization: Normalization) -> None:
        self.records = records
        self.augmentation = augmentation
        self.normalization = normalization

    def __len__(self) -> int:
        return len(self.records)

    @property
    def classes(self) -> int:
        return self.records.classes

    @property
    def fingerprint(self) -> str:
        return self.records.fingerprint

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Samples as evaluation sees them, in single precision."""
        images, labels = self.empty(len(indices))
        decoder = Decoder()
        for row, index in enumerate(indices):
            labels[row], _ = self.load(int(index), None, images[row], decoder)
        return self.normalization.apply(images, torch.float32), torch.from_numpy(labels)

    def empty(self, samples: int, *, is_pinned: bool = False) -> tuple[Tensor, Indices]:
        """Room for the pixels and labels of some samples."""
        side = self.augmentation.side
        try:
            images = torch.zeros(samples, side, side, 3, dtype=torch.uint8, pin_memory=is_pinned)
        except MemoryError as error:
            gib = samples * side * side * 3 / 2**30
            raise DataError(f"{samples} images of side {side} need {gib:,.1f} GiB; give a smaller --image") from error
        return images, np.zeros(samples, np.int64)

    def load(self, index: int, draw: Draw | None, target: Tensor, decoder: Decoder) -> tuple[int, tuple[Bad, ...]]:
        """Fill `target` with a sample, or with the next one that is good; its label, and the bad ones before it."""
        record, pixels, bad = self.find(index, decoder)
        render(pixels, self.view(draw, index, *pixels.shape[:2]), target)
        return record.label, bad

    def find(self, index: int, decoder: Decoder) -> tuple[Record, Pixels, tuple[Bad, ...]]:
        """The record at an index and its pixels, or the next that is good, and the bad ones before it."""
        bad: list[Bad] = []
        for step in range(len(self.records)):
            candidate = (index + step) % len(self.records)
            try:
                return *decode_at(self.records, candidate, decoder), tuple(bad)
            except BadRecord as error:
                bad.append(Bad(candidate, str(error)))
        raise DataError(f"none of the {len(self.records)} records can be used; the first: {bad[0].reason}")

    def view(self, draw: Draw | None, index: int, height: int, width: int) -> View:
        """What is seen of a sample; without a draw, what evaluation sees."""
        if draw is None:
            return self.augmentation.evaluation(height, width)
        return self.augmentation.training(draw.seed, draw.epoch, index, height, width)
