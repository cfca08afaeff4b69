"""The page of one run.

It is made from the run folder alone, so that it can be made again, for any run: what the folder lacks, the page leaves
out. A failure to make it never fails a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from stagewright.metrics import format_metric, headline_metrics, is_percentage, metric_label
from stagewright.report.figures import no_timeline, throughput, tiles, training_pauses
from stagewright.report.page import Block, Curve, Curves, Look, Note, Page, Point, Table
from stagewright.report.read import Run
from stagewright.report.sections import configuration, environment, epochs, memory, stages, usage_blocks
from stagewright.report.summary import summarize_run
from stagewright.report.timeline import busy_over_time, pipeline_of
from stagewright.report.words import upper_first

_MOST_PLOTS = 12  # of metrics


def run_page(run: Run) -> Page:
    """Everything about a run, the most important first."""
    return Page(f"{run.model}, {run.mode} {run.shape}: {_short_name(run)}", tuple(_blocks(run)))


def _short_name(run: Run) -> str:
    """The beginning of an id that repeats model and plan: when the run started. Any other name of a folder is whole."""
    match = re.fullmatch(rf"(\d{{8}}-\d{{6}})-.*-{re.escape(f'{run.mode}-{run.shape}')}", run.name)
    return match[1] if match else run.name


def _blocks(run: Run) -> Iterator[Block]:
    yield tiles(run)
    yield summarize_run(run)
    yield _speed(run)
    yield from losses({"": run})
    yield from _by_class(run)
    if pipeline := pipeline_of(run, "Timeline"):
        yield pipeline
        if computing := busy_over_time(pipeline):
            yield computing
    else:
        yield Note("Timeline", f"No timeline: {no_timeline(run)}.")
    yield from memory(run)
    yield from usage_blocks(run)
    yield stages(run)
    if table := epochs(run):
        yield table
    yield configuration(run)
    yield from environment(run)


def _speed(run: Run) -> Block:
    """Throughput over time beside what was predicted."""
    points, rate = throughput(run, run.unit), run.unit.rate
    if len(points) < 2:
        return Note("Throughput", "No curve: fewer than two steps were timed.")
    curves = [Curve("measured", points)]
    if run.predicted and not run.is_emulated:
        level = run.unit.of(run.predicted)
        ends = (Point(points[0].x, level), Point(points[-1].x, level))
        curves.append(Curve("predicted", ends, Look.REFERENCE, colour=0))
    note = "All ranks ran in one process: this is no speed of real devices." if run.is_emulated else ""
    marks = tuple(training_pauses(run))
    return Curves("Throughput", "seconds of training", rate, tuple(curves), marks=marks, note=note, from_zero=True)


def losses(runs: dict[str, Run]) -> Iterator[Block]:
    """Losses and metrics of runs in shared plots; a curve's label begins with its run's name.

    Accuracies share a plot; every other metric has its own. Those after the first are small.
    """
    found = [
        (plot, name, replace(curve, colour=number if name else None))
        for number, (name, run) in enumerate(runs.items())
        for plot, curve in _learning(run)
        if curve.points
    ]
    plots = list(dict.fromkeys(plot for plot, _, _ in found if plot.is_metric))[:_MOST_PLOTS]
    for plot in (_LOSS, *plots, _SCALE):
        own = [(name, curve) for of, name, curve in found if of == plot]
        labels = dict.fromkeys(curve.label for _, curve in own if curve.look is Look.POINTS)
        shapes = {label: number for number, label in enumerate(labels)}
        drawn = tuple(
            replace(curve, label=": ".join(filter(None, (name, curve.label))), shape=shapes.get(curve.label, 0))
            for name, curve in own
        )
        if drawn:
            yield Curves(plot.title, "step", plot.axis, drawn, is_small=plot in plots[1:])


@dataclass(frozen=True, slots=True)
class _Plot:
    title: str
    axis: str
    is_metric: bool = True


_LOSS, _SCALE = _Plot("Loss", "loss", False), _Plot("Loss scale", "scale of the gradients", False)
_ACCURACY = _Plot("Accuracy", "%")


def _learning(run: Run) -> Iterator[tuple[_Plot, Curve]]:
    """The losses of a run over its steps, and its metrics where there are two evaluations, each with its plot."""
    yield _LOSS, Curve("training", tuple(Point(step.batch + 1, step.loss) for step in run.steps))
    scored = tuple(Point(found.batch, found.loss) for found in run.evaluations)
    yield _LOSS, Curve(f"evaluation on {run.evaluated_on}", scored, Look.POINTS)
    scales = tuple(Point(step.batch + 1, step.loss_scale) for step in run.steps if step.loss_scale)
    yield _SCALE, Curve("loss scale", scales)
    names = dict.fromkeys(name for found in run.evaluations for name in headline_metrics(found.metrics))
    for name in names if len(run.evaluations) > 1 else ():
        label, is_share = metric_label(name), is_percentage(name)
        plot = _ACCURACY if is_share and name != "iou" else _Plot(upper_first(label), "%" if is_share else label)
        points = (
            Point(found.batch, (100 if is_share else 1) * found.metrics[name])
            for found in run.evaluations
            if name in found.metrics
        )
        yield plot, Curve(f"{label} on {run.evaluated_on}", tuple(points), Look.POINTS)


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
