"""What the runs of a trial show, compared with the baseline's: how accurate, how certain, and how soon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median_low, stdev

from benchmarks.learning.runs import TrainedRun
from stagewright.bench.statistics import Interval
from stagewright.metrics import is_lower_better, is_percentage, metric_label

_STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5 % of 1, 2, ... degrees of freedom
_NORMAL = 1.959964
_STEP = 0.005  # targets are multiples of half a point
_BELOW = 0.01  # the default target is the baseline's accuracy minus this, or worse by this share
_TINY = 1e-9  # rounding error of numbers that are shown in percent


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean with Student's 95 % interval, which is a point for a single value."""
    middle = fmean(values)
    if len(values) < 2:
        return Interval(middle, middle, middle)
    half = _student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(middle, middle - half, middle + half)


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution: from the table, beyond it by its expansion around the normal."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z, v = _NORMAL, freedom
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return float(sum(term / v**power for power, term in enumerate(terms)))


def in_points(difference: float, metric: str = "top1") -> str:
    """A difference of a metric: in percentage points, where what rounds to 0 is +0.00, or as a number."""
    if not is_percentage(metric):
        return f"{difference + 0.0:+.3g}"
    return f"{round(100 * difference, 2) + 0.0:+.2f}"


@dataclass(frozen=True, slots=True)
class TrainingSpeed:
    """How fast a trial trains, and how that is known."""

    images_per_second: float
    source: str  # measured here, or predicted for a cluster
    devices: int  # that it uses


@dataclass(frozen=True, slots=True)
class Finding:
    """One trial over all its seeds."""

    group: str
    trial: str
    is_baseline: bool
    runs: tuple[TrainedRun, ...]  # by seed
    against: tuple[TrainedRun, ...]  # the baseline's, by the same seeds
    samples: int  # per epoch
    speed: TrainingSpeed | None = None

    @property
    def finished(self) -> tuple[TrainedRun, ...]:
        """The runs that did not diverge."""
        return tuple(run for run in self.runs if not run.diverged and run.scores)

    @property
    def metric(self) -> str:
        """What its runs are judged by."""
        return next((run.metric for run in self.runs if run.scores), "top1")

    @property
    def accuracy(self) -> Interval | None:
        """The metric at the end, over the runs that did not diverge."""
        return mean_interval([run.scores[-1][1] for run in self.finished]) if self.finished else None

    @property
    def pairs(self) -> list[float]:
        """Accuracy minus the baseline's, seed by seed, so that the effect of a seed on both cancels."""
        theirs = {
            run.seed: run.scores[-1][1]
            for run in self.against
            if not run.diverged and run.scores and run.metric == self.metric
        }
        return [run.scores[-1][1] - theirs[run.seed] for run in self.finished if run.seed in theirs]

    @property
    def difference(self) -> Interval | None:
        return mean_interval(self.pairs) if self.pairs and not self.is_baseline else None

    @property
    def per_epoch(self) -> int:
        """Batches per epoch; the maximum, since a run that diverged early has not seen a whole epoch."""
        return max(run.per_epoch for run in self.runs)

    @property
    def summary(self) -> str:
        """How accurate it is compared with the baseline, in a few words."""
        lost = [run for run in self.runs if run.diverged]
        if lost:
            return f"{len(lost)} of {len(self.runs)} runs diverged: {lost[0].diverged}"
        if self.is_baseline or self.difference is None:
            return "baseline" if self.is_baseline else "no baseline to compare with"
        points = self.difference
        which = "lower" if points.value < 0 else "higher"
        apart = f"{metric_label(self.metric)} {which} by {abs(points.value):.3g}{self._share}"
        if is_percentage(self.metric):
            apart = f"{which} by {abs(points.value) * 100:.2f} points"
        if not (round(points.value, 4) if is_percentage(self.metric) else points.value):
            apart = "equal"
        if len(self.pairs) < 2:
            return f"{apart} (one seed: no interval)"
        interval = f"{in_points(points.low, self.metric)} to {in_points(points.high, self.metric)}"
        if points.holds(0.0):
            unit = " points" if is_percentage(self.metric) else ""
            middle = f"{in_points(points.value, self.metric)}{unit}"
            return f"as {'accurate' if unit else 'good'} as the baseline within noise ({middle}, {interval})"
        return f"{apart} ({interval})"

    @property
    def _share(self) -> str:
        """The difference as a share of the baseline's mean, where that is above 0."""
        own, apart = self.accuracy, self.difference
        base = 0.0 if own is None or apart is None else own.value - apart.value
        return f" or {abs(apart.value) / base:.1%}" if apart is not None and base > 0 else ""

    def epochs_to(self, target: float) -> float | None:
        """Epochs until half of the runs have reached a value of the metric; None where fewer reach it."""
        sign = -1 if is_lower_better(self.metric) else 1
        firsts = [
            next((batch / self.per_epoch for batch, value in run.scores if sign * (value - target) >= -_TINY), math.inf)
            for run in self.runs
        ]
        middle = median_low(firsts) if firsts else math.inf
        return None if math.isinf(middle) else middle

    def seconds_to(self, target: float) -> float | None:
        """The time of those epochs, where the speed is known."""
        epochs = self.epochs_to(target)
        return None if epochs is None or self.speed is None else epochs * self.samples / self.speed.images_per_second

    def curve(self) -> list[tuple[float, Interval]]:
        """The metric by epoch: the mean over the runs that reached it, with its interval."""
        at: dict[float, list[float]] = {}
        for run in self.runs:
            for batch, value in run.scores:
                at.setdefault(batch / self.per_epoch, []).append(value)
        return [(epoch, mean_interval(at[epoch])) for epoch in sorted(at)]


@dataclass(frozen=True, slots=True)
class Study:
    """What a whole study found."""

    title: str
    date: str
    command: str
    machine: Mapping[str, str]
    findings: tuple[Finding, ...]
    targets: Mapping[str, float]  # of the metric, by group
    elsewhere: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # machines of reused runs, by their origin

    def groups(self) -> dict[str, list[Finding]]:
        found: dict[str, list[Finding]] = {}
        for finding in self.findings:
            found.setdefault(finding.group, []).append(finding)
        return found


def findings_of(
    runs: Sequence[TrainedRun],
    baselines: Mapping[str, str],
    samples: Mapping[tuple[str, str], int],
    speeds: Mapping[tuple[str, str], TrainingSpeed],
) -> list[Finding]:
    """The runs by trial, in the order of `samples`; `baselines` by group."""
    trials: dict[tuple[str, str], list[TrainedRun]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
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
    """One point below the baseline's accuracy, rounded down to half a point; of other metrics, 1 % worse."""
    finding = next((finding for finding in findings if finding.is_baseline), None)
    base = None if finding is None else finding.accuracy
    if finding is None or base is None:
        return None
    if is_percentage(finding.metric):
        return round(math.floor((base.value - _BELOW) / _STEP + _TINY) * _STEP, 4)
    worse = 1 if is_lower_better(finding.metric) else -1
    return float(f"{base.value + worse * _BELOW * abs(base.value):.4g}")
