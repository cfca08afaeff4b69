"""Where samples come from: encoded images, tensors in a file, or synthetic data.

`open_source` opens what `--data` names. A `Source` returns samples by index; an `ImageSource` also fills single samples
for the loaders, and replaces a bad record by the next good one.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from stagewright.data.augment import Augmentation, Cropping, View, default_cropping
from stagewright.data.datasets import names_images, open_records
from stagewright.data.decode import (
    MOST_PIXELS,
    Decoder,
    Normalization,
    Pixels,
    decode_record,
    parse_normalization,
    render,
)
from stagewright.data.order import AugmentSeed, Indices
from stagewright.data.records import BadRecord, BadRecordError, DataError, Record, Records, require_limit
from stagewright.errors import UserError, first_line, is_out_of_memory
from stagewright.metrics import GIB


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

    @property
    def fingerprint(self) -> str:
        """Changes when the samples change."""
        ...


class ImageSource:
    """Encoded images as a source of samples."""

    def __init__(self, records: Records, augmentation: Augmentation, normalization: Normalization) -> None:
        self.records = records
        self.augmentation = augmentation
        self.normalization = normalization
        self.classes = records.classes
        self.fingerprint = records.fingerprint

    def __len__(self) -> int:
        return len(self.records)

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Samples with the evaluation's views, in single precision."""
        images, labels = self.allocate(len(indices))
        decoder = Decoder()
        for row, index in enumerate(indices):
            labels[row], _ = self.load(int(index), None, images[row], decoder)
        return self.normalization.apply(images, torch.float32), torch.from_numpy(labels)

    def allocate(self, samples: int, *, is_pinned: bool = False) -> tuple[Tensor, Indices]:
        """Memory for the pixels and labels of some samples."""
        side = self.augmentation.side
        try:
            images = torch.zeros(samples, side, side, 3, dtype=torch.uint8, pin_memory=is_pinned)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            gib = samples * side * side * 3 / GIB
            raise DataError(f"{samples} images of side {side} need {gib:,.1f} GiB; reduce --image") from error
        return images, np.zeros(samples, np.int64)

    def load(
        self, index: int, seed: AugmentSeed | None, target: Tensor, decoder: Decoder
    ) -> tuple[int, tuple[BadRecord, ...]]:
        """Fill `target` with the first good sample from `index` on; its label, and the bad records before it."""
        record, pixels, bad = self.first_good(index, decoder)
        render(pixels, self.view(seed, index, *pixels.shape[:2]), target)
        return record.label, bad

    def first_good(self, index: int, decoder: Decoder) -> tuple[Record, Pixels, tuple[BadRecord, ...]]:
        """The first good record from `index` on, its pixels, and the bad records before it; wraps around at the end."""
        bad: list[BadRecord] = []
        for step in range(len(self.records)):
            candidate = (index + step) % len(self.records)
            try:
                record, pixels = decode_record(self.records, candidate, decoder)
                self.require_view(record.name, *pixels.shape[:2])
                return record, pixels, tuple(bad)
            except BadRecordError as error:
                bad.append(BadRecord(candidate, str(error)))
        raise DataError(f"none of the {len(self.records)} records can be used; the first: {bad[0].reason}")

    def require_view(self, name: str, height: int, width: int) -> None:
        """Raise if an image is so narrow that the evaluation, which resizes all of it, would fill the memory."""
        view = self.augmentation.evaluation_view(height, width)
        if view.rows * view.columns > MOST_PIXELS:
            raise BadRecordError(
                f"{name}: {height}x{width} would be resized to {view.rows}x{view.columns} pixels; "
                f"at most {MOST_PIXELS} are drawn"
            )

    def view(self, seed: AugmentSeed | None, index: int, height: int, width: int) -> View:
        """The view of a sample; without a seed, the evaluation's view."""
        if seed is None:
            return self.augmentation.evaluation_view(height, width)
        return self.augmentation.training_view(seed.seed, seed.epoch, index, height, width)


