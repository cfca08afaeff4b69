"""One page of several runs: bars side by side, curves over each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stagewright.report.charts import seconds, shown
from stagewright.report.page import Bar, Bars, Block, Curve, Curves, Page, Pipeline, Summary, Table
from stagewright.report.read import Run
from stagewright.report.run import losses, throughput
from stagewright.report.sections import configuration
from stagewright.report.summary import peak_memory, where_it_began, where_time_went
from stagewright.report.timeline import common

_MIB = 2**20


def comparison_page(runs: Sequence[Run], names: Sequence[str] = ()) -> Page:
    """A comparison; runs go by their names, or by what tells them apart. Speed and memory are compared of real ones."""
    named = dict(zip(names or _names(runs), runs, strict=True))
    return Page(f"{len(runs)} runs: {'; '.join(named)}", tuple(_blocks(named)))


def _names(runs: Sequence[Run]) -> list[str]:
    """Mode and shape where no two runs share them, else the folder's name."""
    short = [f"{run.mode} {run.shape}" for run in runs]
    if len({run.model for run in runs}) > 1:
        short = [f"{run.model} {name}" for run, name in zip(runs, short, strict=True)]
    if len(set(short)) == len(runs):
        return short
    folders = [run.name for run in runs]
    return folders if len(set(folders)) == len(runs) else [str(run.folder) for run in runs]


def _blocks(named: dict[str, Run]) -> Iterator[Block]:
    yield Summary(tuple(_verdict(named)))
    real = _real(named)
    bars = tuple(_bars(real))
    if bars:
        yield Bars("Throughput", "images/s", bars)
    yield _overview(named)
    yield from losses(named)
    curves = tuple(Curve(name, points) for name, run in real.items() if len(points := throughput(run)) > 1)
    if curves:
        yield Curves("Throughput over time", "seconds of training", "images/s", curves)
    for name, run in named.items():
        if run.timeline and run.timeline.spans:
            yield Pipeline(f"What each rank did: {name}", common(run.timeline), run.rank_map.labels)
    peaks = {name: peak for name, run in real.items() if (peak := peak_memory(run))}
    if peaks:
        most = tuple(Bar(name, max(found.values()) / _MIB) for name, found in peaks.items())
        yield Bars("Most memory of a rank, measured peak", "MiB", most)
    yield _configurations(named)


def _real(named: dict[str, Run]) -> dict[str, Run]:
    """The runs whose ranks were processes: the others say nothing of devices."""
    return {name: run for name, run in named.items() if not run.is_emulated}


def _verdict(named: dict[str, Run]) -> Iterator[str]:
    real = _real(named)
    speeds = {name: speed for name, run in real.items() if (speed := run.images_per_second)}
    if len(speeds) > 1:
        ordered = sorted(speeds, key=lambda name: -speeds[name])
        best = ordered[0]
        others = [f"{speeds[best] / speeds[name]:.2f} x {name} ({shown(speeds[name])})" for name in ordered[1:]]
        yield f"{best} is the fastest: {shown(speeds[best])} images/s, {', '.join(others)}."
    if emulated := [name for name in named if name not in real]:
        yield (
            f"Emulated, all ranks in one process: {', '.join(emulated)}. "
            "Speed and memory of that say nothing of real devices, and are not compared."
        )
    scores = {name: run.evaluations[-1].top1 for name, run in named.items() if run.evaluations}
    if len(scores) > 1:
        best = max(scores, key=lambda name: scores[name])
        rest = ", ".join(f"{name} {score:.1%}" for name, score in scores.items() if name != best)
        yield f"The best top-1 at the end has {best}: {scores[best]:.1%} (the others: {rest})."
    for name, run in named.items():
        if told := " ".join((*where_it_began(run), *(where_time_went(run) if name in real else ()))):
            yield f"{name}: {told[0].lower()}{told[1:]}"
    unfinished = [name for name, run in named.items() if run.summary is None]
    if unfinished:
        yield f"Not finished: {', '.join(unfinished)}."
    yield "Each is one run, so small differences may be chance; stagewright bench repeats and gives intervals."


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
                seconds(run.steps[-1].seconds) if run.steps else "-",
                shown(speed) if speed and not run.is_emulated else "-",
                f"{run.steps[-1].loss:.4g}" if run.steps else "-",
                f"{last.loss:.4g}" if last else "-",
                f"{last.top1:.1%}" if last else "-",
                run.name,
            )
        )
    columns = ("run", "steps", "time", "images/s", "training loss", "evaluation loss", "top-1", "folder")
    return Table("Overview", columns, tuple(rows))


def _configurations(named: dict[str, Run]) -> Table:
    """What is configured, a column a run; rows that differ come first."""
    tables = {name: {row[0]: row[1] for row in configuration(run).rows} for name, run in named.items()}
    keys = list(dict.fromkeys(key for table in tables.values() for key in table))
    keys.sort(key=lambda key: len({table.get(key) for table in tables.values()}) == 1)
    rows = tuple((key, *(table.get(key, "-") for table in tables.values())) for key in keys)
    return Table("Configurations", ("what", *tables), rows, "What differs comes first.")
