"""Reads saved output of `nvidia-smi topo -m` (the matrix of connections) and of plain `nvidia-smi` (the table of GPUs).

Both come from drivers old and new, with a terminal's colour codes or other output around them. What can't be read is a
ValueError that names file, line and column.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from stagewright.hardware.topology import SELF, Connection, LinkKind, Topology
from stagewright.metrics import MIB

_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\([A-Z]")
_MOST_BYTES = 4 * MIB
_MOST_SHOWN = 40  # characters of a word in an error
_MOST_COLUMNS = 1024
# The matrix.
_GPU = re.compile(r"GPU[0-9]+")
_WORD = re.compile(r"\S+")
_NVLINKS = re.compile(r"NV([0-9]{1,2})")
_RANGES = re.compile(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*")
_CONNECTIONS = {str(kind): Connection(kind) for kind in LinkKind if kind is not LinkKind.NVLINK} | {
    "SOC": Connection(LinkKind.SYSTEM)  # an old driver's name
}
_KNOWN = "X, NV#, PIX, PXB, PHB, NODE, SYS"
# The table.
_VERSIONS = re.compile(r"(?:Driver|KMD) Version:\s*([0-9.]+)(?:.*?CUDA(?: UMD)? Version:\s*([0-9.]+|N/A|ERR!))?")
_TABLE_GPU = re.compile(
    r"\|\s*([0-9]+)\s+(\S.*?)\s+(?:On|Off|N/A|WDDM|TCC|MCDM)\s*\|\s*[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9]"
)
_MEMORY = re.compile(r"[0-9]+\s*MiB\s*/\s*([0-9]+)\s*MiB")
_MIG = re.compile(r"\|\s*(Enabled|Disabled|N/A)\*?\s*\|$")


@dataclass(frozen=True, slots=True)
class SmiText:
    """Saved output of nvidia-smi, and the file it came from."""

    name: str
    text: str

    def lines(self) -> list[str]:
        return [_TERMINAL_CODES.sub("", line).replace("\ufeff", "") for line in self.text.splitlines()]

    def error(self, line: int, column: int, message: str) -> ValueError:
        """An error at a line and column, both counted from 1."""
        return ValueError(f"{self.name} line {line}, column {column}: {message}")


@dataclass(frozen=True, slots=True)
class SmiGpu:
    """One GPU of the table."""

    index: int
    name: str  # ends in ... where the column was too narrow for all of it
    memory: int  # bytes
    is_mig: bool


@dataclass(frozen=True, slots=True)
class SmiTable:
    """The whole table, without the processes."""

    driver: str
    cuda: str | None
    gpus: tuple[SmiGpu, ...]


def read_smi_text(path: str) -> SmiText:
    """A file, or standard input for `-`."""
    if path == "-":
        return SmiText("standard input", sys.stdin.read(_MOST_BYTES))
    try:
        with Path(path).open(errors="replace") as file:
            return SmiText(path, file.read(_MOST_BYTES))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give the file that holds nvidia-smi's output") from error


def parse_topology(text: SmiText) -> Topology:
    """The GPUs of a matrix; network cards, affinities and the legend may be present or missing."""
    lines = text.lines()
    top, names = _header(text, lines)
    gpus = [name for name in names if _GPU.fullmatch(name)]
    rows: dict[str, tuple[int, dict[str, Connection]]] = {}
    processors: set[int] = set()
    for number, line in enumerate(lines[top:], top + 1):
        words = list(_WORD.finditer(line))
        if not words or words[0][0] not in gpus:
            continue
        name = words[0][0]
        if name in rows:
            raise text.error(number, words[0].start() + 1, f"{name} already has a row, in line {rows[name][0]}")
        rows[name] = number, _row(text, number, name, names, words[1:])
        for word in words[1 + len(names) : 2 + len(names)]:
            processors |= _processors(word[0])
        if len(rows) == len(gpus):
            break
    _require_whole(text, top, gpus, rows)
    return Topology(tuple(tuple(rows[one][1][other] for other in gpus) for one in gpus), len(processors) or None)


def _header(text: SmiText, lines: list[str]) -> tuple[int, list[str]]:
    """The number of the line that names the columns, and the devices it names."""
    for number, line in enumerate(lines, 1):
        words = line.split()
        if words and _GPU.fullmatch(words[0]) and (len(words) == 1 or words[1] not in _CONNECTIONS):
            if len(words) > 1 and _NVLINKS.fullmatch(words[1]):
                continue
            names = words[: words.index("CPU")] if "CPU" in words else words
            if len(names) > _MOST_COLUMNS:
                raise text.error(number, 1, f"{len(names)} columns; at most {_MOST_COLUMNS} are read")
            twice = {one for one, other in pairwise(sorted(names)) if one == other}
            if twice:
                raise text.error(number, 1, f"{min(twice)} names two columns; every GPU has one")
            return number, names
    raise ValueError(
        f"{text.name} has no line that names the GPUs (GPU0 GPU1 ...) in {len(lines)} lines; "
        "save the whole output of nvidia-smi topo -m"
    )


def _row(text: SmiText, number: int, name: str, names: list[str], words: list[re.Match[str]]) -> dict[str, Connection]:
    cells: dict[str, Connection] = {}
    for other, word in zip(names, words, strict=False):
        if not _GPU.fullmatch(other):
            continue
        connection = _connection(word[0])
        if connection is None or (connection == SELF) != (other == name):
            wanted = "X" if other == name else _KNOWN.removeprefix("X, ")
            message = f"{name} to {other} is {_quoted(word[0])}; expected {wanted}"
            raise text.error(number, word.start() + 1, message)
        cells[other] = connection
    missing = [other for other in names if _GPU.fullmatch(other) and other not in cells]
    if missing:
        end = words[-1].end() + 1 if words else len(name) + 1
        raise text.error(number, end, f"{name} has {len(words)} of {len(names)} entries, none for {missing[0]}")
    return cells


def _connection(word: str) -> Connection | None:
    links = _NVLINKS.fullmatch(word)
    if links:
        return Connection(LinkKind.NVLINK, int(links[1])) if int(links[1]) else None
    return _CONNECTIONS.get(word)


def _require_whole(
    text: SmiText, top: int, gpus: list[str], rows: dict[str, tuple[int, dict[str, Connection]]]
) -> None:
    missing = [name for name in gpus if name not in rows]
    if missing:
        message = f"{len(gpus)} GPUs are named here but {missing[0]} has no row"
        raise text.error(top, 1, f"{message}; save the whole output of nvidia-smi topo -m")
    for one in gpus:
        for other in gpus:
            there, back = rows[one][1][other], rows[other][1][one]
            if there != back:
                message = f"{one} to {other} is {there} but {other} to {one} is {back} in line {rows[other][0]}"
                raise text.error(rows[one][0], 1, message)


def _processors(text: str) -> set[int]:
    """The processors of `0-23,48-71`; empty where the column holds something else."""
    if not _RANGES.fullmatch(text) or len(text) > 4096:
        return set()
    found: set[int] = set()
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        if int(last or first) - int(first) > 1 << 16:
            return set()
        found |= set(range(int(first), int(last or first) + 1))
    return found


def parse_smi(text: SmiText) -> SmiTable:
    """The table; lines before and after it are ignored."""
    lines = [line.strip() for line in text.lines()]
    found = next((match for line in lines if (match := _VERSIONS.search(line))), None)
    if found is None:
        raise ValueError(
            f"{text.name} has no line with a driver version in {len(lines)} lines; save the whole output of nvidia-smi"
        )
    cuda = found[2] if found[2] and found[2][0].isdigit() else None
    matches = [(number, _TABLE_GPU.match(line)) for number, line in enumerate(lines, 1)]
    gpus = tuple(_parse_gpu(text, number, lines, match) for number, match in matches if match)
    if not gpus:
        raise ValueError(f"{text.name} names driver {found[1]} but no GPU; save the whole output of nvidia-smi")
    indices = [gpu.index for gpu in gpus]
    if len(set(indices)) < len(indices):
        twice = next(index for index in indices if indices.count(index) > 1)
        raise ValueError(f"{text.name} shows GPU {twice} {indices.count(twice)} times; save one table")
    return SmiTable(found[1], cuda, gpus)


def _parse_gpu(text: SmiText, number: int, lines: list[str], match: re.Match[str]) -> SmiGpu:
    """A GPU from its line and the one or two below it."""
    index = int(match[1])
    usage = lines[number] if number < len(lines) else ""
    memory = _MEMORY.search(usage)
    if memory is None:
        message = f"GPU {index} should have its memory here (10MiB / 24576MiB), not {_quoted(usage)}"
        raise text.error(number + 1, 1, message)
    mig = _MIG.search(lines[number + 1]) if number + 1 < len(lines) else None
    return SmiGpu(index, match[2], int(memory[1]) * MIB, mig is not None and mig[1] == "Enabled")


def _quoted(word: str) -> str:
    return repr(word[:_MOST_SHOWN])