class TensorSource:
    """Tensors of a safetensors file: `images` [samples, ...] and `labels` [samples]; bytes become fractions of 255."""

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

    @property
    def fingerprint(self) -> str:
        few = torch.arange(0, len(self), max(1, len(self) // 64))
        digest = blake2b(repr((self._images.shape, self._images.dtype)).encode(), digest_size=16)
        for tensor in (self._labels, self._images[few]):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _read_tensors(path: str) -> tuple[Tensor, Tensor]:
    if not Path(path).is_file():
        raise UserError(f"tensors file {path}: no such file")
    try:
        with safe_open(path, "pt") as file:
            names = sorted(file.keys())
            if not {"images", "labels"} <= set(names):
                raise UserError(
                    f"tensors file {path} contains {', '.join(names[:6]) or 'nothing'}; it needs 'images' and 'labels'"
                )
            images, labels = file.get_tensor("images"), file.get_tensor("labels")
    except (OSError, SafetensorError) as error:
        raise UserError(f"tensors file {path} is not a complete safetensors file ({first_line(error)})") from error
    if images.dim() < 2 or labels.dim() < 1 or len(images) != len(labels):
        raise UserError(
            f"tensors file {path}: images {list(images.shape)} and labels {list(labels.shape)} do not match; "
            "images need at least two dimensions, and both must begin with the number of samples"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise UserError(f"tensors file {path}: labels are {labels.dtype}; class numbers must be integers")
    labels = labels.long()
    if labels.numel() and int(labels.min()) < 0:
        raise UserError(f"tensors file {path}: the smallest label is {int(labels.min())}; classes count from 0")
    return images, labels


class SyntheticSource:
    """Synthetic images: noise, and unless `is_learnable` is off, a coarse pattern per class below it.

    A sample depends only on its index, so every rank makes the same one, on its own device.
    """

    _NOISES = 64
    _COARSE = 8
    _SIGNAL = 0.3  # relative to the noise: learnt in a hundred steps, not in ten

    def __init__(self, samples: int, classes: int, image: int, seed: int, is_learnable: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device draws the same
        kind = "learnable" if is_learnable else "noise"
        self.classes = classes
        self.fingerprint = f"synthetic/{samples}/{classes}/{image}/{seed}/{kind}"
        self._samples = samples
        self._image = image
        self._is_learnable = is_learnable
        self._patterns = torch.randn(classes, 3, self._COARSE, self._COARSE, generator=generator)
        self._noises = torch.randn(self._NOISES, 3, image, image, generator=generator)

    def to(self, device: torch.device) -> SyntheticSource:
        """Make samples on that device from now on."""
        self._patterns, self._noises = self._patterns.to(device), self._noises.to(device)
        return self

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        hashed = (indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)
        labels = torch.from_numpy((hashed % np.uint64(self.classes)).astype(np.int64)).to(self._noises.device)
        noises = self._noises[torch.from_numpy(indices % self._NOISES).to(self._noises.device)]
        if not self._is_learnable:
            return noises, labels
        patterns = functional.interpolate(self._patterns[labels], size=(self._image, self._image))
        return self._SIGNAL * patterns + noises, labels


class LimitedSource:
    """`limit` samples of a source, evenly spread over it."""

    def __init__(self, source: Source, limit: int) -> None:
        require_limit(limit, len(source))
        self.classes = source.classes
        self.fingerprint = f"{source.fingerprint}/{limit}"
        self.unit = getattr(source, "unit", ("images", 1))
        self._source = source
        self._limit = limit

    def __len__(self) -> int:
        return self._limit

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        return self._source.batch(indices * len(self._source) // self._limit)


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """The options that say how encoded images become samples."""

    cropping: str = "auto"
    normalize: str = "imagenet"
    jitter: float = 0.0
    cutout: int = 0
    class_names: str | None = None
    limit: int | None = None
    is_learnable: bool = True  # synthetic images only


def open_source(
    text: str, *, samples: int, classes: int, image: int, seed: int, options: ImageOptions | None = None
) -> Source:
    """The source that `--data` names; samples, classes and seed describe synthetic data."""
    options = options or ImageOptions()
    if names_images(text):
        return with_transforms(open_records(text, options.class_names, options.limit), image, options)
    kind, _, rest = text.partition(":")
    source: Source
    if kind == "synthetic" and not rest:
        source = SyntheticSource(samples, classes, image, seed, options.is_learnable)
    elif kind == "tensors" and rest:
        source = TensorSource(rest)
    else:
        raise UserError(f"data '{text}' is not one of synthetic, folder:DIR, tar:GLOB, ofrecord:DIR, tensors:FILE")
    return source if options.limit is None else LimitedSource(source, options.limit)


def with_transforms(records: Records, side: int, options: ImageOptions) -> ImageSource:
    """Records as samples of one size, cropped and normalized as the options say."""
    if side < 1:
        raise UserError(f"--image is {side}; give at least 1")
    if not 0 <= options.jitter < 1:
        raise UserError(f"--jitter is {options.jitter}; give 0 or more and less than 1, such as 0.4")
    if not 0 <= options.cutout <= side:
        raise UserError(f"--cutout is {options.cutout}; give 0 to {side}, the image's side")
    cropping = default_cropping(side) if options.cropping == "auto" else Cropping(options.cropping)
    augmentation = Augmentation(side, cropping, options.jitter, options.cutout)
    return ImageSource(records, augmentation, parse_normalization(options.normalize))
