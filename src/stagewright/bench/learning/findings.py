"""What the seeds of a trial came to, beside the baseline's: how accurate, how sure, and how soon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low, stdev

from stagewright.bench.learning.runs import Learnt
from stagewright.bench.statistics import Interval

_STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5 % of 1, 2, ... degrees of freedom
_NORMAL = 1.959964
_STEP = 0.005  # targets are told in half points
_BELOW = 0.01  # the target is the baseline's accuracy less so much, unless told
_TINY = 1e-9  # of numbers that are told in percent


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean with Student's 95 % interval; of one value, nothing is known but itself."""
    middle = fmean(values)
    if len(values) < 2:
        return Interval(middle, middle, middle)
    half = _student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(middle, middle - half, middle + half)


def _student(freedom: int) -> float:
    """97.5 % of Student's distribution: from the table, and by its series around the normal beyond."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z, v = _NORMAL, freedom
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return float(sum(term / v**power for power, term in enumerate(terms)))


def in_points(difference: float) -> str:
    """A difference of top-1 in percent; what rounds to nothing has no sign of its own."""
    return f"{round(100 * difference, 2) + 0.0:+.2f}"


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a trial trains, and how that is known."""

    images_per_second: float
    source: str  # measured here, or predicted for a cluster
    devices: int  # that it takes


@dataclass(frozen=True, slots=True)
class Finding:
    """One trial over all its seeds."""

    group: str
    trial: str
    is_baseline: bool
    learnt: tuple[Learnt, ...]  # by seed
    against: tuple[Learnt, ...]  # the baseline's, by the same seeds
    samples: int  # of an epoch
    speed: Speed | None = None

    @property
    def whole(self) -> tuple[Learnt, ...]:
        return tuple(run for run in self.learnt if not run.diverged and run.scores)

    @property
    def accuracy(self) -> Interval | None:
        """Top-1 at the end, over the seeds that came to it."""
        return mean_interval([run.scores[-1][1] for run in self.whole]) if self.whole else None

    @property
    def pairs(self) -> list[float]:
        """How much more accurate than the baseline, seed by seed: what a seed does to both cancels."""
        theirs = {run.seed: run.scores[-1][1] for run in self.against if not run.diverged and run.scores}
        return [run.scores[-1][1] - theirs[run.seed] for run in self.whole if run.seed in theirs]

    @property
    def difference(self) -> Interval | None:
        return mean_interval(self.pairs) if self.pairs and not self.is_baseline else None

    @property
    def per_epoch(self) -> int:
        """Batches of an epoch; a run that diverged early has not seen a whole one."""
        return max(run.per_epoch for run in self.learnt)

    @property
    def verdict(self) -> str:
        lost = [run for run in self.learnt if run.diverged]
        if lost:
            return f"{len(lost)} of {len(self.learnt)} runs diverge: {lost[0].diverged}"
        if self.is_baseline or self.difference is None:
            return "what the others are compared with" if self.is_baseline else "nothing to compare with"
        points = self.difference
        which = "lower" if points.value < 0 else "higher"
        apart = f"{which} by {abs(points.value) * 100:.2f} points" if round(points.value, 4) else "equal"
        if len(self.pairs) < 2:
            return f"{apart} (one seed: no interval)"
        interval = f"{in_points(points.low)} to {in_points(points.high)}"
        if points.holds(0.0):
            return f"as accurate as the baseline within noise ({in_points(points.value)} points, {interval})"
        return f"{apart} ({interval})"

    def epochs_to(self, target: float) -> float | None:
        """Epochs until half of the runs have reached a top-1; None where they never do."""
        firsts = [
            next((batch / self.per_epoch for batch, top1 in run.scores if top1 >= target - _TINY), math.inf)
            for run in self.learnt
        ]
        middle = median_low(firsts) if firsts else math.inf
        return None if math.isinf(middle) else middle

    def seconds_to(self, target: float) -> float | None:
        """The time of those epochs, at the speed that is known."""
        epochs = self.epochs_to(target)
        return None if epochs is None or self.speed is None else epochs * self.samples / self.speed.images_per_second

    def curve(self) -> list[tuple[float, Interval]]:
        """Top-1 by epoch: the mean over the seeds that came so far, with its interval."""
        at: dict[float, list[float]] = {}
        for run in self.learnt:
            for batch, top1 in run.scores:
                at.setdefault(batch / self.per_epoch, []).append(top1)
        return [(epoch, mean_interval(at[epoch])) for epoch in sorted(at)]


def findings_of(
    learnt: Sequence[Learnt],
    baselines: Mapping[str, str],
    samples: Mapping[tuple[str, str], int],
    speeds: Mapping[tuple[str, str], Speed],
) -> list[Finding]:
    """The runs by trial, in the order of `samples`; `baselines` by group."""
    trials: dict[tuple[str, str], list[Learnt]] = {}
    for run in sorted(learnt, key=lambda run: run.seed):
        trials.setdefault(run.key, []).append(run)
    return [
        Finding(
            group,
            trial,
            baselines[group] == trial,
            tuple(trials[group, trial]),
            tuple(trials.get((group, baselines[group]), ())),
            samples[group, trial],
            speeds.get((group, trial)),
        )
        for group, trial in samples
        if (group, trial) in trials
    ]


def target_of(findings: Sequence[Finding]) -> float | None:
    """A point less than the baseline reaches, in half points."""
    base = next((finding.accuracy for finding in findings if finding.is_baseline), None)
    return None if base is None else round(math.floor((base.value - _BELOW) / _STEP + _TINY) * _STEP, 4)
