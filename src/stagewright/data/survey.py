"""Surveys a data set: its records, classes and image sizes, and what is bad; and draws a sheet of samples."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from stagewright.data.decode import Decoder, decode_record
from stagewright.data.formats.records import BadRecord, BadRecordError, Records, spread_index
from stagewright.data.order import AugmentSeed
from stagewright.data.sources import ImageSource
from stagewright.files import write_bytes

_COLUMNS, _ROWS = 8, 6
_CAPTION = 14  # pixels below a sample
_LEAST_CELL = 96


@dataclass(frozen=True, slots=True)
class SizeRange:
    """The smallest, median and largest of some numbers."""

    low: int
    median: int
    high: int

    @staticmethod
    def of(numbers: list[int]) -> SizeRange:
        return SizeRange(min(numbers), int(np.median(numbers)), max(numbers)) if numbers else SizeRange(0, 0, 0)

    def __str__(self) -> str:
        return f"{self.low} / {self.median} / {self.high}"


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found; sizes, counts and bad records cover only the records that were decoded."""

    records: int
    looked_at: int
    classes: int
    class_names: tuple[str, ...]
    per_class: tuple[int, ...]
    encoded: SizeRange  # bytes
    heights: SizeRange
    widths: SizeRange
    bad: tuple[BadRecord, ...]
    fingerprint: str


def survey(records: Records, most: int, progress: Callable[[int], None] = lambda done: None) -> Survey:
    """Decode up to `most` records, evenly spread over the data set; 0 means all."""
    looked_at = min(most, len(records)) if most else len(records)
    decoder, bad, good = Decoder(), list[BadRecord](), list[tuple[int, int, int]]()
    per_class = Counter[int]()
    for number in range(looked_at):
        index = spread_index(number, looked_at, len(records))
        try:
            record, pixels = decode_record(records, index, decoder)
        except BadRecordError as error:
            bad.append(BadRecord(index, str(error)))
        else:
            good.append((len(record.data), *pixels.shape[:2]))
            per_class[record.label] += 1
        progress(number + 1)
    encoded, heights, widths = (SizeRange.of([sizes[column] for sizes in good]) for column in range(3))
    return Survey(
        len(records),
        looked_at,
        records.classes,
        records.class_names,
        tuple(per_class[label] for label in range(records.classes)),
        encoded,
        heights,
        widths,
        tuple(bad),
        records.fingerprint,
    )


def draw_sheet(source: ImageSource, seed: int, path: Path) -> int:
    """Write a PNG of samples as augmented for training, with their classes; returns how many it shows."""
    side, count = source.augmentation.side, min(_COLUMNS * _ROWS, len(source))
    images, labels = source.allocate(count)
    cell = side * max(1, _LEAST_CELL // side)  # small images are shown larger
    sheet = Image.new("RGB", (_COLUMNS * cell, -(-count // _COLUMNS) * (cell + _CAPTION)), "white")
    pen, decoder, names = ImageDraw.Draw(sheet), Decoder(), source.records.class_names
    for number in range(count):
        index = spread_index(number, count, len(source))
        source.load(index, AugmentSeed(seed, 0), images[number], labels[number], decoder)
        left, top = number % _COLUMNS * cell, number // _COLUMNS * (cell + _CAPTION)
        sample = Image.fromarray(images[number].numpy()).resize((cell, cell), Image.Resampling.NEAREST)
        sheet.paste(sample, (left, top))
        label = int(labels[number])
        name = names[label] if label < len(names) else str(label)
        pen.text((left, top + cell + 1), name[: cell // 6], fill="black")
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = io.BytesIO()  # Pillow's own writing needs a file that can seek
    sheet.save(encoded, "PNG")
    write_bytes(path, encoded.getvalue())
    return count
