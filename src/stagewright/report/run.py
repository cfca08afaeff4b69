"""The page of one run. The page of a plan that has not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stagewright.metrics import Timeline
from stagewright.report.charts import shown
from stagewright.report.page import (
    Bar,
    Bars,
    Block,
    Curve,
    Curves,
    Page,
    Pipeline,
    Point,
    Stack,
    Stacks,
    Summary,
    Table,
)
from stagewright.report.read import RankMap, Run
from stagewright.report.sections import configuration, environment, epochs, memory, stages, usage_blocks
from stagewright.report.summary import summarize_run
from stagewright.report.timeline import busy_over_time, common

_STRETCHES = 200  # of a curve of throughput


def run_page(run: Run) -> Page:
    """Everything that a run's folder tells, the most telling first."""
    return Page(f"{run.model}, {run.mode} {run.shape}: {run.name}", tuple(_blocks(run)))


def _blocks(run: Run) -> Iterator[Block]:
    yield summarize_run(run)
    yield from _speed(run)
    yield from losses({"": run})
    if run.timeline and run.timeline.spans:
        timeline = common(run.timeline)
        yield Pipeline("What each rank did", timeline, run.rank_map.labels)
        if computing := busy_over_time(timeline, run.rank_map.labels):
            yield computing
    yield from memory(run)
    yield from usage_blocks(run)
    yield stages(run)
    if table := epochs(run):
        yield table
    yield configuration(run)
    yield from environment(run)


def _speed(run: Run) -> Iterator[Block]:
    """Predicted against measured, and the throughput as it went."""
    speed, predicted = run.images_per_second, run.predicted
    if speed and predicted and not run.is_emulated:
        bars = (Bar("measured", speed), Bar("predicted", predicted, is_predicted=True))
        yield Bars("Predicted against measured", "images/s", bars)
    points = throughput(run)
    if len(points) > 1:
        yield Curves("Throughput over time", "seconds of training", "images/s", (Curve("images/s", points),))


def throughput(run: Run) -> tuple[Point, ...]:
    """Images a second over stretches of steps; what held a step up shows as a dip."""
    steps = [step for step in run.steps if step.images_per_second > 0]
    size = max(1, -(-len(steps) // _STRETCHES))
    points = []
    for first in range(0, len(steps), size):
        stretch = steps[first : first + size]
        spent = sum(run.batch / step.images_per_second for step in stretch)
        if spent:
            points.append(Point(stretch[-1].seconds, len(stretch) * run.batch / spent))
    return tuple(points)


def losses(runs: dict[str, Run]) -> Iterator[Block]:
    """Losses and accuracies of runs over each other; the names go before the curves'."""

    def named(name: str, what: str) -> str:
        return f"{name}: {what}" if name else what

    curves = []
    for name, run in runs.items():
        if run.steps:
            curves.append(Curve(named(name, "training"), tuple(Point(step.batch + 1, step.loss) for step in run.steps)))
        if run.evaluations:
            points = tuple(Point(evaluated.batch, evaluated.loss) for evaluated in run.evaluations)
            curves.append(Curve(named(name, "evaluation"), points))
    if curves:
        yield Curves("Loss", "step", "loss", tuple(curves))
    scored = [
        Curve(named(name, word), tuple(Point(found.batch, 100 * getattr(found, mark)) for found in run.evaluations))
        for name, run in runs.items()
        for word, mark in (("top-1", "top1"), ("top-5", "top5"))
        if len(run.evaluations) > 1
    ]
    if scored:
        yield Curves("Accuracy", "step", "% of the samples", tuple(scored))
    scales = [
        Curve(named(name, "loss scale"), tuple(Point(s.batch + 1, s.loss_scale) for s in run.steps if s.loss_scale))
        for name, run in runs.items()
        if any(step.loss_scale for step in run.steps)
    ]
    if scales:
        yield Curves("Loss scale", "step", "scale of the gradients", tuple(scales))


_MIB = 2**20


@dataclass(frozen=True, slots=True)
class PlanPrediction:
    """A prediction as a report needs it."""

    name: str
    rank_map: RankMap
    plan: dict[str, Any]
    images_per_second: float
    bubble: float
    bound: str  # what the time goes to
    busy: tuple[float, ...]  # share of each rank's time
    memory: tuple[Mapping[str, float], ...]  # bytes by part, of each rank
    limits: tuple[int, ...]
    timeline: Timeline


def prediction_page(outlook: PlanPrediction) -> Page:
    """Speed, memory by part and the timeline, all of it predicted."""
    ranks = outlook.rank_map.labels
    stacks = tuple(
        Stack(label, tuple((name, size / _MIB) for name, size in parts.items() if size), limit / _MIB)
        for label, parts, limit in zip(ranks, outlook.memory, outlook.limits, strict=True)
    )
    busy = tuple(Bar(label, 100 * share, is_predicted=True) for label, share in zip(ranks, outlook.busy, strict=True))
    return Page(
        f"{outlook.name}: {outlook.plan['mode']} {outlook.plan['placement']}, predicted",
        (
            Summary(tuple(_verdict(outlook))),
            Pipeline(
                "What each rank would do, while the pipeline fills, runs and drains", outlook.timeline, ranks, True
            ),
            Bars("Computing once the pipeline is full", "% of the time", busy),
            Stacks("Memory by part", "MiB", stacks),
            Table("Plan", ("what", "value"), _plan(outlook.plan)),
        ),
    )


def _plan(plan: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    values = {name: value for name, value in plan.items() if not isinstance(value, bool)}
    return tuple((name, ", ".join(map(str, v)) if isinstance(v, list) else str(v)) for name, v in values.items())


def _verdict(outlook: PlanPrediction) -> list[str]:
    totals = [sum(parts.values()) for parts in outlook.memory]
    lines = [
        f"Predicted: {shown(outlook.images_per_second)} images/s; devices wait {outlook.bubble:.1%} of the time; "
        f"bound by {outlook.bound}.",
    ]
    short = [rank for rank, (total, limit) in enumerate(zip(totals, outlook.limits, strict=True)) if total > limit]
    if short:
        worst = max(short, key=lambda rank: totals[rank] / outlook.limits[rank])
        lines.append(
            f"It does not fit: {outlook.rank_map.labels[worst]} needs {shown(totals[worst] / _MIB)} MiB "
            f"of {shown(outlook.limits[worst] / _MIB)}."
        )
    else:
        most = max(range(len(totals)), key=lambda rank: totals[rank])
        lines.append(f"The most memory needs {outlook.rank_map.labels[most]}: {shown(totals[most] / _MIB)} MiB.")
    return lines
