"""Who may import whom among the benchmarks: the package's public names, and of each other what the table says."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import benchmarks
from tests.unit.test_imports import folder_of, imports_of, module_of, read_source

ROOT = Path(benchmarks.__file__).parent
Source = dict[str, str]  # the text of every file, by its path below benchmarks/
# What each folder may import of the others.
ALLOWED: dict[str, set[str]] = {
    "__main__": {"checkouts", "outcome", "calibration", "learning", "micro", "models", "peers"},
    "checkouts": {"outcome", "timed_command"},
    "timed_command": set(),
    "outcome": set(),
    "calibration": {"outcome"},
    "learning": set(),
    "micro": {"outcome", "timed_command"},
    "models": set(),
    "peers": {"outcome", "timed_command"},
}


@cache
def read_benchmarks() -> Source:
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}


def forbidden_imports(source: Source) -> list[str]:
    found = []
    for path, text in source.items():
        if path == "__init__.py":
            continue
        folder = folder_of(module_of(path), source)
        used = [item.name.removeprefix("benchmarks.") for item in imports_of(text) if "benchmarks." in item.name]
        allowed = ALLOWED[folder] | {folder}
        found += [f"{path} imports {name}" for name in used if name.split(".")[0] not in allowed]
    return found


def private_imports(source: Source) -> list[str]:
    names = [(path, item.name) for path, text in source.items() for item in imports_of(text)]
    return [
        f"{path} imports {name}"
        for path, name in names
        if re.search(r"(^|\.)_(?!_)", name) and not name.startswith("torch")
    ]


RULES = (forbidden_imports, private_imports)


@pytest.mark.parametrize("rule", RULES)
def test_benchmarks_keep_every_rule(rule: Callable[[Source], list[str]]) -> None:
    assert rule(read_benchmarks()) == []


@pytest.mark.parametrize(
    ("rule", "path", "line"),
    [
        (forbidden_imports, "micro/own.py", "from benchmarks.peers.run import run_cases"),
        (forbidden_imports, "peers/run.py", "from benchmarks.__main__ import main"),
        (private_imports, "micro/own.py", "from stagewright.run.train import _execute"),
    ],
)
def test_every_rule_finds_what_breaks_it(rule: Callable[[Source], list[str]], path: str, line: str) -> None:
    source = read_benchmarks()
    assert rule({**source, path: f"{source[path]}\n{line}\n"})


def test_the_package_imports_no_benchmark() -> None:
    assert not [path for path, text in read_source().items() if re.search(r"^\s*(from|import) benchmarks", text, re.M)]
