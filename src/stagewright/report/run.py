"""The page of one run, and the page of a plan that has not run yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stagewright.metrics import MIB, Timeline
from stagewright.report.charts import format_number
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
from stagewright.report.summary import summarize_run, upper_first
from stagewright.report.timeline import busy_over_time, common_window

_MOST_POINTS = 200  # of a curve of throughput


@dataclass(frozen=True, slots=True)
class PlanPrediction:
    """What the simulator predicts for a plan, as a report needs it."""

    name: str
    rank_map: RankMap
    plan: dict[str, Any]
    images_per_second: float
    bubble: float
    bound: str  # what limits the speed
    busy: tuple[float, ...]  # share of time that each rank computes
    memory: tuple[Mapping[str, float], ...]  # bytes by part, of each rank
    limits: tuple[int, ...]
    timeline: Timeline


def run_page(run: Run) -> Page:
    """Everything about a run, the most important first."""
    return Page(f"{run.model}, {run.mode} {run.shape}: {run.name}", tuple(_blocks(run)))


def _blocks(run: Run) -> Iterator[Block]:
    yield summarize_run(run)
    yield from _speed(run)
    yield from losses({"": run})
    if run.timeline and run.timeline.spans:
        timeline = common_window(run.timeline)
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
    """Predicted and measured throughput, and throughput over time."""
    speed, predicted = run.images_per_second, run.predicted
    if speed and predicted and not run.is_emulated:
        bars = (Bar("measured", speed), Bar("predicted", predicted, is_predicted=True))
        yield Bars("Predicted and measured", "images/s", bars)
    points = throughput(run)
    if len(points) > 1:
        yield Curves("Throughput over time", "seconds of training", "images/s", (Curve("images/s", points),))


def throughput(run: Run) -> tuple[Point, ...]:
    """Images per second over groups of consecutive steps; whatever delays a step shows as a dip."""
    steps = [step for step in run.steps if step.images_per_second > 0]
    size = max(1, -(-len(steps) // _MOST_POINTS))
    points = []
    for first in range(0, len(steps), size):
        group = steps[first : first + size]
        spent = sum(run.batch / step.images_per_second for step in group)
        if spent:
            points.append(Point(group[-1].seconds, len(group) * run.batch / spent))
    return tuple(points)


def losses(runs: dict[str, Run]) -> Iterator[Block]:
    """Losses and accuracies of runs in shared plots; a curve's label begins with its run's name."""

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


def prediction_page(prediction: PlanPrediction) -> Page:
    """The page of a plan that has not run: predicted speed, memory by part and timeline."""
    ranks = prediction.rank_map.labels
    stacks = tuple(
        Stack(label, tuple((name, size / MIB) for name, size in parts.items() if size), limit / MIB)
        for label, parts, limit in zip(ranks, prediction.memory, prediction.limits, strict=True)
    )
    busy = tuple(
        Bar(label, 100 * share, is_predicted=True) for label, share in zip(ranks, prediction.busy, strict=True)
    )
    return Page(
        f"{prediction.name}: {prediction.plan['mode']} {prediction.plan['placement']}, predicted",
        (
            Summary(tuple(_summarize_prediction(prediction))),
            Pipeline(
                "What each rank would do while the pipeline fills, runs and drains", prediction.timeline, ranks, True
            ),
            Bars("Computing once the pipeline is full", "% of the time", busy),
            Stacks("Memory by part", "MiB", stacks),
            Table("Plan", ("what", "value"), _plan_rows(prediction.plan)),
        ),
    )


def _plan_rows(plan: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    values = {name: value for name, value in plan.items() if not isinstance(value, bool)}
    return tuple((name, ", ".join(map(str, v)) if isinstance(v, list) else str(v)) for name, v in values.items())


def _summarize_prediction(prediction: PlanPrediction) -> list[str]:
    totals = [sum(parts.values()) for parts in prediction.memory]
    lines = [
        f"Predicted: {format_number(prediction.images_per_second)} images/s; "
        f"devices wait {prediction.bubble:.1%} of the time; "
        f"bound by {prediction.bound}.",
    ]
    short = [rank for rank, (total, limit) in enumerate(zip(totals, prediction.limits, strict=True)) if total > limit]
    if short:
        worst = max(short, key=lambda rank: totals[rank] / prediction.limits[rank])
        lines.append(
            f"It does not fit: {prediction.rank_map.labels[worst]} needs {format_number(totals[worst] / MIB)} MiB "
            f"of {format_number(prediction.limits[worst] / MIB)}."
        )
    else:
        most = max(range(len(totals)), key=lambda rank: totals[rank])
        label = upper_first(prediction.rank_map.labels[most])
        lines.append(f"{label} needs the most memory: {format_number(totals[most] / MIB)} MiB.")
    return lines
