"""How two interleaved series compare: their medians, and how sure the ratio of the medians is. How sure a median is, and whether two series differ: smoothed bootstrap intervals of 95 %.

A plain bootstrap of the median of 7 values can only give the second and the sixth of them, which hold the true median
in 87.5 % of all series. Here every drawn value is moved by a normal error of s/sqrt(n). Coverage of 1,000 series each
(normal, skewed, heavy-tailed, disturbed): 83-88 % of 3 values, 92-95 % of 5, 94-97 % of 7, 95-98 % from 9 on. What a series of times says of itself: when its warm-up was over, and which values stand out. How fast a run trained once it had warmed up, from the times of its batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from stagewright.events import Step

_RATIO_RESAMPLES = 10_000
_TAIL = 2.5  # percent beyond each end of the interval


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of medians with its 95 % interval."""

    value: float
    low: float
    high: float


def median_of(series: Sequence[float]) -> float:
    return float(np.median(series))


def median_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Ratio:
    """The median of one series over that of the other, with its bootstrap 95 % interval.

    The series are interleaved, so what disturbs one repeat disturbs both sides: repeats are drawn in pairs.
    """
    if not ours or len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} and {len(theirs)} repeats; interleaved series have equally many, at least 1")
    pairs = np.array([ours, theirs])
    draws = np.random.default_rng(seed).integers(len(ours), size=(_RATIO_RESAMPLES, len(ours)))
    above, below = np.median(pairs[:, draws], axis=2)
    low, high = np.percentile(above / below, [_TAIL, 100 - _TAIL])
    return Ratio(median_of(ours) / median_of(theirs), float(low), float(high))


Array = Any  # a numpy array
_RESAMPLES = 2_000
_TAILS = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        digits = 0 if abs(self.value) >= 100 else 2
        return f"{self.value:,.{digits}f} ({self.low:,.{digits}f} - {self.high:,.{digits}f})"


def median_interval(series: Sequence[float], seed: int = 0) -> Interval:
    """The median of a series with its interval; of one value, nothing is known but itself."""
    values = _checked(series)
    low, high = np.percentile(_medians(values, np.random.default_rng(seed)), _TAILS)
    middle = float(np.median(values))
    return Interval(middle, min(float(low), middle), max(float(high), middle))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Interval:
    """The median ratio of two interleaved series, round by round, so that what disturbs a round cancels."""
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} and {len(theirs)} repeats; interleaved series have equally many")
    return _as_ratio(median_interval(np.log(_positive(ours)) - np.log(_positive(theirs)), seed))


def ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Interval:
    """The ratio of the medians of two series that were not taken together."""
    above, below = np.log(_positive(ours)), np.log(_positive(theirs))
    generator = np.random.default_rng(seed)
    low, high = np.percentile(_medians(above, generator) - _medians(below, generator), _TAILS)
    middle = float(np.median(above) - np.median(below))
    return _as_ratio(Interval(middle, min(float(low), middle), max(float(high), middle)))


def _as_ratio(logs: Interval) -> Interval:
    return Interval(*(float(np.exp(log)) for log in (logs.value, logs.low, logs.high)))


def _medians(values: Array, generator: np.random.Generator) -> Array:
    """Medians of series drawn from a smoothed version of this one."""
    count = len(values)
    if count == 1:
        return np.repeat(values, 2)
    drawn = values[generator.integers(count, size=(_RESAMPLES, count))]
    width = np.std(values, ddof=1) / np.sqrt(count)
    return np.median(drawn + width * generator.standard_normal(drawn.shape), axis=1)


def _checked(series: Sequence[float]) -> Array:
    values = np.asarray(series, dtype=float)
    if not len(values) or not np.isfinite(values).all():
        raise ValueError(
            f"{len(values)} values, all finite is {bool(np.isfinite(values).all())}; give at least 1 number"
        )
    return values


def _positive(series: Sequence[float]) -> Array:
    values = _checked(series)
    if values.min() <= 0:
        raise ValueError(f"a speed of {values.min():g}; speeds are above 0")
    return values


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


_MOST_SEGMENTS = 40


@dataclass(frozen=True, slots=True)
class Speed:
    """A run's speed behind its warm-up."""

    rate: float  # images a second
    warmup: int  # batches that do not count
    is_steady: bool  # a plateau was found
    times: tuple[float, ...]  # seconds of a batch, segment by segment, warm-up included
    steady: tuple[float, ...]  # seconds of each batch that counts


def steady_speed(steps: Sequence[Step], batch: int) -> Speed:
    """The speed of the batches from the plateau on; of the later half where there is none."""
    seconds = [batch / step.images_per_second for step in steps if step.images_per_second > 0]
    if not seconds:
        raise ValueError("0 timed batches say nothing about speed; train at least 1")
    found = segments(seconds, _MOST_SEGMENTS)
    plateau = find_plateau([total / count for count, total in found])
    warmup = sum(count for count, _ in found[: plateau.start])
    steady = tuple(seconds[warmup:])
    times = tuple(total / count for count, total in found)
    return Speed(batch * len(steady) / sum(steady), warmup, plateau.is_reached, times, steady)
