"""The page that compares several runs: bars side by side, curves in shared plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stagewright.metrics import MIB
from stagewright.report.charts import format_number, format_seconds
from stagewright.report.page import Bar, Bars, Block, Curve, Curves, Page, Pipeline, Summary, Table
from stagewright.report.read import Run
from stagewright.report.run import losses, throughput
from stagewright.report.sections import configuration
from stagewright.report.summary import busy_sentences, peak_memory, resume_sentence
from stagewright.report.timeline import common_window


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
    if bars := tuple(_bars(real)):
        yield Bars("Throughput", "images/s", bars)
    yield _overview(named)
    yield from losses(named)
    curves = tuple(Curve(name, points) for name, run in real.items() if len(points := throughput(run)) > 1)
    if curves:
        yield Curves("Throughput over time", "seconds of training", "images/s", curves)
    for name, run in named.items():
        if run.timeline and run.timeline.spans:
            yield Pipeline(f"What each rank did: {name}", common_window(run.timeline), run.rank_map.labels)
    peaks = tuple(Bar(name, max(peak.values()) / MIB) for name, run in real.items() if (peak := peak_memory(run)))
    if peaks:
        yield Bars("Measured peak memory of the rank that used most", "MiB", peaks)
    yield _configurations(named)


def _sentences(named: dict[str, Run], real: dict[str, Run]) -> Iterator[str]:
    speeds = {name: speed for name, run in real.items() if (speed := run.images_per_second)}
    if len(speeds) > 1:
        ordered = sorted(speeds, key=lambda name: -speeds[name])
        best = ordered[0]
        others = [f"{speeds[best] / speeds[name]:.2f} x {name} ({format_number(speeds[name])})" for name in ordered[1:]]
        yield f"{best} is the fastest: {format_number(speeds[best])} images/s, {', '.join(others)}."
    if emulated := [name for name in named if name not in real]:
        yield (
            f"Emulated, with all ranks in one process: {', '.join(emulated)}. "
            "Their speed and memory say nothing about real devices and are not compared."
        )
    scores = {name: run.evaluations[-1].top1 for name, run in named.items() if run.evaluations}
    if len(scores) > 1:
        best = max(scores, key=lambda name: scores[name])
        rest = ", ".join(f"{name} {score:.1%}" for name, score in scores.items() if name != best)
        on = " and ".join(dict.fromkeys(run.evaluated_on for run in named.values() if run.evaluations))
        yield f"{best} has the best top-1 on {on} at the end: {scores[best]:.1%} (others: {rest})."
    for name, run in named.items():
        if text := " ".join((*resume_sentence(run), *(busy_sentences(run) if name in real else ()))):
            yield f"{name}: {text[0].lower()}{text[1:]}"
    if unfinished := [name for name, run in named.items() if run.summary is None]:
        yield f"Not finished: {', '.join(unfinished)}."
    yield "Each is a single run, so small differences may be chance; stagewright bench repeats and gives intervals."


def _bars(named: dict[str, Run]) -> Iterator[Bar]:
    for name, run in named.items():
        if speed := run.images_per_second:
            yield Bar(name, speed)
        if run.predicted:
            yield Bar(name, run.predicted, is_predicted=True)


def _overview(named: dict[str, Run]) -> Table:
    rows = []
    for name, run in named.items():
        speed, last = run.images_per_second, run.evaluations[-1] if run.evaluations else None
        rows.append(
            (
                name,
                str(run.steps[-1].batch + 1) if run.steps else "0",
                format_seconds(run.steps[-1].seconds) if run.steps else "-",
                f"{format_number(speed)}{_unsteady(run)}" if speed and not run.is_emulated else "-",
                f"{run.steps[-1].loss:.4g}" if run.steps else "-",
                f"{last.loss:.4g}" if last else "-",
                f"{last.top1:.1%}" if last else "-",
                f"{last.samples:,} samples of the {run.evaluated_on}" if last else "-",
                run.name,
            )
        )
    columns = ("run", "steps", "time", "images/s", "training loss", "evaluation loss", "top-1", "measured on", "folder")
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
