"""Images with a mask each, for segmentation: `images/NAME.jpg` beside `masks/NAME.png`, at any depth.

A mask is a PNG of the size of its image whose pixels are class numbers, grey or by palette; 255 is no class. It is
cropped, mirrored and resized as its image is, to the nearest pixel. The index keeps the largest class number of each
mask, so all masks are decoded once, when a data set is opened for the first time.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from stagewright.data.augment import View
from stagewright.data.decode import MOST_PIXELS
from stagewright.data.formats.fields import IGNORED
from stagewright.data.formats.folders import walk_images
from stagewright.data.formats.index import Index, IndexBuilder, Progress
from stagewright.data.formats.records import BadRecordError, DataError, FileRecords, Record, read_file
from stagewright.data.labels import Labels
from stagewright.errors import counted, first_line
from stagewright.files import read_regular

_IMAGES, _MASKS = "images", "masks"
_NO_CLASS = 255
_MODES = {"1", "L", "P", "I", "I;16"}
_DEPTH, _COLOUR = 24, 25  # bytes of a PNG's header


def list_pairs(root: Path) -> list[str]:
    """The two folders of a data set."""
    if missing := next((name for name in (_IMAGES, _MASKS) if not (root / name).is_dir()), None):
        raise DataError(f"data segmentation:{root}: no folder {missing}; it needs {_IMAGES} and {_MASKS}")
    return [_IMAGES, _MASKS]


def scan_pairs(root: Path, folders: list[str], names: tuple[str, ...], progress: Progress) -> Index:
    """The index of all images that have a mask; one without the other is an error."""
    builder, files = IndexBuilder(root, progress), dict[str, dict[str, tuple[str, int]]]()
    for folder in folders:
        found = files[folder] = {}
        for path, size in walk_images(root, folder, builder.watched):
            stem = _stem(path, folder)
            if folder == _MASKS and not path.endswith(".png"):
                raise DataError(f"{root / path}: masks must be .png files; convert or remove it")
            if stem in found:
                raise DataError(f"{root}: both {found[stem][0]} and {path} are named {stem}; rename one")
            found[stem] = path, size
    images, masks = files[_IMAGES], files[_MASKS]
    if alone := sorted(images.keys() ^ masks.keys()):
        have, lack = (images, _MASKS) if alone[0] in images else (masks, _IMAGES)
        raise DataError(
            f"{root}: {have[alone[0]][0]} has no partner in {lack} ({counted(len(alone), 'file')} of "
            f"{len(images) + len(masks)} without one); add it or remove the file"
        )
    if not images:
        raise DataError(f"{root}: no images in {_IMAGES}; put NAME.jpg there and NAME.png into {_MASKS}")
    for stem in sorted(images):
        path, size = images[stem]
        builder.add(0, 0, size, _largest(root, mask_of(path)), path)
    return builder.build(names)


def mask_of(path: str) -> str:
    """The mask of an image below the root."""
    return f"{_MASKS}/{_stem(path, _IMAGES)}.png"


def _stem(path: str, folder: str) -> str:
    """The path below a folder of the root, without its suffix; whatever a forged index says, it stays below."""
    below, slash, name = path.removeprefix(f"{folder}/").rpartition("/")
    return f"{below}{slash}{name.rpartition('.')[0] or name}"


def _largest(root: Path, path: str) -> int:
    """The largest class number of a mask; -1 if it can't be read, which its record will report, or has none."""
    try:
        mask = decode_mask(read_regular(root / path))
    except (OSError, BadRecordError):
        return -1
    return int(mask[mask != _NO_CLASS].max(initial=-1))


class PairRecords(FileRecords):
    """Images with their masks."""

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.classes = max(index.classes, len(index.class_names))

    def get(self, index: int) -> Record:
        record = super().get(index)
        name = f"{self.index.root}/{mask_of(self.index.name(index))}"
        mask = read_file(name, "make it a readable PNG or remove its image")
        return replace(record, label=0, mask=mask)


def decode_mask(data: bytes) -> NDArray[np.int32]:
    """The numbers of a PNG [rows, columns], as they are stored."""
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            if not 0 < image.height * image.width <= MOST_PIXELS:
                raise BadRecordError(f"claims {image.height}x{image.width} pixels; 1 to {MOST_PIXELS} are read")
            if image.mode not in _MODES:
                raise BadRecordError(f"is {image.mode}; class numbers need grey values or a palette")
            if data[_COLOUR] == 0 and data[_DEPTH] in (2, 4):
                raise BadRecordError(
                    f"has {data[_DEPTH]} bits per grey value; save it with 8"
                )  # Pillow would scale them
            return np.array(image).astype(np.int32)
    except BadRecordError:
        raise
    except Exception as error:  # Pillow's plugins raise whatever their parsers raise
        raise BadRecordError(f"not a readable PNG ({first_line(error).partition(' <')[0]})") from error


class MaskLabels(Labels):
    """One class number per pixel; `IGNORED` for those outside the image, blackened, or of no class."""

    follows_view = True

    def __init__(self, classes: int) -> None:
        self._classes = classes

    def allocate(self, samples: int, side: int) -> Tensor:
        return torch.zeros(samples, side, side, dtype=torch.int64)

    def read(self, record: Record, height: int, width: int) -> Tensor:
        try:
            mask = decode_mask(record.mask)
        except BadRecordError as error:
            raise BadRecordError(f"{record.name}: its mask {error}") from error
        if mask.shape != (height, width):
            rows, columns = mask.shape
            raise BadRecordError(f"{record.name} has {height}x{width} pixels but its mask has {rows}x{columns}")
        found = torch.from_numpy(mask)
        found[found == _NO_CLASS] = IGNORED
        if (largest := int(found.max())) >= self._classes:
            classes = counted(self._classes, "class", "es")
            raise BadRecordError(f"{record.name}: its mask has class {largest}, but the data set has {classes}")
        return found

    def draw(self, label: Tensor, view: View, target: Tensor) -> None:
        side = len(target)
        rows, in_rows = _nearest(view.down, side, view.rows, view.height)
        columns, in_columns = _nearest(view.right, side, view.columns, view.width)
        if view.is_mirrored:
            columns = view.width - 1 - columns
        drawn = label[view.top + rows][:, view.left + columns]
        target.copy_(torch.where(in_rows[:, None] & in_columns, drawn, IGNORED))
        if view.cutout is not None:
            view.cutout.apply(target, IGNORED)


def _nearest(first: int, count: int, resized: int, size: int) -> tuple[Tensor, Tensor]:
    """Which of `size` pixels are nearest to `count` of them resized to `resized`, and which of those exist."""
    places = torch.arange(first, first + count)
    return ((2 * places + 1) * size // (2 * resized)).clamp(0, size - 1), (places >= 0) & (places < resized)
