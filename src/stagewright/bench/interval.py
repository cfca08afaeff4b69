"""How sure a median is, and whether two series differ: smoothed bootstrap intervals of 95 %.

A plain bootstrap of the median of 7 values can only give the second and the sixth of them, which hold the true median
in 87.5 % of all series. Here every drawn value is moved by a normal error of s/sqrt(n). Coverage of 1,000 series each
(normal, skewed, heavy-tailed, disturbed): 83-88 % of 3 values, 92-95 % of 5, 94-97 % of 7, 95-98 % from 9 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
