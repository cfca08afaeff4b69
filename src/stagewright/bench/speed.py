"""How fast a run trained once it had warmed up, from the times of its batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagewright.bench.series import find_plateau, segments
from stagewright.metrics import Step

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
