"""Command blocks of the documentation, and how a test runs them.

Fences say only their language. Who runs a block is in `tests/docs.toml`, under its file and its key: the first line
that is neither an import nor a comment, without a comment at its end. The marks there:

    run                   `make test` runs every line; `run columns=100` in a terminal of that width
    nightly               `make nightly` runs it in a shell
    gpu                   `make nightly` runs it where there is a GPU
    not run: REASON       nobody runs it, for this reason
    file: NAME            written to a file for later blocks; any language

In ```console, lines after `$` are commands, the others what they print; `...` stands for any lines. ```python is a
program.
"""

from __future__ import annotations

import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
COMMANDS = ("sh", "bash", "console", "python")
MARKS: dict[str, dict[str, str]] = tomllib.loads((ROOT / "tests" / "docs.toml").read_text())
_FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<language>[\w-]*)[ \t]*(?P<more>.*)$")
_BEFORE_KEY = re.compile(r"\s*(#|import |from |$)")
_AFTER_KEY = re.compile(r"\s{2,}#.*$|\s+\\$")
_COMMAND = re.compile(r"^\s*(\$ |stagewright [a-z]|make [a-z]|pip install|python -m |srun |export )")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced or indented block."""

    file: Path
    line: int
    language: str  # empty if the fence names none
    text: str
    more: str = ""  # that the fence says after its language
    marks: Mapping[str, str] = field(default_factory=dict)  # of its file, by key

    @property
    def key(self) -> str:
        """The first line that says what the block does."""
        first = next((line for line in self.text.splitlines() if not _BEFORE_KEY.match(line)), "")
        return _AFTER_KEY.sub("", first.strip().removeprefix("$ "))

    @property
    def mark(self) -> str:
        return self.marks.get(self.key, "")

    @property
    def kind(self) -> str:
        """run, nightly, gpu, not run, file, or empty."""
        return next((kind for kind in ("run", "nightly", "gpu", "not run", "file") if self.is_marked(kind)), "")

    def is_marked(self, kind: str) -> bool:
        return re.match(rf"{kind}\b", self.mark) is not None

    @property
    def reason(self) -> str:
        return self.mark.partition(":")[2].strip()

    @property
    def columns(self) -> str:
        found = re.search(r"columns=(\d+)", self.mark)
        return found[1] if found else "80"

    @property
    def looks_like_commands(self) -> bool:
        return self.language in COMMANDS or any(_COMMAND.match(line) for line in self.text.splitlines())

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def blocks(file: Path, marks: Mapping[str, Mapping[str, str]] = MARKS) -> list[Block]:
    """Every block of a file, fenced or indented, with the marks of the side file."""
    of_file = marks.get(str(file.relative_to(ROOT)), {})
    return [replace(block, marks=of_file) for block in (*_fenced(file), *_indented(file))]


def _fenced(file: Path) -> Iterator[Block]:
    lines = file.read_text().splitlines()
    opening: tuple[int, re.Match[str]] | None = None
    for number, line in enumerate(lines, 1):
        found = _FENCE.match(line)
        if opening is None and found:
            opening = (number, found)
        elif opening is not None and line.strip() == opening[1]["ticks"]:
            text = "\n".join(lines[opening[0] : number - 1])
            yield Block(file, opening[0], opening[1]["language"], text, opening[1]["more"])
            opening = None


def _indented(file: Path) -> Iterator[Block]:
    """Lines indented by four after an empty line, outside fences and lists."""
    is_fenced, in_list, before, kept, began = False, False, "", [], 0
    for number, line in enumerate([*file.read_text().splitlines(), ""], 1):
        if _FENCE.match(line):
            is_fenced = not is_fenced
        in_list = bool(re.match(r"\s*([-*]|\d+\.) ", line)) or (in_list and (not line.strip() or line.startswith(" ")))
        is_code = line.startswith("    ") and not is_fenced and not in_list and (kept or not before.strip())
        if is_code:
            began = began or number
            kept.append(line[4:])
        elif kept and line.strip():
            yield Block(file, began, "", "\n".join(kept))
            kept, began = [], 0
        before = line
    if kept:
        yield Block(file, began, "", "\n".join(kept))


def commands(block: Block) -> list[tuple[list[str], list[str]]]:
    """Every command of a block as words, with the lines that it should print."""
    found: list[tuple[str, list[str]]] = []
    is_console = block.language == "console"
    for line in block.text.splitlines():
        if found and found[-1][0].endswith("\\"):
            found[-1] = (found[-1][0][:-1] + line.strip(), [])
        elif is_console and not line.startswith("$ "):
            found[-1][1].append(line.rstrip())
        elif line.strip() and not line.startswith("#"):
            found.append((line.removeprefix("$ "), []))
    return [(shlex.split(line, comments=True), printed) for line, printed in found]


def filled(words: list[str]) -> list[str]:
    """Words with their patterns expanded, as a shell does in the current folder."""
    found: list[str] = []
    for word in words:
        found += (sorted(map(str, Path().glob(word))) or [word]) if "*" in word else [word]
    return found


def differs(expected: list[str], printed: str, columns: str = "") -> str | None:
    """The first expected line that is not where it should be; `...` matches any lines.

    A pipe gets lines whole. The documentation may show them as a terminal of `columns` wraps them, between words.
    """
    if columns and _differs(expected, printed.splitlines()) is None:
        return None
    wide = (textwrap.wrap(line, int(columns or 10**6), break_on_hyphens=False) for line in printed.splitlines())
    return _differs(expected, [line for lines in wide for line in lines or [""]])


def _differs(expected: list[str], printed: list[str]) -> str | None:
    lines, position, may_skip = [line.rstrip() for line in printed], 0, False
    for line in expected:
        if line.strip() == "...":
            may_skip = True
            continue
        if may_skip:
            position = next((n for n in range(position, len(lines)) if lines[n] == line), len(lines))
        if position >= len(lines) or lines[position] != line:
            return line
        position, may_skip = position + 1, False
    return None
