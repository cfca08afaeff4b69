"""The page of one run.

It is made from the run folder alone, so that it can be made again, for any run: what the folder lacks, the page leaves
out. A failure to make it never fails a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stagewright.metrics import Unit, batch_seconds, format_metric, headline_metrics, is_percentage, metric_label
from stagewright.report.page import Bar, Bars, Block, Curve, Curves, Page, Pipeline, Point, Table
from stagewright.report.read import Run
from stagewright.report.sections import configuration, environment, epochs, memory, stages, usage_blocks
from stagewright.report.summary import summarize_run, upper_first
from stagewright.report.timeline import busy_over_time, common_window

_MOST_POINTS = 200  # of a curve of throughput
_MOST_PLOTS = 12  # of metrics


def run_page(run: Run) -> Page:
    """Everything about a run, the most important first."""
    return Page(f"{run.model}, {run.mode} {run.shape}: {run.name}", tuple(_blocks(run)))


def _blocks(run: Run) -> Iterator[Block]:
    yield summarize_run(run)
    yield from _speed(run)
    yield from losses({"": run})
    yield from _by_class(run)
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
        unit = run.unit
        bars = (Bar("measured", unit.of(speed)), Bar("predicted", unit.of(predicted), is_predicted=True))
        yield Bars("Predicted and measured", unit.rate, bars)
    points = throughput(run, run.unit)
    if len(points) > 1:
        rate = run.unit.rate
        yield Curves("Throughput over time", "seconds of training", rate, (Curve(rate, points),))


def throughput(run: Run, unit: Unit) -> tuple[Point, ...]:
    """Throughput over groups of consecutive steps; whatever delays a step shows as a dip."""
    took = batch_seconds(run.steps)
    steps = [step for step in run.steps if step.batch in took]
    size = max(1, -(-len(steps) // _MOST_POINTS))
    groups = [steps[first : first + size] for first in range(0, len(steps), size)]
    return tuple(
        Point(group[-1].seconds, unit.of(len(group) * run.batch) / spent)
        for group in groups
        if (spent := sum(took[step.batch] for step in group)) > 0
    )


def losses(runs: dict[str, Run]) -> Iterator[Block]:
    """Losses and metrics of runs in shared plots; a curve's label begins with its run's name.

    Accuracies share a plot; every other metric has its own. Those after the first are small.
    """
    curves = [(name, *curve) for name, run in runs.items() for curve in (*_losses(run), *_metrics(run)) if curve[-1]]
    plots = list(dict.fromkeys(plot for _, plot, _, _ in curves if plot.is_metric))[:_MOST_PLOTS]
    for plot in (_LOSS, *plots, _SCALE):
        drawn = tuple(Curve(f"{n}: {label}" if n else label, points) for n, of, label, points in curves if of == plot)
        if drawn:
            yield Curves(plot.title, "step", plot.axis, drawn, is_small=plot in plots[1:])


@dataclass(frozen=True, slots=True)
class _Plot:
    title: str
    axis: str
    is_metric: bool = True


_LOSS, _SCALE = _Plot("Loss", "loss", False), _Plot("Loss scale", "scale of the gradients", False)
_ACCURACY = _Plot("Accuracy", "%")


def _losses(run: Run) -> Iterator[tuple[_Plot, str, tuple[Point, ...]]]:
    """The losses of a run over its steps: the plot, the label and the points of each curve."""
    yield _LOSS, "training", tuple(Point(step.batch + 1, step.loss) for step in run.steps)
    scored = run.evaluations
    yield _LOSS, f"evaluation on {run.evaluated_on}", tuple(Point(found.batch, found.loss) for found in scored)
    scales = tuple(Point(step.batch + 1, step.loss_scale) for step in run.steps if step.loss_scale)
    yield _SCALE, "loss scale", scales


def _metrics(run: Run) -> Iterator[tuple[_Plot, str, tuple[Point, ...]]]:
    """The same of its metrics, where there are two evaluations."""
    names = dict.fromkeys(name for found in run.evaluations for name in headline_metrics(found.metrics))
    for name in names if len(run.evaluations) > 1 else ():
        known = [(found.batch, found.metrics[name]) for found in run.evaluations if name in found.metrics]
        label = metric_label(name)
        is_share = is_percentage(name)
        plot = _ACCURACY if is_share and name != "iou" else _Plot(upper_first(label), "%" if is_share else label)
        points = tuple(Point(batch, 100 * value if is_share else value) for batch, value in known)
        yield plot, f"{label} on {run.evaluated_on}", points


def _by_class(run: Run) -> Iterator[Table]:
    """The metrics of single classes after the last evaluation, such as `iou/3`."""
    metrics = run.evaluations[-1].metrics if run.evaluations else {}
    for metric in dict.fromkeys(name.partition("/")[0] for name in metrics if "/" in name):
        rows = tuple(
            (name.partition("/")[2], format_metric(metric, value))
            for name, value in metrics.items()
            if name.startswith(f"{metric}/")
        )
        yield Table(f"{upper_first(metric_label(metric))} by class", ("class", "value"), rows)
