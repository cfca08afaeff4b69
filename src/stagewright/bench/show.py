"""Runs a suite of configurations, leaves its folder, and shows the outcome in a terminal of 80 columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stagewright.bench import Progress, Request
from stagewright.bench.anonymise import cleaned, make_cleaner
from stagewright.bench.case import Terms
from stagewright.bench.folder import write_reports, zip_logs
from stagewright.bench.interval import Interval
from stagewright.bench.outcome import Outcome, PublishedRow, Row, as_json, from_json
from stagewright.bench.pages import verdict
from stagewright.bench.suitefile import read_suite
from stagewright.bench.trials import run_trials
from stagewright.runfolder import new_folder
from stagewright.runtime.job import Interrupted


def run_and_show(request: Request) -> None:
    """Measure or predict, then print what the reports say."""
    suite = read_suite(request.suite)
    terms = Terms(
        repeats=request.repeats or suite.repeats,
        steps=request.steps or suite.steps,
        real=request.data,
        only=request.only,
        overrides=request.overrides,
        simulate=request.simulate,
        cluster=request.cluster,
        command=request.command,
        limit=None if request.repeats else suite.limit,
    )
    folder = new_folder(request.runs, f"bench-{Path(request.suite).stem}")
    with Progress(request.suite) as progress:
        outcome = _run(request, terms, folder, progress)
    if request.as_json:
        print(json.dumps(as_json(outcome) | {"folder": str(folder)}))
    else:
        show(Console(), outcome, folder)
    if failed := [row for row in outcome.rows if row.kind == "failed"]:
        first, count = failed[0], f"{len(failed)} of {len(outcome.rows)} configurations"
        raise ValueError(f"{count} failed, first {first.group}, {first.label}: {first.reason}; the rest is in {folder}")


def _run(request: Request, terms: Terms, folder: Path, tell: Callable[[str], None]) -> Outcome:
    """The outcome, in the folder as soon as there is something of it; runs that are over leave their logs zipped."""
    clean: Callable[[str], str] = make_cleaner() if request.anonymise else str
    runs = folder / "runs"
    latest: list[Outcome] = []

    def keep(outcome: Outcome) -> None:
        latest[:] = [anonymous(outcome, clean) if request.anonymise else outcome]
        write_reports(latest[0], folder)

    try:
        keep(run_trials(request.suite, terms, runs, tell, keep))
    except KeyboardInterrupt as error:
        done = sum(len(row.repeats) for row in latest[0].rows) if latest else 0
        raise Interrupted(f"after {done} runs", f"what there is is in {folder}") from error
    finally:
        zip_logs(runs, folder, clean)
        if not latest and not any(folder.iterdir()):
            folder.rmdir()
    return latest[0]


def anonymous(outcome: Outcome, clean: Callable[[str], str]) -> Outcome:
    return from_json(cleaned(as_json(outcome), clean) | {"is_anonymised": True}, "the outcome")


def show(console: Console, outcome: Outcome, folder: Path) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    for name, rows in outcome.groups().items():
        say(name)
        console.print(_table(rows))
    if published := [row for row in outcome.published if row.published]:
        console.print(_published_table(published))
    for line in verdict(outcome):
        console.print(line, highlight=False, markup=False)
    if any(row.kind == "predicted" for row in outcome.rows):
        say("p: predicted by the simulator, not measured")
    if any(row.outliers for row in outcome.rows):
        say("*: a repeat stands out; it counts all the same")
    say(f"report: {folder / 'report.md'}")
    say(f"        {folder / 'report.html'}")


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    base = next((row.name for row in rows if row.is_baseline), "first")
    has_intervals = any(row.rate and row.rate.low < row.rate.high for row in rows)  # predictions are points
    interval = ("95 % interval",) if has_intervals else ()
    for name in ("configuration", "data", "images/s", *interval, f"x {base}", *interval):
        left = name in ("configuration", "data")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "configuration")
    for row in rows:
        if row.rate is None:
            table.add_row(row.name, row.data, row.kind)
            continue
        marks = ("p" if row.kind == "predicted" else "") + ("*" if row.outliers else "")
        rate = [f"{row.rate.value:,.0f}{marks}", _span(row.rate, 0)]
        speedup = [f"{row.speedup.value:.2f}", _span(row.speedup, 2)] if row.speedup else ["", ""]
        kept = 2 if has_intervals else 1
        table.add_row(row.name, row.data, *rate[:kept], *speedup[:kept])
    return table


def _span(interval: Interval, digits: int) -> str:
    """Its ends, unless it is a point."""
    is_point = interval.low == interval.high
    return "" if is_point else f"{interval.low:,.{digits}f} - {interval.high:,.{digits}f}"


def _published_table(rows: list[PublishedRow]) -> Table:
    """Runs that others published of these models there, beside what is predicted of their own software."""
    table = Table(box=None, pad_edge=False)
    for name in ("published run", "images/s", "predicted", "off by"):
        table.add_column(name, justify="left" if name == "published run" else "right", no_wrap=name != "published run")
    for row in rows:
        assert row.published is not None
        table.add_row(
            f"{row.system}, {row.model}, {row.mode} {row.batch}, {row.data}",
            f"{row.published:,.0f}",
            f"{row.predicted:,.0f}p",
            f"{row.predicted / row.published - 1:+.1%}",
        )
    return table
