"""`stagewright bench`: suites of configurations, comparisons with stock PyTorch, learning, and single parts; `demo`.

`Request` holds the options; `run_bench` finds out what the suite's name stands for, refuses options that it would
ignore, runs it and prints its tables or one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from stagewright.bench.demo.page import demo_page, sentences, terminal_table, warnings
from stagewright.bench.demo.run import run_demo as train_both
from stagewright.bench.demo.run import simulated_win
from stagewright.bench.learning.pages import describe_study, show_study
from stagewright.bench.learning.study import run_study
from stagewright.bench.learning.trials import StudyOptions
from stagewright.bench.micro import checkpoint, data, engine, growth, monitor, own, planner, published, startup
from stagewright.bench.models.run import select, try_models
from stagewright.bench.models.table import as_json, show_tries
from stagewright.bench.pages import Keep, run_to_folder, show
from stagewright.bench.peers import shared
from stagewright.bench.peers.cases import SUITES, only_cases
from stagewright.bench.peers.run import run_cases
from stagewright.bench.result import Outcome
from stagewright.bench.run import run_suite
from stagewright.bench.suite import REPEATS, SuiteOptions, read_suite, shipped_names
from stagewright.cluster.catalog import open_cluster
from stagewright.config.toml import parse_assignment
from stagewright.errors import UserError, counted, did_you_mean
from stagewright.report.live.progress import ProgressLine
from stagewright.report.live.terminal import open_console, say
from stagewright.run.folder import new_folder
from stagewright.run.report import write_page

Measure = Callable[[Path, Keep, ProgressLine], Outcome]
_PARTS: dict[str, Callable[[Callable[[str], None]], Outcome]] = {
    "planner": planner.measure,
    "own": own.measure,
    "engine": engine.measure,
    "growth": growth.measure,
    "startup": startup.measure,
    "checkpoint": checkpoint.measure,
    "monitor": monitor.measure,
}
_PEER_OPTIONS = ("repeats", "steps", "only")
_SUITE_OPTIONS = (*_PEER_OPTIONS, "data", "set", "simulate", "cluster", "anonymise", "row")
_PUBLISHED_OPTIONS = ("rows", "given")
_LEARNING_OPTIONS = (
    *("only", "data", "set", "cluster", "anonymise"),
    *("val", "study", "seeds", "jobs", "target", "real", "reuse"),
)
_MODEL_OPTIONS = ("only", "quick")
_SEEDS = 3


@dataclass(frozen=True, slots=True)
class Request:
    """The options of `stagewright bench`; None and 0 leave a number to the suite."""

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
    rows: str | None = None
    given: str | None = None
    row: str | None = None
    quick: bool = False

    @property
    def command(self) -> str:
        """The shell command that repeats this request."""
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
            ("--rows", self.rows),
            ("--given", self.given),
            ("--row", self.row),
        ]
        words = [word for flag, value in given if value is not None for word in (flag, str(value))]
        switches = {
            "--real": self.real,
            "--quick": self.quick,
            "--simulate": self.simulate,
            "--anonymise": self.anonymise,
        }
        return shlex.join(
            ["stagewright", "bench", self.suite, *words, *(flag for flag, is_on in switches.items() if is_on)]
        )


def run(parsed: argparse.Namespace) -> None:
    """Run the command line's request."""
    names = {field.name for field in fields(Request)} - {"overrides", "as_json"}
    given = {name: getattr(parsed, name) for name in names}
    run_bench(Request(**given, overrides=[parse_assignment(text) for text in parsed.set], as_json=parsed.json))


def run_data(parsed: argparse.Namespace) -> None:
    """`stagewright data bench`: `bench data` with options of its own."""
    given = (("repeats", parsed.repeats), ("images", parsed.images), ("threads", parsed.threads))
    words = [f" --{name} {value}" for name, value in given if value is not None]
    run_measure(
        "data",
        lambda runs, keep, progress: data.measure(parsed.repeats, parsed.images, parsed.threads),
        f"stagewright data bench{''.join(words)}",
        as_json=parsed.json,
    )


def run_bench(request: Request) -> None:
    """Measure what is asked for and print its tables, or one JSON object."""
    if request.cluster is not None:
        open_cluster(request.cluster)  # report its errors before anything else
    if request.rows is not None or request.given is not None:
        _refuse_unused(request, _PUBLISHED_OPTIONS if request.suite == "published" else ())
        _run_rows(request)
        return
    if request.suite == "learning":
        _refuse_unused(request, _LEARNING_OPTIONS)
        _run_study(request)
        return
    if request.suite == "models":
        _refuse_unused(request, _MODEL_OPTIONS)
        _try_models(request)
        return
    run_measure(
        request.suite,
        _measure_of(request),
        request.command,
        runs=request.runs,
        anonymise=request.anonymise,
        as_json=request.as_json,
        row=request.row,
    )


def _measure_of(request: Request) -> Measure:
    """What a suite's name stands for; refuses options that it would ignore."""
    if request.suite == "published":
        _refuse_unused(request, _PUBLISHED_OPTIONS)
        return lambda runs, keep, progress: published.measure(runs.parent, progress)
    if request.suite == "shared":
        _refuse_unused(request, ("repeats", "reuse", "simulate", "only"))
        return lambda runs, keep, progress: shared.measure(
            request.repeats or REPEATS,
            runs.parent,
            progress,
            keep,
            reuse=request.reuse,
            simulate=request.simulate,
            only=request.only,
        )
    if request.suite in _PARTS:
        _refuse_unused(request, ())
        return lambda runs, keep, progress: _PARTS[request.suite](progress)
    if request.suite == "data":
        _refuse_unused(request, ("repeats",))
        return lambda runs, keep, progress: data.measure(request.repeats)
    if request.suite in SUITES:
        _refuse_unused(request, _PEER_OPTIONS)
        peers = only_cases(SUITES[request.suite], request.only)
        return lambda runs, keep, progress: run_cases(peers, request.repeats or REPEATS, request.steps, progress, keep)
    if request.suite in shipped_names() or request.suite.endswith(".toml"):
        _refuse_unused(request, _SUITE_OPTIONS)
        options = _suite_options(request)
        return lambda runs, keep, progress: run_suite(request.suite, options, runs, progress, keep)
    known = [*shipped_names(), *SUITES, *_PARTS, "published", "shared", "data", "learning", "models"]
    raise UserError(f"unknown suite '{request.suite}', and no .toml file; {did_you_mean(request.suite, known)}")


