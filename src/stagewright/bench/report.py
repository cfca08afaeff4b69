"""A suite's outcome, as a table for people and as one object for machines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from stagewright.bench.arena import Segment
from stagewright.bench.contests import Contest, Measure, Side, Suite, Work
from stagewright.bench.machine import machine, num_cores
from stagewright.bench.statistics import Ratio, median, median_ratio

_TOLERANCE = 0.2  # cores


@dataclass(frozen=True, slots=True)
class Series:
    """One side's figures, a repeat each."""

    side: str
    values: tuple[float, ...]
    losses: tuple[float, ...]  # of each segment's last batch: sides that do the same work have the same
    others: tuple[float, ...]  # cores that other processes kept busy meanwhile
    busiest: float | None = None  # share of the time that the busiest rank's GPU work took, by its own events

    @property
    def median(self) -> float:
        return median(self.values)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A contest that was run."""

    contest: Contest
    work: Work
    ours: Series
    theirs: Series

    @property
    def ratio(self) -> Ratio:
        return median_ratio(self.ours.values, self.theirs.values)

    @property
    def is_met(self) -> bool:
        return self.contest.goal.is_met(self.ratio)

    def describe(self) -> dict[str, Any]:
        return {
            "ours": asdict(self.ours) | {"median": self.ours.median},
            "theirs": asdict(self.theirs) | {"median": self.theirs.median},
            "ratio": self.ratio.value,
            "interval": [self.ratio.low, self.ratio.high],
            "goal": self.contest.goal.text,
            "is_met": self.is_met,
            "work": asdict(self.work),
        }


def make_series(side: Side, measure: Measure, work: Work, steps: int, segments: Sequence[Segment]) -> Series:
    return Series(
        side.name,
        tuple(measure.of(work, steps, segment.seconds) for segment in segments),
        tuple(segment.loss for segment in segments),
        tuple(segment.others for segment in segments),
        _median_of(segment.busiest for segment in segments),
    )


def _median_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def describe(suite: Suite, outcomes: Sequence[Outcome], command: str) -> dict[str, Any]:
    """The whole outcome as one object."""
    return {
        "suite": suite.name,
        "measure": suite.measure.name,
        "contests": [outcome.describe() for outcome in outcomes],
        "machine": machine(),
        "others": _others(outcomes),
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
    }


def show_work(console: Console, suite: Suite, outcomes: Sequence[Outcome]) -> None:
    """The contests over one piece of work, as a table of 80 columns."""
    console.print(str(outcomes[0].work), highlight=False)
    console.print(_table(suite, outcomes))
    for series in {outcome.ours.side: outcome.ours for outcome in outcomes if outcome.ours.busiest}.values():
        console.print(f"{series.side}: the busiest rank computes {series.busiest:.0%} of the time", highlight=False)


def show_machine(console: Console, outcomes: Sequence[Outcome], command: str) -> None:
    """What it was measured on, and how to repeat it."""
    console.print(", ".join([*machine().values(), time.strftime("%Y-%m-%d")]), highlight=False)
    ranks = max(outcome.work.world for outcome in outcomes)
    if (others := _others(outcomes)) + ranks > num_cores() + _TOLERANCE:
        busy = f"other processes kept {others:.1f} of {num_cores()} cores busy"
        console.print(f"warning: {busy}; repeat on a quiet machine", highlight=False)
    console.print(f"repeat with: {command}", highlight=False, soft_wrap=True)


def _others(outcomes: Sequence[Outcome]) -> float:
    """Cores that other processes kept busy: the median over all segments."""
    return median([others for outcome in outcomes for side in (outcome.ours, outcome.theirs) for others in side.others])


def _table(suite: Suite, outcomes: Iterable[Outcome]) -> Table:
    table = Table(width=80)
    table.add_column(suite.measure.name)
    for heading in ("ours", "theirs", "ratio", "95 % interval", "goal", "met"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        ratio = outcome.ratio
        table.add_row(
            f"{outcome.ours.side} / {outcome.theirs.side}",
            f"{outcome.ours.median:.0f}",
            f"{outcome.theirs.median:.0f}",
            f"{ratio.value:.2f}",
            f"{ratio.low:.2f} - {ratio.high:.2f}",
            outcome.contest.goal.text,
            "yes" if outcome.is_met else "no",
        )
    return table
