"""The page that compares several runs: bars side by side, curves in shared plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stagewright.metrics import IMAGES, LOSS, MIB, Unit, format_metric, headline_metrics, is_lower_better, metric_label
from stagewright.report.charts import format_number, format_seconds
from stagewright.report.page import Bar, Bars, Block, Curve, Curves, Page, Pipeline, Summary, Table
from stagewright.report.read import Run
from stagewright.report.run import losses, throughput
from stagewright.report.sections import configuration
from stagewright.report.summary import busy_sentences, peak_memory, resume_sentence
from stagewright.report.timeline import common_window

_MOST_METRICS = 4  # columns of the overview


def comparison_page(runs: Sequence[Run], names: Sequence[str] = ()) -> Page:
    """Compare runs, named by `names` or by what distinguishes them; emulated ones without speed and memory."""
    named = dict(zip(names or _names(runs), runs, strict=True))
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
    real = {name: run for name, run in named.items() if not run.is_emulated}  # the others say nothing about devices
    yield Summary(tuple(_sentences(named, real)))
    unit = _common_unit(real)
    if bars := tuple(_bars(real, unit)):
        yield Bars("Throughput", unit.rate, bars)
    yield _overview(named, unit)
    yield from losses(named)
    curves = tuple(Curve(name, points) for name, run in real.items() if len(points := throughput(run, unit)) > 1)
    if curves:
        yield Curves("Throughput over time", "seconds of training", unit.rate, curves)
    for name, run in named.items():
        if run.timeline and run.timeline.spans:
            yield Pipeline(f"What each rank did: {name}", common_window(run.timeline), run.rank_map.labels)
    peaks = tuple(Bar(name, max(peak.values()) / MIB) for name, run in real.items() if (peak := peak_memory(run)))
    if peaks:
        yield Bars("Measured peak memory of the rank that used most", "MiB", peaks)
    yield _configurations(named)


def _sentences(named: dict[str, Run], real: dict[str, Run]) -> Iterator[str]:
    unit = _common_unit(real)
    speeds = {name: unit.of(speed) for name, run in real.items() if (speed := run.images_per_second)}
    if len(speeds) > 1:
        ordered = sorted(speeds, key=lambda name: -speeds[name])
        best = ordered[0]
        others = [f"{speeds[best] / speeds[name]:.2f} x {name} ({format_number(speeds[name])})" for name in ordered[1:]]
        yield f"{best} is the fastest: {format_number(speeds[best])} {unit.rate}, {', '.join(others)}."
    if emulated := [name for name in named if name not in real]:
        yield (
            f"Emulated, with all ranks in one process: {', '.join(emulated)}. "
            "Their speed and memory say nothing about real devices and are not compared."
        )
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


def _common_unit(runs: dict[str, Run]) -> Unit:
    """The unit of all runs; samples where they differ."""
    units = {run.unit for run in runs.values()}
    return units.pop() if len(units) == 1 else Unit("samples") if units else IMAGES


def _bars(named: dict[str, Run], unit: Unit) -> Iterator[Bar]:
    for name, run in named.items():
        if speed := run.images_per_second:
            yield Bar(name, unit.of(speed))
        if run.predicted:
            yield Bar(name, unit.of(run.predicted), is_predicted=True)


def _overview(named: dict[str, Run], unit: Unit) -> Table:
    last_metrics = [run.evaluations[-1].metrics for run in named.values() if run.evaluations]
    names = list(dict.fromkeys(name for metrics in last_metrics for name in headline_metrics(metrics)))[:_MOST_METRICS]
    rows = []
    for name, run in named.items():
        speed, last = run.images_per_second, run.evaluations[-1] if run.evaluations else None
        rows.append(
            (
                name,
                str(run.steps[-1].batch + 1) if run.steps else "0",
                format_seconds(run.steps[-1].seconds) if run.steps else "-",
                f"{format_number(unit.of(speed))}{_unsteady(run)}" if speed and not run.is_emulated else "-",
                f"{run.steps[-1].loss:.4g}" if run.steps else "-",
                f"{last.loss:.4g}" if last else "-",
                *(format_metric(name, last.metrics[name]) if last and name in last.metrics else "-" for name in names),
                f"{last.samples:,} samples of the {run.evaluated_on}" if last else "-",
                run.name,
            )
        )
    learnt = ("training loss", "evaluation loss", *map(metric_label, names))
    columns = ("run", "steps", "time", unit.rate, *learnt, "measured on", "folder")
    return Table("Overview", columns, tuple(rows))


def _unsteady(run: Run) -> str:
    return " (not steady)" if run.steady_steps == 0 else ""


def _configurations(named: dict[str, Run]) -> Table:
    """The configurations, one column per run; rows that differ come first."""
    tables = {name: {row[0]: row[1] for row in configuration(run).rows} for name, run in named.items()}
    keys = list(dict.fromkeys(key for table in tables.values() for key in table))
    keys.sort(key=lambda key: len({table.get(key) for table in tables.values()}) == 1)
    rows = tuple((key, *(table.get(key, "-") for table in tables.values())) for key in keys)
    return Table("Configurations", ("what", *tables), rows, "Rows that differ come first.")
