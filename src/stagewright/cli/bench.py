"""`stagewright bench`: suites of configurations; `data bench`: this loader; `demo`: two stages beside stock DDP."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from pathlib import Path

from stagewright.bench import data
from stagewright.bench.demo.page import demo_page, sentences, show_table, warnings
from stagewright.bench.demo.run import run_demo as train_both
from stagewright.bench.demo.run import simulated_win
from stagewright.bench.folder import append_rows, measure_and_show, require_none_failed
from stagewright.bench.pages import outcome_page, show
from stagewright.bench.run import run_suite
from stagewright.bench.suite import SuiteOptions, read_suite
from stagewright.cli.parser import moved_bench
from stagewright.cluster.catalog import open_cluster
from stagewright.config.toml import parse_assignment
from stagewright.errors import UserError, counted
from stagewright.report.live.terminal import open_console, say
from stagewright.run.folder import new_folder
from stagewright.run.report import write_page
from stagewright.voice import Voice


def run(parsed: argparse.Namespace) -> None:
    """Measure a suite and print its tables, or one JSON object."""
    if (elsewhere := moved_bench(parsed.suite)) is not None:
        raise UserError(elsewhere)
    if parsed.cluster is not None:
        open_cluster(parsed.cluster)  # report its errors before anything else
        if not parsed.simulate:
            raise UserError(f"--cluster {parsed.cluster} needs --simulate as well")
    suite = read_suite(parsed.suite)
    options = SuiteOptions(
        repeats=parsed.repeats or suite.repeats,
        steps=parsed.steps or suite.steps,
        real=parsed.data,
        only=parsed.only,
        overrides=[parse_assignment(text) for text in parsed.set],
        simulate=parsed.simulate,
        cluster=parsed.cluster,
        limit=None if parsed.repeats else suite.limit,
    )
    outcome, folder = measure_and_show(
        parsed.suite,
        lambda runs, keep, voice: run_suite(parsed.suite, options, runs, voice, keep),
        command_of(parsed),
        outcome_page,
        show,
        runs=parsed.runs,
        anonymise=parsed.anonymise,
        as_json=parsed.json,
    )
    if parsed.row is not None:
        appended = counted(append_rows(outcome, parsed.row), "row")
        say(open_console(stderr=True), f"{appended} appended to {parsed.row}")
    require_none_failed(outcome, folder)


def command_of(parsed: argparse.Namespace) -> str:
    """The shell command that repeats this request."""
    given = [
        ("--repeats", parsed.repeats),
        ("--steps", parsed.steps or None),
        ("--only", parsed.only),
        ("--data", parsed.data),
        *(("--set", text) for text in parsed.set),
        ("--cluster", parsed.cluster),
        ("--row", parsed.row),
    ]
    words = [word for flag, value in given if value is not None for word in (flag, str(value))]
    words += [f"--{name}" for name in ("simulate", "anonymise") if getattr(parsed, name)]
    return shlex.join(["stagewright", "bench", parsed.suite, *words])


def run_data(parsed: argparse.Namespace) -> None:
    """`stagewright data bench`."""
    given = (("repeats", parsed.repeats), ("images", parsed.images), ("threads", parsed.threads))
    words = [f" --{name} {value}" for name, value in given if value is not None]
    measure_and_show(
        "data",
        lambda runs, keep, voice: data.measure(parsed.repeats, parsed.images, parsed.threads),
        f"stagewright data bench{''.join(words)}",
        outcome_page,
        show,
        as_json=parsed.json,
    )


# --- The demo ---------------------------------------------------------------------------------------------------------


def run_demo(parsed: argparse.Namespace) -> None:
    """Train both sides, print what they did, and write the page."""
    console, errors, began = open_console(), open_console(stderr=True), time.monotonic()

    def progress(text: str) -> None:
        say(errors if parsed.json else console, f"{time.monotonic() - began:4.0f} s  {text}", soft_wrap=True)

    demo = train_both(Voice(progress=progress), loopback=parsed.loopback)
    folder = new_folder(parsed.runs, "demo")
    (folder / "demo.json").write_text(json.dumps(demo.describe(), indent=1))
    page = write_page(demo_page(demo), folder / "report.html")[0]
    if parsed.json:
        print(json.dumps(demo.describe() | {"report": str(page)}))
        return
    console.print()
    show_table(console, demo)
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
