"""Where samples come from: encoded images, tensors or tokens in a file, or synthetic data.

`open_source` opens what `--data` names. A `Source` returns samples by index; an `ImageSource` also fills single samples
for the loaders, and replaces a bad record by the next good one.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from stagewright.config.sources import SourceOptions, find_kind
from stagewright.data.augment import Augmentation, Cropping, View, default_cropping
from stagewright.data.datasets import limited, open_listed
from stagewright.data.decode import (
    MOST_PIXELS,
    Decoder,
    Normalization,
    Pixels,
    decode_record,
    parse_normalization,
    render,
)
from stagewright.data.formats.fields import Fields as Fields
from stagewright.data.formats.fields import cast as cast
from stagewright.data.formats.fields import only_pair as only_pair
from stagewright.data.formats.records import BadRecord, BadRecordError, DataError, Records, require_limit
from stagewright.data.labels import Labels, open_table
from stagewright.data.order import AugmentSeed, Indices
from stagewright.data.own import DatasetSource
from stagewright.data.segmentation import MaskLabels
from stagewright.errors import UserError, is_out_of_memory
from stagewright.metrics import GIB, IMAGES, ThroughputUnit
from stagewright.objects import load_callable


@runtime_checkable
class Source(Protocol):
    """Random access to samples by index."""

    def __len__(self) -> int: ...

    def batch(self, indices: Indices) -> Fields:
        """The samples at these indices, each field stacked."""
        ...

    @property
    def targets(self) -> tuple[str, ...]:
        """The fields that are targets; all others are inputs of the model."""
        ...

    @property
    def unit(self) -> ThroughputUnit:
        """What throughput counts, and how many of it a sample has."""
        ...

    @property
    def classes(self) -> int:
        """One more than the largest number of a target that holds class numbers; 0 where there is none."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when the samples change."""
        ...

    @property
    def vocabulary(self) -> int:
        """One more than the largest token of the inputs; 0 where they are no tokens."""
        ...

    @property
    def has_ignored(self) -> bool:
        """Whether samples with one label each may have one that counts nowhere."""
        ...


class ImageSource:
    """Encoded images as a source of samples: an image, and its class or what else `labels` reads."""

    unit = IMAGES
    has_ignored = False
    vocabulary = 0

    def __init__(
        self,
        records: Records,
        augmentation: Augmentation,
        normalization: Normalization,
        labels: Labels | None = None,
    ) -> None:
        self.records = records
        self.labels = labels or Labels()
        self.targets = (self.labels.name,)
        self.augmentation = augmentation
        self.normalization = normalization
        self.classes = records.classes
        self.fingerprint = records.fingerprint

    def __len__(self) -> int:
        return len(self.records)

    def batch(self, indices: Indices) -> Fields:
        """Samples with the evaluation's views, in single precision."""
        images, labels = self.allocate(len(indices))
        decoder = Decoder()
        for row, index in enumerate(indices):
            self.load(int(index), None, images[row], labels[row], decoder)
        return self.fields(images, labels, torch.float32)

    def fields(self, images: Tensor, labels: Tensor, dtype: torch.dtype, *, channels_last: bool = False) -> Fields:
        """A microbatch of uint8 [samples, side, side, RGB] and the labels, on their device."""
        normalized = self.normalization.apply(images, dtype, channels_last=channels_last)
        return cast({"image": normalized, self.labels.name: labels}, self.targets, dtype)

    def allocate(self, samples: int, *, is_pinned: bool = False) -> tuple[Tensor, Tensor]:
        """Memory for the pixels and labels of some samples."""
        side = self.augmentation.side
        try:
            images = torch.zeros(samples, side, side, 3, dtype=torch.uint8, pin_memory=is_pinned)
            labels = self.labels.allocate(samples, side)
            return images, labels.pin_memory() if is_pinned else labels
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            gib = samples * side * side * 3 / GIB
            raise DataError(f"{samples} images of side {side} need {gib:,.1f} GiB; reduce --image") from error

    def load(
        self, index: int, seed: AugmentSeed | None, image: Tensor, label: Tensor, decoder: Decoder
    ) -> tuple[BadRecord, ...]:
        """Fill `image` and `label` with the first good sample from `index` on; returns the bad records before it."""
        found, pixels, bad = self.first_good(index, decoder)
        view = self.view(seed, index, *pixels.shape[:2])
        render(pixels, view, image)
        self.labels.draw(found, view, label)
        return bad

    def first_good(self, index: int, decoder: Decoder) -> tuple[Tensor, Pixels, tuple[BadRecord, ...]]:
        """Label and pixels of the first good record from `index` on, and the bad ones before it; wraps around."""
        bad: list[BadRecord] = []
        for step in range(len(self.records)):
            candidate = (index + step) % len(self.records)
            try:
                record, pixels = decode_record(self.records, candidate, decoder)
                self.require_view(record.name, *pixels.shape[:2])
                return self.labels.read(record, *pixels.shape[:2]), pixels, tuple(bad)
            except BadRecordError as error:
                bad.append(BadRecord(candidate, str(error)))
        raise DataError(f"all {len(self.records)} records are bad; the first: {bad[0].reason}")

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


class LimitedSource:
    """`limit` samples of a source, evenly spread over it."""

    def __init__(self, source: Source, limit: int) -> None:
        require_limit(limit, len(source))
        self.targets = source.targets
        self.unit = source.unit
        self.classes = source.classes
        self.has_ignored = source.has_ignored
        self.fingerprint = f"{source.fingerprint}/{limit}"
        self._source = source
        self._limit = limit

    def __len__(self) -> int:
        return self._limit

    @property
    def vocabulary(self) -> int:
        return self._source.vocabulary

    def batch(self, indices: Indices) -> Fields:
        return self._source.batch(indices * len(self._source) // self._limit)


def open_source(text: str, options: SourceOptions) -> Source:
    """The source that `--data` names."""
    opened: Source = load_callable(f"stagewright.data.{find_kind(text).opened_by}", "data")(text, options)
    if options.limit is None or isinstance(opened, ImageSource | DatasetSource):  # which were limited when opened
        return opened
    return LimitedSource(opened, options.limit)


def open_images(text: str, options: SourceOptions) -> ImageSource:
    """Images with a class each, with masks, or with numbers."""
    kind, _, where = text.partition(":")
    if kind == "table":
        rows, numbers = open_table(where)
        return with_transforms(limited(rows, options.limit), options, numbers)
    records = open_listed(kind, where, options.class_names, options.limit)
    return with_transforms(records, options, MaskLabels(records.classes) if kind == "segmentation" else None)


def with_transforms(records: Records, options: SourceOptions, labels: Labels | None = None) -> ImageSource:
    """Records as samples of one size, cropped and normalized as the options say."""
    side = options.image
    if not 0 <= options.cutout <= side:
        raise UserError(f"--cutout is {options.cutout}; give 0 to {side}, the image's side")
    cropping = default_cropping(side) if options.cropping == "auto" else Cropping(options.cropping)
    augmentation = Augmentation(side, cropping, options.jitter, options.cutout)
    return ImageSource(records, augmentation, parse_normalization(options.normalize), labels)
