"""How a sample is cropped, mirrored and coloured: a pure function of seed, epoch, index and image size.

An `Augmentation` holds the options of a run and returns a `View` for each sample. Views are values: `decode.render`
draws them on the CPU, `on_device` on a GPU.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stagewright.data.order import Indices

Integer = TypeVar("Integer", int, Indices)  # one sample's number, or an array with one per sample
_KEY = struct.Struct("<4Q")
_BLOCK = struct.Struct("<8Q")
_AREA = (0.08, 1.0)
_ASPECT = (3 / 4, 4 / 3)
_TRIES = 10
_EVALUATION_SCALE = 256 / 224  # short side before the centre crop, over the crop
_PADDING = 8  # the border of a padded crop is one eighth of the side
_SMALL = 64  # the largest side that is cropped with padding by default


class Cropping(StrEnum):
    """How images are cropped in training."""

    RESIZED = "resized"  # a box of random area and aspect ratio, resized
    PADDED = "padded"  # the whole image with a black border, shifted


@dataclass(frozen=True, slots=True)
class Jitter:
    """Factors of brightness, contrast and saturation, applied in this order."""

    brightness: float
    contrast: float
    saturation: float


@dataclass(frozen=True, slots=True)
class Cutout:
    """A black square in the crop; it may extend past the edges."""

    top: int
    left: int
    side: int

    def apply(self, pixels: Tensor, value: int = 0) -> None:
        """Blacken the square of [rows, columns, RGB] in place, or give it another value."""
        pixels[max(0, self.top) : self.top + self.side, max(0, self.left) : self.left + self.side] = value


@dataclass(frozen=True, slots=True)
class View:
    """What to take from an image: a box, perhaps mirrored, resized, and a window of the result.

        image ─ box ─► mirrored ─► resized to `rows` x `columns` ─ window from (`down`, `right`) ─► jitter ─► cutout

    A window may extend past the resized box and is black there.
    """

    top: int
    left: int
    height: int
    width: int
    rows: int
    columns: int
    down: int = 0
    right: int = 0
    is_mirrored: bool = False
    jitter: Jitter | None = None
    cutout: Cutout | None = None


@dataclass(frozen=True, slots=True)
class Augmentation:
    """The augmentation of a run: random views in training, the centre in evaluation."""

    side: int  # of the square output
    cropping: Cropping
    jitter: float = 0.0  # how far a colour factor may differ from 1
    cutout: int = 0  # side of the black square; 0 for none

    def training_view(self, seed: int, epoch: int, index: int, height: int, width: int) -> View:
        draws = _uniform(seed, epoch, index)

        def below(number: int) -> int:
            return int(next(draws) * number)

        is_mirrored = below(2) == 0
        jitter = Jitter(*(1 + self.jitter * (2 * next(draws) - 1) for _ in range(3))) if self.jitter else None
        if self.cropping is Cropping.RESIZED:
            box, window = _random_box(draws, height, width), (0, 0)
        else:
            box, window = (0, 0, height, width), self._window(below)
        cutout = Cutout(*self._corner(below), self.cutout) if self.cutout else None
        return View(*box, self.side, self.side, *window, is_mirrored, jitter, cutout)

    def shifts(self, seed: int, epoch: int, indices: Indices) -> NDArray[np.int64]:
        """`training_view` of many padded samples at once: down, right, is_mirrored, and the cutout's top and left."""
        words = b"".join(_block(seed, epoch, int(index), 0) for index in indices)
        draws: Iterator[NDArray[np.float64]] = iter(((np.frombuffer(words, "<u8").reshape(-1, 8) >> 11) * 2.0**-53).T)

        def below(number: int) -> Indices:
            return (next(draws) * number).astype(np.int64)

        is_mirrored = below(2) == 0
        return np.stack([*self._window(below), is_mirrored, *self._corner(below)], axis=1)

    def evaluation_view(self, height: int, width: int) -> View:
        """The centre crop, after the short side is resized to 256 for crops of 224; small images whole."""
        if self.cropping is Cropping.PADDED:
            return View(0, 0, height, width, self.side, self.side)
        short = round(self.side * _EVALUATION_SCALE)
        rows = short if height <= width else short * height // width
        columns = short if width <= height else short * width // height
        down, right = round((rows - self.side) / 2), round((columns - self.side) / 2)
        return View(0, 0, height, width, rows, columns, down, right)

    def _window(self, below: Callable[[int], Integer]) -> tuple[Integer, Integer]:
        """How far down and right of the image's corner the window of a padded crop begins."""
        border = self.side // _PADDING
        return below(2 * border + 1) - border, below(2 * border + 1) - border

    def _corner(self, below: Callable[[int], Integer]) -> tuple[Integer, Integer]:
        """Top and left of the cutout, whose centre may be anywhere in the image."""
        return below(self.side) - self.cutout // 2, below(self.side) - self.cutout // 2


def default_cropping(side: int) -> Cropping:
    return Cropping.PADDED if side <= _SMALL else Cropping.RESIZED


def _uniform(seed: int, epoch: int, index: int) -> Iterator[float]:
    """Numbers in [0, 1): hashes of a counter, keyed by seed, epoch and index."""
    block = 0
    while True:
        for word in _BLOCK.unpack(_block(seed, epoch, index, block)):
            yield (word >> 11) * 2.0**-53
        block += 1


def _block(seed: int, epoch: int, index: int, block: int) -> bytes:
    return blake2b(_KEY.pack(seed % 2**64, epoch, index, block)).digest()


def _random_box(draws: Iterator[float], height: int, width: int) -> tuple[int, int, int, int]:
    """A random box that fits; after ten that don't, the largest centred box of an allowed aspect ratio."""
    for _ in range(_TRIES):
        area = height * width * (_AREA[0] + next(draws) * (_AREA[1] - _AREA[0]))
        low, high = (math.log(aspect) for aspect in _ASPECT)
        aspect = math.exp(low + next(draws) * (high - low))
        columns, rows = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < columns <= width and 0 < rows <= height:
            top, left = int(next(draws) * (height - rows + 1)), int(next(draws) * (width - columns + 1))
            return top, left, rows, columns
    aspect = min(max(width / height, _ASPECT[0]), _ASPECT[1])
    rows, columns = min(height, round(width / aspect)), min(width, round(height * aspect))
    return (height - rows) // 2, (width - columns) // 2, rows, columns