def run_measure(
    name: str,
    measure: Measure,
    command: str,
    *,
    runs: str = "runs",
    anonymise: bool = False,
    as_json: bool,
    row: str | None = None,
) -> None:
    """Measure into a folder, print the tables or one JSON object, and fail at the end if a configuration failed."""
    with ProgressLine(name, patience=0) as progress:
        outcome, folder = run_to_folder(
            name, runs, command, lambda logs, keep: measure(logs, keep, progress), anonymise=anonymise
        )
    if as_json:
        print(json.dumps(asdict(outcome) | {"folder": str(folder)}))
    else:
        show(open_console(), outcome, folder)
    if row is not None:
        appended = counted(published.append_rows(outcome, row), "row")
        say(open_console(stderr=True), f"{appended} appended to {row}")
    if failed := [one for one in outcome.rows if one.kind == "failed"]:
        first, count = failed[0], f"{len(failed)} of {len(outcome.rows)} configurations"
        raise UserError(f"{count} failed, first {first.group}, {first.label}: {first.reason}; the rest is in {folder}")


def _refuse_unused(request: Request, taken: Sequence[str]) -> None:
    """Reject an option that this suite would ignore."""
    for name in dict.fromkeys((*_SUITE_OPTIONS, *_LEARNING_OPTIONS, *_PUBLISHED_OPTIONS, *_MODEL_OPTIONS)):
        if name not in taken and getattr(request, "overrides" if name == "set" else name):
            takes = ", ".join(f"--{name}" for name in taken) or "none of these options"
            raise UserError(f"bench {request.suite} does not use --{name}; leave it out: it takes {takes}")


def _run_rows(request: Request) -> None:
    """Predict the measured rows of a file."""
    if request.rows is None:
        raise UserError(f"--given {request.given} needs --rows FILE.toml as well")
    rows, skipped = published.predict_file(request.rows, request.given)
    if request.as_json:
        print(json.dumps(published.as_json(rows, skipped)))
    else:
        published.show_rows(open_console(), rows, skipped)


def _suite_options(request: Request) -> SuiteOptions:
    if request.cluster is not None and not request.simulate:
        raise UserError(f"--cluster {request.cluster} needs --simulate as well")
    suite = read_suite(request.suite)
    return SuiteOptions(
        repeats=request.repeats or suite.repeats,
        steps=request.steps or suite.steps,
        real=request.data,
        only=request.only,
        overrides=request.overrides,
        simulate=request.simulate,
        cluster=request.cluster,
        limit=None if request.repeats else suite.limit,
    )


def _run_study(request: Request) -> None:
    """Compare how accurate the trials of a study become."""
    options = StudyOptions(
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
    with ProgressLine(request.suite, patience=0) as progress:
        study, folder = run_study(
            options, request.runs, request.command, anonymise=request.anonymise, progress=progress
        )
    if request.as_json:
        print(json.dumps(describe_study(study) | {"folder": str(folder)}))
    else:
        show_study(open_console(), study, folder)


def _try_models(request: Request) -> None:
    """Cut, prove and train models of libraries, and compare with plain PyTorch."""
    entries = select(request.only, quick=request.quick)
    with ProgressLine(request.suite, patience=0) as progress:
        tries = try_models(entries, progress)
    if request.as_json:
        print(json.dumps(as_json(tries)))
    else:
        show_tries(open_console(), tries)
    if wrong := [tried for tried in tries.models if tried.largest is not None and not tried.is_equal]:
        raise UserError(
            f"{len(wrong)} of {len(tries.models)} models differ from plain PyTorch, first {wrong[0].name} "
            f"by {wrong[0].largest:.0e}; cut them elsewhere, and report it"
        )


# --- The demo ---------------------------------------------------------------------------------------------------------


def run_demo(parsed: argparse.Namespace) -> None:
    """Train both sides, print what they did, and write the page."""
    console, errors, began = open_console(), open_console(stderr=True), time.monotonic()

    def progress(text: str) -> None:
        say(errors if parsed.json else console, f"{time.monotonic() - began:4.0f} s  {text}", soft_wrap=True)

    demo = train_both(progress, loopback=parsed.loopback)
    folder = new_folder(parsed.runs, "demo")
    (folder / "demo.json").write_text(json.dumps(demo.describe(), indent=1))
    page = write_page(demo_page(demo), folder / "report.html")[0]
    if parsed.json:
        print(json.dumps(demo.describe() | {"report": str(page)}))
        return
    console.print()
    console.print(terminal_table(demo))
    for sentence in sentences(demo):
        console.print()
        say(console, sentence, soft_wrap=not console.is_terminal)
    console.print()
    say(console, *warnings(demo), *(() if demo.wins else (simulated_win(),)), soft_wrap=not console.is_terminal)
    say(console, f"page: {_shown(page)}", soft_wrap=True)


def _shown(path: Path) -> str:
    """Relative to the current folder where it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
