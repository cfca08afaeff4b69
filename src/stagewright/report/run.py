"""The page of one run."""

from __future__ import annotations

from collections.abc import Iterator

from stagewright.report.busy import common, over_time
from stagewright.report.facts import configuration, environment, epochs, memory, stages
from stagewright.report.page import Bar, Bars, Block, Curve, Curves, Page, Pipeline, Point
from stagewright.report.record import Run
from stagewright.report.use import uses_of
from stagewright.report.verdict import verdict_of

_STRETCHES = 200  # of a curve of throughput


def page_of(run: Run) -> Page:
    """Everything that a run's folder tells, the most telling first."""
    return Page(f"{run.model}, {run.mode} {run.shape}: {run.name}", tuple(_blocks(run)))


def _blocks(run: Run) -> Iterator[Block]:
    yield verdict_of(run)
    yield from _speed(run)
    yield from losses({"": run})
    if run.timeline and run.timeline.spans:
        timeline = common(run.timeline)
        yield Pipeline("What each rank did", timeline, run.layout.ranks)
        if computing := over_time(timeline, run.layout.ranks):
            yield computing
    yield from memory(run)
    yield from uses_of(run)
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
