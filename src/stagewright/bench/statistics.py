"""How two interleaved series compare: their medians, and how sure the ratio of the medians is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 10_000
_TAIL = 2.5  # percent beyond each end of the interval


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of medians with its 95 % interval."""

    value: float
    low: float
    high: float


def median(series: Sequence[float]) -> float:
    return float(np.median(series))


def median_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Ratio:
    """The median of one series over that of the other, with its bootstrap 95 % interval.

    The series are interleaved, so what disturbs one repeat disturbs both sides: repeats are drawn in pairs.
    """
    if not ours or len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} and {len(theirs)} repeats; interleaved series have equally many, at least 1")
    pairs = np.array([ours, theirs])
    draws = np.random.default_rng(seed).integers(len(ours), size=(_RESAMPLES, len(ours)))
    above, below = np.median(pairs[:, draws], axis=2)
    low, high = np.percentile(above / below, [_TAIL, 100 - _TAIL])
    return Ratio(median(ours) / median(theirs), float(low), float(high))
