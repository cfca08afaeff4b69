"""The page of one run.

It is made from the run folder alone, so that it can be made again, for any run: what the folder lacks, the page leaves
out. A failure to make it never fails a run.
"""

from __future__ import annotations

from collections.abc import Iterator

from stagewright.metrics import batch_seconds
from stagewright.report.page import Bar, Bars, Block, Curve, Curves, Page, Pipeline, Point
from stagewright.report.read import Run
from stagewright.report.sections import configuration, environment, epochs, memory, stages, usage_blocks
from stagewright.report.summary import summarize_run
from stagewright.report.timeline import busy_over_time, common_window

_MOST_POINTS = 200  # of a curve of throughput
_PLOTS = {"Loss": "loss", "Accuracy": "% of the samples", "Loss scale": "scale of the gradients"}  # and their axes


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
    took = batch_seconds(run.steps)
    steps = [step for step in run.steps if step.batch in took]
    size = max(1, -(-len(steps) // _MOST_POINTS))
    groups = [steps[first : first + size] for first in range(0, len(steps), size)]
    return tuple(
        Point(group[-1].seconds, len(group) * run.batch / spent)
        for group in groups
        if (spent := sum(took[step.batch] for step in group)) > 0
    )


def losses(runs: dict[str, Run]) -> Iterator[Block]:
    """Losses and accuracies of runs in shared plots; a curve's label begins with its run's name."""
    for title, axis in _PLOTS.items():
        curves = tuple(
            Curve(f"{name}: {label}" if name else label, points)
            for name, run in runs.items()
            for plot, label, points in _learning(run)
            if plot == title and points
        )
        if curves:
            yield Curves(title, "step", axis, curves)


def _learning(run: Run) -> Iterator[tuple[str, str, tuple[Point, ...]]]:
    """The curves of a run over its steps: the title of the plot, the label and the points of each."""
    yield "Loss", "training", tuple(Point(step.batch + 1, step.loss) for step in run.steps)
    scored, on = run.evaluations, run.evaluated_on
    yield "Loss", f"evaluation on {on}", tuple(Point(found.batch, found.loss) for found in scored)
    if len(scored) > 1:
        yield "Accuracy", f"top-1 on {on}", tuple(Point(found.batch, 100 * found.top1) for found in scored)
        yield "Accuracy", f"top-5 on {on}", tuple(Point(found.batch, 100 * found.top5) for found in scored)
    scales = tuple(Point(step.batch + 1, step.loss_scale) for step in run.steps if step.loss_scale)
    yield "Loss scale", "loss scale", scales
