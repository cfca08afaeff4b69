"""Synthetic images, cheap enough that no run waits for them."""

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

    A sample depends only on its index, so every rank makes the same one, on its own device.
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
        self._patterns = _SIGNAL * torch.randn(classes, channels, _COARSE, _COARSE, generator=generator)
        self._noises = torch.randn(_NOISES, channels, image, image, generator=generator)
        self._device = torch.device("cpu")
        self._maker: _Rows | _Layers | None = None  # from the first batch on
        self._channels_last = self._is_compiled = False

    def to(self, device: torch.device, *, channels_last: bool = False, is_compiled: bool = False) -> SyntheticSource:
        """Make samples on that device from now on; on a GPU in that memory layout, by compiled code or not."""
        self._device, self._channels_last, self._is_compiled, self._maker = device, channels_last, is_compiled, None
        return self

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Indices) -> Fields:
        hashed = (indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)
        numbers = np.stack([(hashed % np.uint64(self.classes)).astype(np.int64), indices % _NOISES])
        labels, noises = to_device(torch.from_numpy(numbers), self._device)
        if self._maker is None:
            self._maker = self._make_maker()
        return {"image": self._maker.images(noises, labels if self._is_learnable else None), "label": labels}

    def _make_maker(self) -> _Rows | _Layers:
        if self._device.type != "cuda":
            return _Rows(self._noises, self._patterns, self._device)
        options = {"channels_last": self._channels_last, "is_compiled": self._is_compiled}
        return _Layers(self._noises, self._patterns, self._device, **options)


class _Rows:
    """Makes an image as the sum of rows of one table: those of a noise, and of a pattern that is as wide as the image.

    On a CPU this takes a quarter of the time that indexing does.
    """

    def __init__(self, noises: Tensor, patterns: Tensor, device: torch.device) -> None:
        self._shape = channels, height, width = noises.shape[1:]
        wide = functional.interpolate(patterns, size=(_COARSE, width))
        channel = torch.arange(channels).unsqueeze(1)
        self._table = torch.cat([part.reshape(-1, width) for part in (noises, wide)]).to(device)
        self._own = (channel * height + torch.arange(height)).flatten().to(device)
        self._below = (channel * _COARSE + _pattern_rows(height)).flatten().to(device) + _NOISES * channels * height
        self._per_pattern = channels * _COARSE

    def images(self, noises: Tensor, labels: Tensor | None) -> Tensor:
        """An image for each of some noises; with the patterns of labels, if there are any."""
        rows = [noises.unsqueeze(1) * len(self._own) + self._own]
        if labels is not None:
            rows.append(labels.unsqueeze(1) * self._per_pattern + self._below)
        summed = functional.embedding_bag(torch.stack(rows, 2).flatten(0, 1), self._table, mode="sum")
        return summed.view(-1, *self._shape)


class _Layers:
    """Makes images by indexing noises and patterns, on a GPU; compiled it is one kernel, which only writes images."""

    def __init__(
        self, noises: Tensor, patterns: Tensor, device: torch.device, *, channels_last: bool, is_compiled: bool
    ) -> None:
        order = (0, 2, 3, 1) if channels_last else (0, 1, 2, 3)  # of dimensions in memory
        self._back = (0, 3, 1, 2) if channels_last else order
        self._noises, self._patterns = (part.permute(order).contiguous().to(device) for part in (noises, patterns))
        below = _pattern_rows(noises.shape[-1]).to(device)
        channel = torch.arange(noises.shape[1], device=device)
        if channels_last:
            self._below = (below.view(-1, 1, 1), below.view(-1, 1), channel)
        else:
            self._below = (channel.view(-1, 1, 1), below.view(-1, 1), below)
        self._add = torch.compile(_add_layers, dynamic=False) if is_compiled else _add_layers

    def images(self, noises: Tensor, labels: Tensor | None) -> Tensor:
        """An image for each of some noises; with the patterns of labels, if there are any."""
        if labels is None:
            return self._noises[noises].permute(self._back)
        return self._add(self._noises, self._patterns, noises, labels, self._below).permute(self._back)


def _add_layers(
    noises: Tensor, patterns: Tensor, noise: Tensor, label: Tensor, below: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    return noises[noise] + patterns[label.view(-1, 1, 1, 1), below[0], below[1], below[2]]


def _pattern_rows(side: int) -> Tensor:
    """Which row, or column, of a pattern is below each of an image."""
    rows = torch.arange(_COARSE, dtype=torch.float32).view(1, 1, -1)
    return functional.interpolate(rows, size=side).flatten().long()
