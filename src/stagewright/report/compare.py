"""The page that compares several runs: bars side by side, curves in shared plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stagewright.metrics import (
    IMAGES,
    LOSS,
    MIB,
    ThroughputUnit,
    format_metric,
    format_rate,
    headline_metrics,
    is_lower_better,
    metric_label,
)
from stagewright.report.figures import measured_on, no_timeline, peak_memory, throughput, training_pauses, waiting
from stagewright.report.page import Bar, Bars, Block, Curve, Curves, Note, Page, Summary, Table
from stagewright.report.read import Run
from stagewright.report.run import losses
from stagewright.report.sections import configuration
from stagewright.report.summary import busy_sentences, resume_sentence
from stagewright.report.timeline import busy_shares, pipeline_of
from stagewright.report.words import NONE, format_duration, format_share

_MOST_METRICS = 4  # columns of the overview
_NOT_RANKED = (
    "Emulated runs are not ranked by speed or memory: all their ranks ran in one process, one after the other, which "
    "says nothing about real devices."
)


def comparison_page(runs: Sequence[Run]) -> Page:
    """Compare runs, named by what distinguishes them; emulated ones without speed and memory."""
    named = dict(zip(_names(runs), runs, strict=True))
    return Page(f"{len(runs)} runs: {'; '.join(named)}", tuple(_blocks(named)))


def _names(runs: Sequence[Run]) -> list[str]:
    """Mode and shape where those differ for all runs, else the names of the folders."""
    short = [f"{run.mode} {run.shape}" for run in runs]
    if len({run.model for run in runs}) > 1:
        short = [f"{run.model} {name}" for run, name in zip(runs, short, strict=True)]
    if len(set(short)) == len(runs):
        return short
    folders = [run.name for run in runs]
    return folders if len(set(folders)) == len(runs) else [str(run.folder) for run in runs]


def _blocks(named: dict[str, Run]) -> Iterator[Block]:
    real = {name: run for name, run in named.items() if not run.is_emulated}
    colours = {name: number for number, name in enumerate(named)}
    units = {run.unit for run in real.values()}
    unit = units.pop() if len(units) == 1 else ThroughputUnit("samples") if units else IMAGES
    yield Summary(tuple(_sentences(named, real, unit)))
    yield _overview(named, unit)
    if bars := tuple(_bars(real, unit, colours)):
        yield Bars("Speed", unit.rate, bars, _NOT_RANKED if len(real) < len(named) else "")
    else:
        yield Note("Speed", "No step was timed." if real else _NOT_RANKED)
    yield from losses(named)
    yield from _throughputs(real, unit, colours)
    for name, run in named.items():
        title = f"Timeline: {name}"
        pipeline = pipeline_of(run, title)
        yield replace(pipeline, colour=colours[name]) if pipeline else Note(title, f"No timeline: {no_timeline(run)}.")
    held = {name: max(peak.values()) / MIB for name, run in real.items() if (peak := peak_memory(run.own_usage))}
    if peaks := tuple(Bar(name, size, colour=colours[name]) for name, size in held.items()):
        yield Bars("Memory", "MiB", peaks, "Measured peak of the rank that used most.")
    yield _configurations(named)


def _throughputs(real: dict[str, Run], unit: ThroughputUnit, colours: dict[str, int]) -> Iterator[Block]:
    """Throughput over time, with the pauses of every run."""
    found = {name: points for name, run in real.items() if len(points := throughput(run, unit)) > 1}
    marks = tuple(
        mark if len(found) == 1 else replace(mark, curve=number)
        for number, name in enumerate(found)
        for mark in training_pauses(real[name])
    )
    if curves := tuple(Curve(name, points, colour=colours[name]) for name, points in found.items()):
        yield Curves("Throughput", "seconds of training", unit.rate, curves, marks=marks, from_zero=True)


def _sentences(named: dict[str, Run], real: dict[str, Run], unit: ThroughputUnit) -> Iterator[str]:
    speeds = {name: unit.of(speed) for name, run in real.items() if (speed := run.images_per_second)}
    if len(speeds) > 1:
        (best, most), *rest = sorted(speeds.items(), key=lambda entry: -entry[1])
        others = ", ".join(f"{most / speed:.2f} times {name} ({format_rate(speed)})" for name, speed in rest)
        yield f"{best} is the fastest: {format_rate(most)} {unit.rate}, {others}."
    if emulated := [name for name in named if name not in real]:
        yield f"Emulated: {', '.join(emulated)}. {_NOT_RANKED}"
    yield from _best(named)
    for name, run in named.items():
        if text := " ".join((*resume_sentence(run), *(busy_sentences(run) if name in real else ()))):
            yield f"{name}: {text[0].lower()}{text[1:]}"
    if unfinished := [name for name, run in named.items() if run.summary is None]:
        yield f"Not finished: {', '.join(unfinished)}."
    yield "Each is a single run, so small differences may be chance; stagewright bench repeats and gives intervals."


def _best(named: dict[str, Run]) -> Iterator[str]:
    """Which run has the best value of the first metric that all evaluated runs have; of the loss where none is."""
    scored = {name: run.evaluations[-1] for name, run in named.items() if run.evaluations}
    if len(scored) < 2:
        return
    values = {name: {**headline_metrics(last.metrics), LOSS: last.loss} for name, last in scored.items()}
    metric = next(found for found in next(iter(values.values())) if all(found in known for known in values.values()))
    scores = {name: known[metric] for name, known in values.items()}
    best = (min if is_lower_better(metric) else max)(scores, key=lambda name: scores[name])
    rest = ", ".join(f"{name} {format_metric(metric, score)}" for name, score in scores.items() if name != best)
    on = " and ".join(dict.fromkeys(run.evaluated_on for run in named.values() if run.evaluations))
    shown = f"{metric_label(metric)} on {on} at the end: {format_metric(metric, scores[best])}"
    yield f"{best} has the best {shown} (others: {rest})."


def _bars(real: dict[str, Run], unit: ThroughputUnit, colours: dict[str, int]) -> Iterator[Bar]:
    for name, run in real.items():
        if speed := run.images_per_second:
            yield Bar(name, unit.of(speed), colour=colours[name])
        if run.predicted:
            yield Bar(name, unit.of(run.predicted), is_predicted=True, colour=colours[name])


def _overview(named: dict[str, Run], unit: ThroughputUnit) -> Table:
    learnt = [headline_metrics(run.evaluations[-1].metrics) for run in named.values() if run.evaluations]
    names = list(dict.fromkeys(name for metrics in learnt for name in metrics))[:_MOST_METRICS]
    rows = []
    for name, run in named.items():
        speed, last = run.images_per_second, run.evaluations[-1] if run.evaluations else None
        shares = None if run.is_emulated else busy_shares(run)
        unsteady = " (not steady)" if run.steady_steps == 0 else ""
        rows.append(
            (
                name,
                f"{format_rate(unit.of(speed))}{unsteady}" if speed and not run.is_emulated else NONE,
                *(format_metric(name, last.metrics[name]) if last and name in last.metrics else NONE for name in names),
                f"{last.loss:.4g}" if last else NONE,
                measured_on(run) if last else NONE,
                f"{run.steps[-1].loss:.4g}" if run.steps else NONE,
                str(run.steps[-1].batch + 1) if run.steps else "0",
                format_duration(run.seconds) if run.steps else NONE,
                NONE if shares is None else format_share(waiting(shares)),
                run.name,
            )
        )
    scores = (*map(metric_label, names), "evaluation loss", "measured on", "training loss")
    columns = ("run", unit.rate, *scores, "steps", "time", "waiting", "folder")
    return Table("Overview", columns, tuple(rows), colours=tuple(range(len(rows))))


def _configurations(named: dict[str, Run]) -> Table:
    """The configurations, one column per run; rows that differ come first."""
    tables = {name: {row[0]: row[1] for row in configuration(run).rows} for name, run in named.items()}
    keys = list(dict.fromkeys(key for table in tables.values() for key in table))
    keys.sort(key=lambda key: len({table.get(key) for table in tables.values()}) == 1)
    rows = tuple((key, *(table.get(key, "-") for table in tables.values())) for key in keys)
    return Table("Configurations", ("what", *tables), rows, "Rows that differ come first.")
