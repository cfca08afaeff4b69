"""Lines of Python by folder: `python -m tests.size` prints them beside their ceilings."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "src/stagewright"


def lines_by_folder() -> Counter[str]:
    """Lines of every folder directly below the package ("top": its own files), the package, benchmarks and tests."""
    found: Counter[str] = Counter()
    for path, text in _python_files():
        lines = text.count("\n")
        if path.startswith(PACKAGE):
            inside = path.removeprefix(f"{PACKAGE}/").split("/")
            found[inside[0] if len(inside) > 1 else "top"] += lines
            found["package"] += lines
            found["package: code"] += _code_lines(text)
        else:
            found[path.split("/")[0]] += lines
    return found


def long_files(most: int) -> dict[str, int]:
    """The package's files of more lines than that."""
    lines = {path: text.count("\n") for path, text in _python_files() if path.startswith(PACKAGE)}
    return {path: count for path, count in lines.items() if count > most}


def _python_files() -> list[tuple[str, str]]:
    """Every Python file of the package, the benchmarks and the tests that git knows or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/*.py", "benchmarks/*.py", "tests/*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [(path, (ROOT / path).read_text()) for path in sorted(listed) if (ROOT / path).exists()]


def _code_lines(text: str) -> int:
    """Lines that are neither blank nor a comment nor part of a docstring."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                prose.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return sum(
        number not in prose and bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in enumerate(text.splitlines(), start=1)
    )


def table(ceilings: dict[str, int]) -> str:
    found = lines_by_folder()
    rows = [f"{'folder':16}{'lines':>8}{'at most':>9}"]
    rows += [
        f"{name:16}{found[name]:8,}{most:9,}{'  <- too many' if found[name] > most else ''}"
        for name, most in ceilings.items()
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    from tests.unit.test_size import CEILINGS

    sys.stdout.write(table(CEILINGS) + "\n")
