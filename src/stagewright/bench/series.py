"""What a series of times says of itself: when its warm-up was over, and which values stand out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

_WINDOW = 3
_CLOSE = 0.05  # of the level: nearer than this is there, however quiet the rest is
_SPREADS = 3.0
_FAR = 3.5  # modified z-score from which a value is called an outlier
_MAD_OF_SIGMA = 0.6745
_MEAN_OF_SIGMA = 1.2533


@dataclass(frozen=True, slots=True)
class Plateau:
    """Where a series became steady; without a level it never did, and its later half stands in."""

    start: int
    is_reached: bool


def find_plateau(times: Sequence[float]) -> Plateau:
    """The first segment from which on times stay at the level of the later half.

    A window of three counts by its median, so one disturbed segment neither ends nor delays the warm-up. The level
    itself must stand still: the medians of the last two quarters may differ by no more than what counts as close.
    """
    half = len(times) // 2
    late = times[half:]
    if len(late) < 2:
        return Plateau(half, False)
    level = median(late)
    spread = median(abs(value - level) for value in late) / _MAD_OF_SIGMA
    close = max(_CLOSE * level, _SPREADS * spread)
    middle = len(late) // 2
    drift = abs(median(late[:middle]) - median(late[middle:]))
    if drift > max(_CLOSE * level, spread):
        return Plateau(half, False)
    for start in range(half):
        if abs(median(times[start : start + _WINDOW]) - level) <= close and abs(times[start] - level) <= close:
            return Plateau(start, True)
    return Plateau(half, True)


def outliers(values: Sequence[float]) -> tuple[int, ...]:
    """Positions of values whose modified z-score is above 3.5; they are told of, and count all the same."""
    if len(values) < 3:
        return ()
    middle = median(values)
    distances = [abs(value - middle) for value in values]
    spread = median(distances) / _MAD_OF_SIGMA or fmean(distances) * _MEAN_OF_SIGMA
    return tuple(index for index, distance in enumerate(distances) if spread and distance / spread > _FAR)


def segments(times: Sequence[float], most: int) -> list[tuple[int, float]]:
    """Neighbours added up into at most so many segments of equally many: how many, and their time."""
    size = max(1, -(-len(times) // most))
    whole = len(times) // size * size
    return [(size, sum(times[first : first + size])) for first in range(0, whole, size)]
