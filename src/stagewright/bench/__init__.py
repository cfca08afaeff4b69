"""Measures Stagewright side by side with stock PyTorch: both in one run, in turns, on the same work."""

from __future__ import annotations

import json

_MODULES = ("published", "planner", "own", "checkpoint", "monitor")


def run_suite(name: str, *, repeats: int = 7, steps: int = 0, as_json: bool = False) -> None:
    """Run a suite and print its table, or one JSON object; `steps` 0 leaves a segment's length to the suite."""
    from rich.console import Console

    from stagewright.bench.heats import run_heats
    from stagewright.bench.report import Outcome, describe, show_machine, show_work
    from stagewright.bench.suites import SUITES

    if name in _MODULES:
        _run_module(name, as_json)
        return
    if name not in SUITES:
        raise ValueError(f"unknown suite '{name}'; the suites are {', '.join([*SUITES, *_MODULES])}")
    if repeats < 1:
        raise ValueError(f"--repeats is {repeats}; give at least 1")
    if steps < 0:
        raise ValueError(f"--steps is {steps}; give the batches of one segment, or 0 for the suite's own number")
    suite, errors = SUITES[name], Console(stderr=True)
    with errors.status(name) as status:

        def tell(text: str) -> None:
            if errors.is_terminal:
                status.update(text)
            else:
                errors.print(text, markup=False, highlight=False, soft_wrap=True)

        outcomes: list[Outcome] = []
        for found in run_heats(suite, repeats, steps, tell):
            outcomes += found
            if not as_json:
                show_work(Console(), suite, found)
    command = f"stagewright bench {name} --repeats {repeats}" + (f" --steps {steps}" if steps else "")
    if as_json:
        print(json.dumps(describe(suite, outcomes, command)))
    else:
        show_machine(Console(), outcomes, command)


def _run_module(name: str, as_json: bool) -> None:
    """A suite that is a module of its own: it measures, then shows or describes what it found."""
    import importlib

    from rich.console import Console

    module = importlib.import_module(f"stagewright.bench.{name}")
    errors = Console(stderr=True)
    with errors.status(name) as status:
        found = module.measure(status.update if errors.is_terminal else lambda text: None)
    if as_json:
        print(json.dumps(module.describe(found)))
    else:
        module.show(Console(), found)
