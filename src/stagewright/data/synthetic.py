"""Synthetic images, cheap enough that no run waits for them: each is a sum of rows of one table."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from stagewright.data.formats.fields import IMAGES, Fields, Indices, to_device

_NOISES = 64
_COARSE = 8
_SIGNAL = 0.3  # relative to the noise: learnt in a hundred steps, not in ten


class SyntheticSource:
    """Synthetic images: noise, and unless `is_learnable` is off, a coarse pattern per class below it.

    A sample depends only on its index, so every rank makes the same one, on its own device. A row of an image is the
    row of a noise, plus that of a pattern, whose rows are already as wide as the image. Both are read from a table of
    some tens of megabytes, on the CPU and in a compiled run by one kernel, and the images have the layout that the
    model takes.
    """

    targets = ("label",)
    unit = IMAGES
    has_ignored = False
    vocabulary = 0

    def __init__(
        self, samples: int, classes: int, image: int, seed: int, is_learnable: bool = True, channels: int = 3
    ) -> None:
        generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device draws the same
        kind = "learnable" if is_learnable else "noise"
        self.classes = classes
        self.fingerprint = f"synthetic/{samples}/{classes}/{image}/{seed}/{kind}" + f"/{channels}" * (channels != 3)
        self._samples = samples
        self._is_learnable = is_learnable
        self._patterns = torch.randn(classes, channels, _COARSE, _COARSE, generator=generator)
        self._noises = torch.randn(_NOISES, channels, image, image, generator=generator)
        self._rows: _Rows | None = None  # made for the first batch
        self._device, self._channels_last, self._sum = torch.device("cpu"), False, _sum_rows

    def to(self, device: torch.device, *, channels_last: bool = False, is_compiled: bool = False) -> SyntheticSource:
        """Make samples on that device, and in that memory layout, from now on."""
        self._device, self._channels_last, self._rows = device, channels_last, None
        self._sum = torch.compile(_gather_rows, dynamic=False) if is_compiled and device.type == "cuda" else _sum_rows
        return self

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Indices, room: Tensor | None = None) -> Fields:
        """Samples by index; where there is `room`, from `allocate`, the images are in there."""
        hashed = (indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)
        numbers = np.stack([(hashed % np.uint64(self.classes)).astype(np.int64), indices % _NOISES])
        labels, noises = to_device(torch.from_numpy(numbers), self._device)
        rows = self._all_rows.of(noises, labels if self._is_learnable else None)
        made = self._sum(self._all_rows.table, rows, room)
        return {"image": self._all_rows.images(made), "label": labels}

    def allocate(self, samples: int) -> Tensor:
        """Memory for the images of a batch on a GPU."""
        table = self._all_rows.table
        return torch.empty(samples * self._all_rows.per_image, table.shape[1], device=table.device)

    @property
    def _all_rows(self) -> _Rows:
        if self._rows is None:
            self._rows = _Rows(self._noises, self._patterns, self._device, channels_last=self._channels_last)
        return self._rows


def _sum_rows(table: Tensor, rows: Tensor, room: Tensor | None) -> Tensor:
    """The sums of the rows of a table that each row of `rows` names; in `room`, which is for GPUs, if there is any."""
    if table.device.type != "cuda":
        return functional.embedding_bag(rows, table, mode="sum")
    return _gather_rows(table, rows, room)


def _gather_rows(table: Tensor, rows: Tensor, room: Tensor | None) -> Tensor:
    """The same, an order of magnitude faster on GPUs than torch's kernel for bags of few rows."""
    summed = torch.index_select(table, 0, rows[:, 0], out=room)
    return summed.add_(table[rows[:, 1]]) if rows.shape[1] > 1 else summed


class _Rows:
    """A table of all rows of the noises, and then of the patterns.

    A row goes along the width: one of each channel, or with channels last one of all channels together.
    """

    def __init__(self, noises: Tensor, patterns: Tensor, device: torch.device, *, channels_last: bool) -> None:
        channels, height, width = noises.shape[1:]
        wide = functional.interpolate(_SIGNAL * patterns, size=(_COARSE, width))
        row_of = functional.interpolate(torch.arange(_COARSE, dtype=torch.float32).view(1, 1, -1, 1), size=(height, 1))
        own, coarse = torch.arange(height), row_of.flatten().long()  # rows of an image, and the pattern's below each
        if channels_last:
            noises, wide = (part.movedim(1, 3).flatten(2) for part in (noises, wide))
        else:
            channel = torch.arange(channels).unsqueeze(1)
            own, coarse = channel * height + own, channel * _COARSE + coarse
        self.table = torch.cat([part.reshape(-1, part.shape[-1]) for part in (noises, wide)]).to(device)
        self._own = own.flatten().to(device)
        self.per_image = len(self._own)
        self._coarse = coarse.flatten().to(device) + noises[..., 0].numel()
        self._per_pattern = wide[0, ..., 0].numel()
        self._shape = (height, width, channels) if channels_last else (channels, height, width)
        self._channels_last = channels_last

    def of(self, noises: Tensor, labels: Tensor | None) -> Tensor:
        """Which rows of the table make up those of some noises; with the patterns of labels, if there are any."""
        rows = [noises.unsqueeze(1) * self.per_image + self._own]
        if labels is not None:
            rows.append(labels.unsqueeze(1) * self._per_pattern + self._coarse)
        return torch.stack(rows, 2).flatten(0, 1)

    def images(self, rows: Tensor) -> Tensor:
        """Rows as images."""
        images = rows.view(-1, *self._shape)
        return images.movedim(3, 1) if self._channels_last else images
