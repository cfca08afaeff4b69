"""Measures: suites of configurations in turns, Stagewright beside stock PyTorch, and parts of it by themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_MODULES = ("published", "planner", "own", "checkpoint", "monitor")
_DATA_REPEATS, _IMAGES, _THREADS = 30, 64, 2  # of `bench data`
Tell = Callable[[str], None]


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

    @property
    def command(self) -> str:
        words = ["stagewright bench", self.suite]
        words += [] if self.repeats is None else [f"--repeats {self.repeats}"]
        words += [f"--steps {self.steps}"] if self.steps else []
        words += [f"--only '{self.only}'"] if self.only else []
        words += [f"--data {self.data}"] if self.data else []
        for tables in self.overrides:
            for section, values in tables.items():
                words += [f"--set {section}.{name}={json.dumps(value)}" for name, value in values.items()]
        words += ["--simulate"] if self.simulate else []
        words += [f"--cluster {self.cluster}"] if self.cluster else []
        return " ".join([*words, *(["--anonymise"] if self.anonymise else [])])


def run_suite(request: Request) -> None:
    """Run a suite and print its tables, or one JSON object."""
    from stagewright.bench.contests import SUITES
    from stagewright.bench.suitefile import shipped_names

    _check(request)
    if request.suite in _MODULES:
        _run_module(request)
    elif request.suite == "data":
        from stagewright.bench import data

        data.run(
            repeats=request.repeats or _DATA_REPEATS, images=_IMAGES, most_threads=_THREADS, as_json=request.as_json
        )
    elif request.suite in SUITES:
        _run_contests(request)
    elif request.suite in shipped_names() or request.suite.endswith(".toml"):
        from stagewright.bench.show import run_and_show

        with progress(request.suite) as tell:
            run_and_show(request, tell)
    else:
        import difflib

        known = [*shipped_names(), *SUITES, *_MODULES, "data"]
        near = difflib.get_close_matches(request.suite, known, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"the suites are {', '.join(known)}, or a file ending in .toml"
        raise ValueError(f"unknown suite '{request.suite}'; {hint}")


def _check(request: Request) -> None:
    if request.repeats is not None and request.repeats < 1:
        raise ValueError(f"--repeats is {request.repeats}; give at least 1")
    if request.steps < 0:
        raise ValueError(f"--steps is {request.steps}; give the batches of one run, or 0 for the suite's own number")
    if request.cluster is not None and not request.simulate:
        raise ValueError(f"--cluster {request.cluster} is where to simulate; give --simulate as well")
    if request.cluster is not None:
        from stagewright.catalog import open_cluster

        open_cluster(request.cluster)  # what is wrong with it is said first


@contextmanager
def progress(name: str) -> Iterator[Tell]:
    """What is going on: a line that changes on a terminal, a line each anywhere else."""
    from rich.console import Console

    errors = Console(stderr=True)
    with errors.status(name) as status:

        def tell(text: str) -> None:
            if errors.is_terminal:
                status.update(text)
            else:
                errors.print(text, markup=False, highlight=False, soft_wrap=True)

        yield tell


def _run_contests(request: Request) -> None:
    """Contests against stock PyTorch, heat by heat."""
    from rich.console import Console

    from stagewright.bench.contests import SUITES, only_heats
    from stagewright.bench.heats import run_heats
    from stagewright.bench.report import Outcome, describe, show_machine, show_work
    from stagewright.bench.suitefile import REPEATS

    suite = only_heats(SUITES[request.suite], request.only)
    outcomes: list[Outcome] = []
    with progress(request.suite) as tell:
        for found in run_heats(suite, request.repeats or REPEATS, request.steps, tell):
            outcomes += found
            if not request.as_json:
                show_work(Console(), suite, found)
    if request.as_json:
        print(json.dumps(describe(suite, outcomes, request.command)))
    else:
        show_machine(Console(), outcomes, request.command)


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
