"""Made runs of a study, and the findings from them."""

from __future__ import annotations

from benchmarks.learning.findings import Finding, TrainingSpeed, findings_of
from benchmarks.learning.runs import TrainedRun


def trained(trial: str, seed: int, *top1: float, diverged: str = "") -> TrainedRun:
    """A run that is scored every ten batches, which are an epoch."""
    return TrainedRun(
        "R", trial, seed, tuple((10 * (n + 1), score) for n, score in enumerate(top1)), 10, None, diverged
    )


def findings(*runs: TrainedRun, baseline: str = "sync", speed: float | None = None) -> list[Finding]:
    keys = dict.fromkeys(run.key for run in runs)
    speeds = {} if speed is None else {key: TrainingSpeed(speed, "measured here", 2) for key in keys}
    return findings_of(runs, {"R": baseline}, dict.fromkeys(keys, 640), speeds)
