"""Measures: suites of configurations in turns, Stagewright beside stock PyTorch, and parts of it by themselves."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

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
    from stagewright.bench.contests import SUITES
    from stagewright.bench.suitefile import shipped_names

    _check(request)
    if request.suite == "learning":
        _refuse_others(request, _TAKEN_BY_LEARNING)
        _run_study(request)
    elif request.suite in _MODULES:
        _refuse_others(request, ())
        _run_module(request)
    elif request.suite == "data":
        _refuse_others(request, ("repeats",))
        from stagewright.bench import data

        data.run(
            repeats=request.repeats or _DATA_REPEATS, images=_IMAGES, most_threads=_THREADS, as_json=request.as_json
        )
    elif request.suite in SUITES:
        _refuse_others(request, _TAKEN_BY_CONTESTS)
        _run_contests(request)
    elif request.suite in shipped_names() or request.suite.endswith(".toml"):
        from stagewright.bench.show import run_and_show

        _refuse_others(request, _TAKEN_BY_SUITES)
        if request.cluster is not None and not request.simulate:
            raise ValueError(f"--cluster {request.cluster} is where to simulate; give --simulate as well")
        run_and_show(request)
    else:
        import difflib

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
        from stagewright.catalog import open_cluster

        open_cluster(request.cluster)  # what is wrong with it is said first


def _refuse_others(request: Request, taken: Sequence[str]) -> None:
    """An error for an option that this suite would ignore."""
    for name in dict.fromkeys((*_TAKEN_BY_SUITES, *_TAKEN_BY_LEARNING)):
        if name not in taken and getattr(request, "overrides" if name == "set" else name):
            takes = ", ".join(f"--{name}" for name in taken) or "none of these options"
            raise ValueError(f"bench {request.suite} does not look at --{name}; leave it out: it takes {takes}")


class Progress:
    """What is going on: a line that changes on a terminal, a line each anywhere else."""

    def __init__(self, name: str) -> None:
        from rich.console import Console

        self._errors = Console(stderr=True)
        self._status = self._errors.status(name)

    def __enter__(self) -> Progress:
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def __call__(self, text: str) -> None:
        if self._errors.is_terminal:
            self._status.update(text)
        else:
            self._errors.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Make room for lines on the same terminal."""
        self._status.stop()
        yield
        self._status.start()


def _run_contests(request: Request) -> None:
    """Contests against stock PyTorch, heat by heat."""
    from rich.console import Console

    from stagewright.bench.contests import SUITES, only_heats
    from stagewright.bench.heats import run_heats
    from stagewright.bench.report import Outcome, describe, show_machine, show_work
    from stagewright.bench.suitefile import REPEATS

    suite = only_heats(SUITES[request.suite], request.only)
    outcomes: list[Outcome] = []
    with Progress(request.suite) as progress:
        for found in run_heats(suite, request.repeats or REPEATS, request.steps, progress):
            outcomes += found
            if not request.as_json:
                with progress.aside():
                    show_work(Console(), suite, found)
    if request.as_json:
        print(json.dumps(describe(suite, outcomes, request.command)))
    else:
        show_machine(Console(), outcomes, request.command)


def _run_study(request: Request) -> None:
    """What the modes learn, beside each other."""
    from rich.console import Console

    from stagewright.bench.learning.lesson import Inquiry
    from stagewright.bench.learning.pages import describe, show
    from stagewright.bench.learning.study import run_study

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
    with Progress(request.suite) as tell:
        study, folder = run_study(inquiry, request.runs, request.command, anonymise=request.anonymise, tell=tell)
    if request.as_json:
        print(json.dumps(describe(study) | {"folder": str(folder)}))
    else:
        show(Console(), study, folder)


def _run_module(request: Request) -> None:
    """A suite that is a module of its own: it measures, then shows or describes what it found."""
    import importlib

    from rich.console import Console

    module = importlib.import_module(f"stagewright.bench.{request.suite}")
    errors = Console(stderr=True)
    with errors.status(request.suite) as status:
        found = module.measure(status.update if errors.is_terminal else lambda text: None)
    if request.as_json:
        print(json.dumps(module.describe(found)))
    else:
        module.show(Console(), found)
