"""Where samples come from: tensors in a file, or made up."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from stagewright.data.order import Indices


class Source(Protocol):
    """Random access to samples by index."""

    def __len__(self) -> int: ...

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """The samples at these indices and their labels, each stacked."""
        ...

    @property
    def classes(self) -> int:
        """One more than the largest label."""
        ...


class TensorSource:
    """Tensors of a safetensors file: `images` (any shape, first dimension samples) and `labels`."""

    def __init__(self, path: str) -> None:
        self._images, self._labels = _read_tensors(path)

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        where = torch.from_numpy(indices)
        images = self._images[where]
        return (images.float() / 255 if images.dtype == torch.uint8 else images), self._labels[where]

    @property
    def classes(self) -> int:
        return int(self._labels.max()) + 1 if self._labels.numel() else 0


def _read_tensors(path: str) -> tuple[Tensor, Tensor]:
    if not Path(path).is_file():
        raise ValueError(f"tensors file {path}: no such file")
    try:
        with safe_open(path, "pt") as file:
            names = sorted(file.keys())
            if not {"images", "labels"} <= set(names):
                raise ValueError(
                    f"tensors file {path} holds {', '.join(names[:6]) or 'nothing'}; it must hold 'images' and 'labels'"
                )
            images, labels = file.get_tensor("images"), file.get_tensor("labels")
    except SafetensorError as error:
        raise ValueError(f"tensors file {path} is not a whole safetensors file ({error})") from error
    if images.dim() < 2 or labels.dim() < 1 or len(images) != len(labels):
        raise ValueError(
            f"tensors file {path}: images {list(images.shape)} and labels {list(labels.shape)} do not match; "
            "images need two dimensions or more, and the first is the number of samples in both"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"tensors file {path}: labels are {labels.dtype}; class numbers must be integers")
    if labels.numel() and int(labels.min()) < 0:
        raise ValueError(f"tensors file {path}: the smallest label is {int(labels.min())}; classes count from 0")
    return images, labels.long()


class SyntheticSource:
    """Made-up images that can be learnt: a coarse pattern for each class, under noise.

    A sample depends on its index alone, so every rank makes the same one.
    """

    _NOISES = 64
    _COARSE = 8
    _SIGNAL = 0.3  # of the noise: learnt in a hundred steps, not in ten

    def __init__(self, samples: int, classes: int, image: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._samples = samples
        self._classes = classes
        self._image = image
        self._patterns = torch.randn(classes, 3, self._COARSE, self._COARSE, generator=generator)
        self._noises = torch.randn(self._NOISES, 3, image, image, generator=generator)

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        hashed = (indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)
        labels = torch.from_numpy((hashed % np.uint64(self._classes)).astype(np.int64))
        patterns = functional.interpolate(self._patterns[labels], size=(self._image, self._image))
        return self._SIGNAL * patterns + self._noises[torch.from_numpy(indices % self._NOISES)], labels

    @property
    def classes(self) -> int:
        return self._classes


def open_source(text: str, *, samples: int, classes: int, image: int, seed: int) -> Source:
    """The source that `--data` names; the rest describes synthetic data."""
    kind, _, rest = text.partition(":")
    if kind == "synthetic" and not rest:
        return SyntheticSource(samples, classes, image, seed)
    if kind == "tensors" and rest:
        return TensorSource(rest)
    raise ValueError(f"data '{text}' is not one of synthetic, tensors:FILE")
