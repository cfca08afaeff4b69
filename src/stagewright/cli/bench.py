"""`stagewright bench`: measure configurations in turns, beside stock PyTorch, or parts by themselves. Measures: suites of configurations in turns, Stagewright beside stock PyTorch, and parts of it by themselves. Runs a suite of configurations, leaves its folder, and shows the outcome in a terminal of 80 columns."""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stagewright.bench.learning.pages import describe_study, show_study
from stagewright.bench.learning.study import run_study
from stagewright.bench.learning.trials import Inquiry
from stagewright.bench.micro import data
from stagewright.bench.pages import verdict, write_reports, zip_logs
from stagewright.bench.peers.cases import SUITES, only_heats
from stagewright.bench.peers.run import PeerOutcome, describe_suite, run_heats, show_machine, show_work
from stagewright.bench.result import Outcome, PublishedRow, Row, as_json, cleaned, from_json, make_cleaner
from stagewright.bench.run import run_trials
from stagewright.bench.statistics import Interval
from stagewright.bench.suite import REPEATS, Terms, read_suite, shipped_names
from stagewright.cli import bench
from stagewright.cluster.catalog import open_cluster
from stagewright.config.toml import parse_assignment
from stagewright.errors import Interrupted
from stagewright.report.live.terminal import ProgressLine
from stagewright.run.folder import new_folder


def run(parsed: argparse.Namespace) -> None:
    bench.run_suite(
        bench.Request(
            parsed.suite,
            repeats=parsed.repeats,
            steps=parsed.steps,
            only=parsed.only,
            data=parsed.data,
            overrides=[parse_assignment(text) for text in parsed.set],
            simulate=parsed.simulate,
            cluster=parsed.cluster,
            anonymise=parsed.anonymise,
            runs=parsed.runs,
            as_json=parsed.json,
            val=parsed.val,
            study=parsed.study,
            seeds=parsed.seeds,
            jobs=parsed.jobs,
            target=parsed.target,
            real=parsed.real,
            reuse=parsed.reuse,
        )
    )


_MODULES = ("published", "planner", "own", "checkpoint", "monitor")
_TAKEN_BY_CONTESTS = ("repeats", "steps", "only")
_TAKEN_BY_SUITES = (*_TAKEN_BY_CONTESTS, "data", "set", "simulate", "cluster", "anonymise")
_TAKEN_BY_LEARNING = (
    *("only", "data", "set", "cluster", "anonymise"),
    *("val", "study", "seeds", "jobs", "target", "real", "reuse"),
)
_SEEDS = 3
_DATA_REPEATS, _IMAGES, _THREADS = 30, 64, 2  # of `bench data`


@dataclass(frozen=True, slots=True)
class Request:
    """What `stagewright bench` was asked for; None and 0 leave a number to the suite."""

    suite: str
    repeats: int | None = None
    steps: int = 0
    only: str | None = None
    data: str | None = None
    overrides: Sequence[dict[str, dict[str, Any]]] = ()
    simulate: bool = False
    cluster: str | None = None
    anonymise: bool = False
    runs: str = "runs"
    as_json: bool = False
    val: str | None = None
    study: str | None = None
    seeds: int | None = None
    jobs: int | None = None
    target: float | None = None
    real: bool = False
    reuse: Sequence[str] = ()

    @property
    def command(self) -> str:
        """What a shell takes to ask the same again."""
        sets = [
            f"{section}.{name}={json.dumps(value)}"
            for tables in self.overrides
            for section, values in tables.items()
            for name, value in values.items()
        ]
        given: list[tuple[str, Any]] = [
            ("--repeats", self.repeats),
            ("--steps", self.steps or None),
            ("--only", self.only or None),
            ("--data", self.data or None),
            *(("--set", text) for text in sets),
            ("--val", self.val or None),
            ("--study", self.study or None),
            ("--seeds", self.seeds),
            ("--target", None if self.target is None else f"{self.target:g}"),
            *(("--reuse", folder) for folder in self.reuse),
            ("--cluster", self.cluster or None),
        ]
        words = [word for flag, value in given if value is not None for word in (flag, str(value))]
        asked = {"--real": self.real, "--simulate": self.simulate, "--anonymise": self.anonymise}
        return shlex.join(
            ["stagewright", "bench", self.suite, *words, *(flag for flag, is_on in asked.items() if is_on)]
        )


