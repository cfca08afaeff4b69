"""Which part of an image is seen, and how: a pure function of seed, epoch, index and the image's size."""

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

Whole = TypeVar("Whole", int, Indices)  # of one sample, or of many
_KEY = struct.Struct("<4Q")
_BLOCK = struct.Struct("<8Q")
_AREA = (0.08, 1.0)
_ASPECT = (3 / 4, 4 / 3)
_TRIES = 10
_EVALUATION_SCALE = 256 / 224  # short side before the centre crop, over the crop
_PADDING = 8  # a small image gets a border of one eighth of its side
_SMALL = 64  # sides up to this are cropped with padding unless told otherwise


class Cropping(StrEnum):
    """How training crops."""

    RESIZED = "resized"  # a random area in a random shape, resized
    PADDED = "padded"  # the whole image, shifted under a border


@dataclass(frozen=True, slots=True)
class Jitter:
    """Factors of brightness, contrast and saturation, applied in this order."""

    brightness: float
    contrast: float
    saturation: float


@dataclass(frozen=True, slots=True)
class Hole:
    """A square of what is seen that is black; it may reach beyond."""

    top: int
    left: int
    side: int

    def blacken(self, seen: Tensor) -> None:
        """In place, in [rows, columns, RGB]."""
        seen[max(0, self.top) : self.top + self.side, max(0, self.left) : self.left + self.side] = 0


@dataclass(frozen=True, slots=True)
class View:
    """What is taken of an image: a box of it, perhaps mirrored, resized, of which a window is seen.

        image ─ box ─► mirrored ─► resized to `rows` x `columns` ─ window from (`down`, `right`) ─► jittered ─► a hole

    A window may reach beyond what was resized; it is black there.
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
    hole: Hole | None = None


@dataclass(frozen=True, slots=True)
class Augmentation:
    """The views of a run: random in training, the centre in evaluation."""

    side: int  # of the square that leaves
    cropping: Cropping
    jitter: float = 0.0  # most that a factor differs from 1
    cutout: int = 0  # side of the hole, 0 for none

    def training(self, seed: int, epoch: int, index: int, height: int, width: int) -> View:
        draws = _uniform(seed, epoch, index)

        def below(number: int) -> int:
            return int(next(draws) * number)

        is_mirrored = below(2) == 0
        jitter = self._jitter(draws) if self.jitter else None
        if self.cropping is Cropping.RESIZED:
            box, window = _random_box(draws, height, width), (0, 0)
        else:
            box, window = (0, 0, height, width), self._window(below)
        hole = Hole(*self._corner(below), self.cutout) if self.cutout else None
        return View(*box, self.side, self.side, *window, is_mirrored, jitter, hole)

    def shifts(self, seed: int, epoch: int, indices: Indices) -> NDArray[np.int64]:
        """As `training`, of many padded samples at once: down, right, if mirrored, and the hole's top and left."""
        words = b"".join(_block(seed, epoch, int(index), 0) for index in indices)
        draws: Iterator[NDArray[np.float64]] = iter(((np.frombuffer(words, "<u8").reshape(-1, 8) >> 11) * 2.0**-53).T)

        def below(number: int) -> Indices:
            return (next(draws) * number).astype(np.int64)

        is_mirrored = below(2) == 0
        return np.stack([*self._window(below), is_mirrored, *self._corner(below)], axis=1)

    def evaluation(self, height: int, width: int) -> View:
        """The short side resized to 256 for 224 and the centre taken; small images whole."""
        if self.cropping is Cropping.PADDED:
            return View(0, 0, height, width, self.side, self.side)
        short = round(self.side * _EVALUATION_SCALE)
        rows = short if height <= width else short * height // width
        columns = short if width <= height else short * width // height
        down, right = round((rows - self.side) / 2), round((columns - self.side) / 2)
        return View(0, 0, height, width, rows, columns, down, right)

    def _window(self, below: Callable[[int], Whole]) -> tuple[Whole, Whole]:
        """How far down and right of the image a padded one's window begins."""
        border = self.side // _PADDING
        return below(2 * border + 1) - border, below(2 * border + 1) - border

    def _corner(self, below: Callable[[int], Whole]) -> tuple[Whole, Whole]:
        """Top and left of the hole, whose middle is anywhere in the image."""
        return below(self.side) - self.cutout // 2, below(self.side) - self.cutout // 2

    def _jitter(self, draws: Iterator[float]) -> Jitter:
        return Jitter(*(1 + self.jitter * (2 * next(draws) - 1) for _ in range(3)))


def default_cropping(side: int) -> Cropping:
    return Cropping.PADDED if side <= _SMALL else Cropping.RESIZED


def _uniform(seed: int, epoch: int, index: int) -> Iterator[float]:
    """Numbers in [0, 1): hashes of a counter, keyed by who asks."""
    block = 0
    while True:
        for word in _BLOCK.unpack(_block(seed, epoch, index, block)):
            yield (word >> 11) * 2.0**-53
        block += 1


def _block(seed: int, epoch: int, index: int, block: int) -> bytes:
    return blake2b(_KEY.pack(seed % 2**64, epoch, index, block)).digest()


def _random_box(draws: Iterator[float], height: int, width: int) -> tuple[int, int, int, int]:
    """A box of random area and shape that fits; after ten that do not, the largest centred one of a fair shape."""
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
