"""`python -m benchmarks NAME [options]`: measure, and leave a folder with reports, as `stagewright bench` does."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import checkouts
from benchmarks.calibration import report
from benchmarks.learning.pages import describe_study, show_study
from benchmarks.learning.study import run_study
from benchmarks.learning.trials import StudyOptions
from benchmarks.micro import checkpoint, data, engine, growth, monitor, own, planner, startup
from benchmarks.models.run import select, try_models
from benchmarks.models.table import as_json, show_tries
from benchmarks.outcome import Outcome, outcome_page, show
from benchmarks.peers import shared
from benchmarks.peers.cases import SUITES, only_cases
from benchmarks.peers.run import run_cases
from stagewright.bench.folder import measure_and_show, require_none_failed, speaking
from stagewright.bench.suite import REPEATS
from stagewright.cli.command.command import one_line
from stagewright.cluster.catalog import open_cluster
from stagewright.config.toml import parse_assignment
from stagewright.errors import RunFailed, UserError
from stagewright.report.live.terminal import open_console
from stagewright.voice import Voice

Given = argparse.Namespace
Keep = Callable[[Outcome], None]
_OPTIONS: Mapping[str, dict[str, Any]] = {
    "--repeats": {"type": int, "help": "repeats of each side"},
    "--steps": {"type": int, "default": 0, "help": "batches per repeat"},
    "--only": {"help": "only cases whose name contains this"},
    "--quick": {"action": "store_true", "help": "only a dozen models, one of each kind"},
    "--images": {"type": int, "help": "images per repeat"},
    "--threads": {"type": int, "help": "most loader threads, and processes"},
    "--simulate": {"action": "store_true", "help": "predict, and measure nothing"},
    "--rows": {"metavar": "FILE.toml", "help": "predict the measured rows of this file"},
    "--given": {"metavar": "FILE.toml", "help": "with --rows: rows that calibrate how fast each host copies"},
    "--data": {"help": "training data"},
    "--val": {"help": "data to evaluate on"},
    "--set": {"action": "append", "default": [], "help": "an option of every run: run.seed=3"},
    "--cluster": {"help": "predict times for this cluster"},
    "--study": {"help": "learning, text, or your own FILE.toml"},
    "--seeds": {"type": int, "default": 3, "help": "runs per mode"},
    "--jobs": {"type": int, "help": "runs at a time"},
    "--target": {"type": float, "help": "top-1 to reach, in percent"},
    "--real": {"action": "store_true", "help": "run ranks as processes, not emulated; also report time"},
    "--before": {"metavar": "DIR", "type": Path, "required": True, "help": "the other checkout"},
    "--seed": {"type": int, "default": 1, "help": "draws the plans"},
    "--device": {"choices": ("cpu", "cuda"), "default": "cpu", "help": "where plans are trained"},
    "--reuse": {"action": "append", "default": [], "metavar": "FOLDER", "help": "reuse what an earlier one measured"},
}
_BOUNDS = {  # the least and the most of each number
    **dict.fromkeys(("repeats", "seeds", "jobs", "threads"), (1.0, 1000.0)),
    "steps": (0.0, 1e9),
    "images": (16.0, 1e9),
    "target": (0.01, 100.0),
}


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What is measured, by the options and the command line, and its options beside --runs, --anonymise and --json."""

    help: str
    run: Callable[[Given, str], None]
    options: str = ""


def _measured(text: str, measure: Callable[[Given, Path, Keep, Voice], Outcome], options: str = "") -> Benchmark:
    """A benchmark that leaves an outcome and its reports in a folder."""
    return Benchmark(text, lambda given, command: _measure(measure, given, command), options)


def _measure(measure: Callable[[Given, Path, Keep, Voice], Outcome], given: Given, command: str) -> None:
    outcome, folder = measure_and_show(
        given.name,
        lambda runs, keep, voice: measure(given, runs, keep, voice),
        command,
        outcome_page,
        show,
        runs=given.runs,
        anonymise=given.anonymise,
        as_json=given.json,
    )
    require_none_failed(outcome, folder)


def _part(text: str, measure: Callable[[Voice], Outcome]) -> Benchmark:
    return _measured(text, lambda given, runs, keep, voice: measure(voice))


def _peers(given: Given, runs: Path, keep: Keep, voice: Voice) -> Outcome:
    return run_cases(only_cases(SUITES[given.name], given.only), given.repeats or REPEATS, given.steps, voice, keep)


def _shared(given: Given, runs: Path, keep: Keep, voice: Voice) -> Outcome:
    return shared.measure(
        given.repeats or REPEATS, runs.parent, voice, keep, reuse=given.reuse, simulate=given.simulate, only=given.only
    )


def _published(given: Given, command: str) -> None:
    """Predict the rows of a file, or the runs that others published."""
    if given.rows is None:
        if given.given is not None:
            raise UserError(f"--given {given.given} needs --rows FILE.toml as well")
        _measure(lambda given, runs, keep, voice: report.published_outcome(), given, command)
        return
    rows, skipped = report.predict_file(given.rows, given.given)
    if given.json:
        print(json.dumps(report.as_json(rows, skipped)))
    else:
        report.show_rows(open_console(), rows, skipped)


