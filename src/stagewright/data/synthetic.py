"""Synthetic images, cheap enough that no run waits for them: each is a sum of rows of two tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from stagewright.config.sources import SourceOptions
from stagewright.data.formats.fields import Fields, Indices, to_device
from stagewright.metrics import IMAGES

_NOISES = 64
_COARSE = 8
_SIGNAL = 0.3  # relative to the noise: learnt in a hundred steps, not in ten


class SyntheticSource:
    """Synthetic images: noise, and unless `is_learnable` is off, a coarse pattern per class below it.

    A sample depends only on its index, so every rank makes the same one, on its own device. A row of an image is the
    row of a noise, plus that of a pattern, on the CPU and in a compiled run by one kernel. The images have the layout
    that the model takes.
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
        self._device, self._dtype = torch.device("cpu"), torch.float32
        self._channels_last, self._sum = False, _sum_parts

    def to(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        channels_last: bool = False,
        is_compiled: bool = False,
    ) -> SyntheticSource:
        """Make samples on that device, and in that memory layout, from now on; with `room`, of that type."""
        self._device, self._dtype, self._channels_last, self._rows = device, dtype, channels_last, None
        self._sum = torch.compile(_sum_parts, dynamic=False) if is_compiled and device.type == "cuda" else _sum_parts
        return self

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Indices, room: Tensor | None = None) -> Fields:
        """Samples by index; where there is `room`, from `allocate`, the images are in there."""
        hashed = (indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)
        numbers = np.stack([(hashed % np.uint64(self.classes)).astype(np.int64), indices % _NOISES])
        labels, noises = to_device(torch.from_numpy(numbers), self._device)
        return {"image": self._all_rows.images(noises, labels, self._sum, room), "label": labels}

    def allocate(self, samples: int) -> Tensor:
        """Memory for the images of a batch on a GPU."""
        return self._all_rows.allocate(samples, self._dtype)

    @property
    def _all_rows(self) -> _Rows:
        if self._rows is None:
            patterns = self._patterns if self._is_learnable else None
            self._rows = _Rows(self._noises, patterns, self._device, channels_last=self._channels_last)
        return self._rows


def open_synthetic(text: str, options: SourceOptions) -> SyntheticSource:
    shape = options.samples, options.classes, options.image
    return SyntheticSource(*shape, options.seed, options.is_learnable, options.channels)


def _sum_parts(
    noises: Tensor, patterns: Tensor | None, columns: Tensor, rows: tuple[Tensor, Tensor], room: Tensor | None
) -> Tensor:
    """Rows of noises, plus those of patterns, which are narrow and so stay in small caches, spread over `columns`.

    Where there is `room`, they are in there, rounded to its type.
    """
    is_same = room is not None and room.dtype == noises.dtype
    summed = torch.index_select(noises, 0, rows[0], out=room if is_same else None)
    if patterns is not None:
        summed.add_(patterns[rows[1]].index_select(1, columns))
    return summed if room is None or is_same else room.copy_(summed)


class _Rows:
    """The rows of all noises and all patterns.

    A row goes along the width: one of each channel, or with channels last one of all channels together. A pattern's
    rows are narrower than an image's: on the CPU, where torch has a kernel for sums of rows of one table, they are
    widened once and follow the noises in their table.
    """

    def __init__(self, noises: Tensor, patterns: Tensor | None, device: torch.device, *, channels_last: bool) -> None:
        channels, height, width = noises.shape[1:]
        own, coarse = torch.arange(height), _below(height)  # rows of an image, and the pattern's below each
        columns = _below(width)
        if channels_last:
            columns = (columns.unsqueeze(1) * channels + torch.arange(channels)).flatten()
        else:
            channel = torch.arange(channels).unsqueeze(1)
            own, coarse = channel * height + own, channel * _COARSE + coarse
        tables = [noises] if patterns is None else [noises, _SIGNAL * patterns]
        tables = [(part.movedim(1, 3).flatten(2) if channels_last else part).flatten(0, -2) for part in tables]
        self._noises, self._patterns = tables[0].to(device), tables[1].to(device) if patterns is not None else None
        self._wide = torch.cat([tables[0], tables[1][:, columns]]) if device.type == "cpu" and tables[1:] else None
        parts = (own, coarse, columns)
        self._own, self._coarse, self._columns = (part.flatten().int().to(device) for part in parts)
        self._per_pattern = _COARSE if channels_last else channels * _COARSE
        self._shape = (height, width, channels) if channels_last else (channels, height, width)
        self._channels_last = channels_last

    def images(self, noises: Tensor, labels: Tensor, sum_parts: Callable[..., Tensor], room: Tensor | None) -> Tensor:
        """The images of some noises, with the patterns of labels if there are any."""
        own = (noises.int().unsqueeze(1) * len(self._own) + self._own).flatten()
        below = (labels.int().unsqueeze(1) * self._per_pattern + self._coarse).flatten()
        if self._wide is None:
            made = sum_parts(self._noises, self._patterns, self._columns, (own, below), room)
        else:
            rows = torch.stack([own, below + len(self._noises)], 1)
            made = functional.embedding_bag(rows, self._wide, mode="sum")
        images = made.view(-1, *self._shape)
        return images.movedim(3, 1) if self._channels_last else images

    def allocate(self, samples: int, dtype: torch.dtype) -> Tensor:
        return self._noises.new_empty(samples * len(self._own), self._noises.shape[1], dtype=dtype)


def _below(size: int) -> Tensor:
    """Which of a pattern's rows or columns is below each of an image."""
    coarse = torch.arange(_COARSE, dtype=torch.float32).view(1, 1, -1, 1)
    return functional.interpolate(coarse, size=(size, 1)).flatten().long()