def run_suite(request: Request) -> None:
    """Run a suite and print its tables, or one JSON object."""
    _check(request)
    if request.suite == "learning":
        _refuse_others(request, _TAKEN_BY_LEARNING)
        _run_study(request)
    elif request.suite in _MODULES:
        _refuse_others(request, ())
        _run_module(request)
    elif request.suite == "data":
        _refuse_others(request, ("repeats",))
        data.run(
            repeats=request.repeats or _DATA_REPEATS, images=_IMAGES, most_threads=_THREADS, as_json=request.as_json
        )
    elif request.suite in SUITES:
        _refuse_others(request, _TAKEN_BY_CONTESTS)
        _run_contests(request)
    elif request.suite in shipped_names() or request.suite.endswith(".toml"):
        _refuse_others(request, _TAKEN_BY_SUITES)
        if request.cluster is not None and not request.simulate:
            raise ValueError(f"--cluster {request.cluster} is where to simulate; give --simulate as well")
        run_and_show(request)
    else:
        known = [*shipped_names(), *SUITES, *_MODULES, "data", "learning"]
        near = difflib.get_close_matches(request.suite, known, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"the suites are {', '.join(known)}, or a file ending in .toml"
        raise ValueError(f"unknown suite '{request.suite}'; {hint}")


def _check(request: Request) -> None:
    if request.repeats is not None and request.repeats < 1:
        raise ValueError(f"--repeats is {request.repeats}; give at least 1")
    if request.steps < 0:
        raise ValueError(f"--steps is {request.steps}; give the batches of one run, or 0 for the suite's own number")
    if request.cluster is not None:
        open_cluster(request.cluster)  # what is wrong with it is said first


def _refuse_others(request: Request, taken: Sequence[str]) -> None:
    """An error for an option that this suite would ignore."""
    for name in dict.fromkeys((*_TAKEN_BY_SUITES, *_TAKEN_BY_LEARNING)):
        if name not in taken and getattr(request, "overrides" if name == "set" else name):
            takes = ", ".join(f"--{name}" for name in taken) or "none of these options"
            raise ValueError(f"bench {request.suite} does not look at --{name}; leave it out: it takes {takes}")


def _run_contests(request: Request) -> None:
    """Contests against stock PyTorch, heat by heat."""
    suite = only_heats(SUITES[request.suite], request.only)
    outcomes: list[PeerOutcome] = []
    with ProgressLine(request.suite) as progress:
        for found in run_heats(suite, request.repeats or REPEATS, request.steps, progress):
            outcomes += found
            if not request.as_json:
                with progress.aside():
                    show_work(Console(), suite, found)
    if request.as_json:
        print(json.dumps(describe_suite(suite, outcomes, request.command)))
    else:
        show_machine(Console(), outcomes, request.command)


def _run_study(request: Request) -> None:
    """What the modes learn, beside each other."""
    inquiry = Inquiry(
        request.study,
        request.data,
        request.val,
        _SEEDS if request.seeds is None else request.seeds,
        request.jobs,
        request.target,
        request.cluster,
        request.real,
        request.only,
        request.overrides,
        request.reuse,
    )
    with ProgressLine(request.suite) as tell:
        study, folder = run_study(inquiry, request.runs, request.command, anonymise=request.anonymise, tell=tell)
    if request.as_json:
        print(json.dumps(describe_study(study) | {"folder": str(folder)}))
    else:
        show_study(Console(), study, folder)


def _run_module(request: Request) -> None:
    """A suite that is a module of its own: it measures, then shows or describes what it found."""
    module = importlib.import_module(f"stagewright.bench.micro.{request.suite}")
    errors = Console(stderr=True)
    with errors.status(request.suite) as status:
        found = module.measure(status.update if errors.is_terminal else lambda text: None)
    if request.as_json:
        print(json.dumps(module.describe(found)))
    else:
        module.show(Console(), found)


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
    with ProgressLine(request.suite) as progress:
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