def _learning(given: Given, command: str) -> None:
    """Compare how accurate the trials of a study become."""
    if given.reuse and given.real:
        raise UserError(f"--reuse {' '.join(given.reuse)} can't be used with --real; leave one out")
    if given.jobs not in (None, 1) and given.real:
        raise UserError(f"--jobs {given.jobs} changes nothing with --real, which runs one at a time; leave it out")
    asked = {name: getattr(given, name) for name in ("study", "data", "val", "seeds", "jobs", "target", "cluster")}
    overrides = [parse_assignment(text) for text in given.set]
    options = StudyOptions(**asked, is_real=given.real, only=given.only, overrides=overrides, reuse=given.reuse)
    with speaking("learning") as voice:
        study, folder = run_study(options, given.runs, command, anonymise=given.anonymise, voice=voice)
    if given.json:
        print(json.dumps(describe_study(study) | {"folder": str(folder)}))
    else:
        show_study(open_console(), study, folder)


def _models(given: Given, command: str) -> None:
    """Cut, prove and train models of libraries, and compare with plain PyTorch."""
    entries = select(given.only, quick=given.quick)
    with speaking("models") as voice:
        tries = try_models(entries, voice)
    if given.json:
        print(json.dumps(as_json(tries)))
    else:
        show_tries(open_console(), tries)
    if wrong := [tried for tried in tries.models if tried.largest is not None and not tried.is_equal]:
        raise UserError(
            f"{len(wrong)} of {len(tries.models)} models differ from plain PyTorch, first {wrong[0].name} "
            f"by {wrong[0].largest:.0e}; cut them elsewhere, and report it"
        )


def _bits(given: Given, command: str) -> None:
    """Train plans with two checkouts, and compare their checkpoints bit for bit."""
    with speaking("bits") as voice:
        found = list(checkouts.compare_bits(given.before, given.seed, given.device, voice))
    for drawn in found:
        print(f"{'equal' if drawn.is_equal else 'DIFFERS'}: {drawn.options} {drawn.why}".strip())
    if wrong := [drawn for drawn in found if not drawn.is_equal]:
        raise UserError(f"{len(wrong)} of {len(found)} plans differ, first {wrong[0].options}; bisect between the two")


BENCHMARKS: Mapping[str, Benchmark] = {
    **{name: _measured(suite.title, _peers, "--repeats --steps --only") for name, suite in SUITES.items()},
    "shared": _measured(
        "plans of the planner on ranks that share one GPU, predicted before they are measured, against DDP",
        _shared,
        "--repeats --reuse --simulate --only",
    ),
    "data": _measured(
        "decoding and cropping against Pillow, simplejpeg, torchvision and DALI; loaders by threads and processes",
        lambda given, runs, keep, voice: data.measure(given.repeats, given.images, given.threads),
        "--repeats --images --threads",
    ),
    "calibrate": _measured(
        "fit the planner's constants, and write them as calibration.toml",
        lambda given, runs, keep, voice: report.measure(runs.parent, voice),
    ),
    "planner": _part("how long the search and the simulator take", planner.measure),
    "own": _part("predicted beside measured, on this machine", own.measure),
    "engine": _part("a loop of your own beside stagewright train", engine.measure),
    "growth": _part("memory and messages of ranks as microbatches, stages and ranks are doubled", growth.measure),
    "startup": _part("the seconds of a short train command by part", startup.measure),
    "checkouts": _measured(
        "seconds and speeds of this checkout beside another one",
        lambda given, runs, keep, voice: checkouts.measure(given.before, given.repeats, given.only, voice),
        "--before --repeats --only",
    ),
    "checkpoint": _part("how long a checkpoint pauses training, beside a plain copy of the state", checkpoint.measure),
    "monitor": _part("what the monitor costs, with and without it in turns", monitor.measure),
    "published": Benchmark("rates that others published, predicted", _published, "--rows --given"),
    "learning": Benchmark(
        "accuracy at each lag, over several seeds",
        _learning,
        "--only --data --set --cluster --val --study --seeds --jobs --target --real --reuse",
    ),
    "bits": Benchmark("whether this checkout trains the bits of another one", _bits, "--before --seed --device"),
    "models": Benchmark("models of libraries, cut in four and trained beside plain PyTorch", _models, "--only --quick"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a benchmark; an error that can be corrected is one line and exit code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    given = make_parser().parse_args(words)
    command = shlex.join(["python", "-m", "benchmarks", *(word for word in words if word != "--json")])
    try:
        for name, (least, most) in _BOUNDS.items():
            if (value := getattr(given, name, None)) is not None and not least <= value <= most:
                raise UserError(f"--{name} is {value:g}; give at least {least:g} and at most {most:g}")
        if getattr(given, "cluster", None) is not None:
            open_cluster(given.cluster)  # report its errors before anything else
        BENCHMARKS[given.name].run(given, command)
    except (UserError, RunFailed) as error:
        _fail(str(error))
    except KeyboardInterrupt as error:
        _fail(f"interrupted {error}".strip())


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"benchmarks: {one_line(message)}\n")
    sys.exit(2)


def make_parser() -> argparse.ArgumentParser:
    """A command for each benchmark, with its own options and those that all take."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, one in BENCHMARKS.items():
        command = commands.add_parser(name, help=one.help, description=one.help)
        for flag in one.options.split():
            command.add_argument(flag, **_OPTIONS[flag])
        command.add_argument("--runs", default="runs", help="folder in which the results get one of their own")
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.add_argument("--anonymise", action="store_true", help="leave out host names, paths and addresses")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends what it has started, as Ctrl-C does
    main()
