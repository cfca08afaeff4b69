"""Text that somebody pasted: lines without a terminal's codes, and errors that say where. Reads the matrix of `nvidia-smi topo -m` from text. Reads the table that plain `nvidia-smi` prints, of drivers old and new."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from stagewright.hardware.topology import SELF, Connection, LinkKind, Topology

_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\([A-Z]")
_MOST_BYTES = 4 << 20
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class SmiText:
    """A text and where it came from."""

    name: str
    text: str

    def lines(self) -> list[str]:
        return [_CODES.sub("", line).replace("\ufeff", "") for line in self.text.splitlines()]

    def error(self, line: int, column: int, message: str) -> ValueError:
        """What is wrong, at a line and column that count from 1."""
        return ValueError(f"{self.name} line {line}, column {column}: {message}")


def read_smi_text(path: str) -> SmiText:
    """A file, or standard input for `-`."""
    if path == "-":
        return SmiText("standard input", sys.stdin.read(_MOST_BYTES))
    try:
        with Path(path).open(errors="replace") as file:
            return SmiText(path, file.read(_MOST_BYTES))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give the file that nvidia-smi's text was saved to") from error


def shown(word: str) -> str:
    return repr(word[:_SHOWN])


_GPU = re.compile(r"GPU[0-9]+")
_WORD = re.compile(r"\S+")
_LINKS = re.compile(r"NV([0-9]{1,2})")
_RANGES = re.compile(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*")
_WAYS = {str(way): Connection(way) for way in LinkKind if way is not LinkKind.NVLINK} | {
    "SOC": Connection(LinkKind.SYSTEM)
}
_KNOWN = "X, NV#, PIX, PXB, PHB, NODE, SYS"
_MOST = 1024


def parse_topology(pasted: SmiText) -> Topology:
    """The GPUs of a pasted matrix; network cards, affinities and the legend may be there or not."""
    lines = pasted.lines()
    top, names = _header(pasted, lines)
    gpus = [name for name in names if _GPU.fullmatch(name)]
    rows: dict[str, tuple[int, dict[str, Connection]]] = {}
    processors: set[int] = set()
    for number, line in enumerate(lines[top:], top + 1):
        words = list(_WORD.finditer(line))
        if not words or words[0][0] not in gpus:
            continue
        name = words[0][0]
        if name in rows:
            raise pasted.error(number, words[0].start() + 1, f"{name} has a row already, in line {rows[name][0]}")
        rows[name] = number, _row(pasted, number, name, names, words[1:])
        for word in words[1 + len(names) : 2 + len(names)]:
            processors |= _processors(word[0])
        if len(rows) == len(gpus):
            break
    _require_whole(pasted, top, gpus, rows)
    return Topology(tuple(tuple(rows[one][1][other] for other in gpus) for one in gpus), len(processors) or None)


def _header(pasted: SmiText, lines: list[str]) -> tuple[int, list[str]]:
    """The line that names the columns, and the devices it names."""
    for number, line in enumerate(lines, 1):
        words = line.split()
        if words and _GPU.fullmatch(words[0]) and (len(words) == 1 or words[1] not in _WAYS):
            if len(words) > 1 and _LINKS.fullmatch(words[1]):
                continue
            names = words[: words.index("CPU")] if "CPU" in words else words
            if len(names) > _MOST:
                raise pasted.error(number, 1, f"{len(names)} columns; the most is {_MOST}")
            twice = {one for one, other in pairwise(sorted(names)) if one == other}
            if twice:
                raise pasted.error(number, 1, f"{min(twice)} heads two columns; every GPU has one")
            return number, names
    raise ValueError(
        f"{pasted.name} has no line that names the GPUs (GPU0 GPU1 ...) in {len(lines)} lines; "
        "save all of nvidia-smi topo -m"
    )


def _row(
    pasted: SmiText, number: int, name: str, names: list[str], words: list[re.Match[str]]
) -> dict[str, Connection]:
    cells: dict[str, Connection] = {}
    for other, word in zip(names, words, strict=False):
        if not _GPU.fullmatch(other):
            continue
        connection = _connection(word[0])
        if connection is None or (connection == SELF) != (other == name):
            wanted = "X" if other == name else _KNOWN.removeprefix("X, ")
            message = f"{name} to {other} is {shown(word[0])}; expected {wanted}"
            raise pasted.error(number, word.start() + 1, message)
        cells[other] = connection
    missing = [other for other in names if _GPU.fullmatch(other) and other not in cells]
    if missing:
        end = words[-1].end() + 1 if words else len(name) + 1
        raise pasted.error(number, end, f"{name} has {len(words)} entries and none for {missing[0]}; save whole lines")
    return cells


def _connection(word: str) -> Connection | None:
    links = _LINKS.fullmatch(word)
    if links:
        return Connection(LinkKind.NVLINK, int(links[1])) if int(links[1]) else None
    return _WAYS.get(word)


def _require_whole(
    pasted: SmiText, top: int, gpus: list[str], rows: dict[str, tuple[int, dict[str, Connection]]]
) -> None:
    missing = [name for name in gpus if name not in rows]
    if missing:
        message = f"{len(gpus)} GPUs are named here but {missing[0]} has no row; save all of nvidia-smi topo -m"
        raise pasted.error(top, 1, message)
    for one in gpus:
        for other in gpus:
            there, back = rows[one][1][other], rows[other][1][one]
            if there != back:
                message = f"{one} to {other} is {there} but {other} to {one} is {back} in line {rows[other][0]}"
                raise pasted.error(rows[one][0], 1, message)


def _processors(text: str) -> set[int]:
    """The processors of `0-23,48-71`; none where the column is something else."""
    if not _RANGES.fullmatch(text) or len(text) > 4096:
        return set()
    found: set[int] = set()
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        if int(last or first) - int(first) > 1 << 16:
            return set()
        found |= set(range(int(first), int(last or first) + 1))
    return found


_VERSIONS = re.compile(r"(?:Driver|KMD) Version:\s*([0-9.]+)(?:.*?CUDA(?: UMD)? Version:\s*([0-9.]+|N/A|ERR!))?")
_CARD = re.compile(
    r"\|\s*([0-9]+)\s+(\S.*?)\s+(?:On|Off|N/A|WDDM|TCC|MCDM)\s*\|\s*([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9])"
)
_MEMORY = re.compile(r"([0-9]+)\s*MiB\s*/\s*([0-9]+)\s*MiB")
_POWER = re.compile(r"(?:([0-9]+)W|N/A|ERR!|Unknown.*?)\s*/\s*(?:([0-9]+)W|N/A)")
_MIG = re.compile(r"\|\s*(Enabled|Disabled|N/A)\*?\s*\|$")
_PROCESS = re.compile(
    r"\|\s*([0-9]+)\s+(?:(?:[0-9]+|N/A)\s+(?:[0-9]+|N/A)\s+)?([0-9]+)\s+([CGM+]+)\s+(\S.*?)\s+([0-9]+MiB|N/A)\s*\|$"
)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU of the table."""

    index: int
    name: str
    bus: str
    memory: int = 0  # bytes
    used: int = 0
    power_limit: float | None = None  # watts
    is_mig: bool = False

    @property
    def is_cut_short(self) -> bool:
        """The table had no room for the whole name."""
        return self.name.endswith("...")


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a GPU."""

    gpu: int
    process: int
    kind: str  # C computes, G draws
    name: str
    memory: int | None


@dataclass(frozen=True, slots=True)
class Smi:
    """The whole table."""

    driver: str
    cuda: str | None
    cards: tuple[Card, ...]
    occupants: tuple[GpuProcess, ...]


def parse_smi(pasted: SmiText) -> Smi:
    """A pasted table; what follows or precedes it does not matter."""
    lines = [line.strip() for line in pasted.lines()]
    found = next((match for line in lines if (match := _VERSIONS.search(line))), None)
    if found is None:
        raise ValueError(
            f"{pasted.name} has no line with a driver version in {len(lines)} lines; save all that nvidia-smi prints"
        )
    cuda = found[2] if found[2] and found[2][0].isdigit() else None
    cards: list[Card] = []
    occupants: list[GpuProcess] = []
    for number, line in enumerate(lines, 1):
        if match := _CARD.match(line):
            cards.append(_card(pasted, number, lines, match))
        elif match := _PROCESS.match(line):
            size = None if match[5] == "N/A" else int(match[5].removesuffix("MiB")) * _MIB
            occupants.append(GpuProcess(int(match[1]), int(match[2]), match[3], match[4], size))
    if not cards:
        raise ValueError(f"{pasted.name} names driver {found[1]} but no GPU; save all that nvidia-smi prints")
    indices = [card.index for card in cards]
    if len(set(indices)) < len(indices):
        twice = next(index for index in indices if indices.count(index) > 1)
        raise ValueError(f"{pasted.name} shows GPU {twice} {indices.count(twice)} times; save one table")
    return Smi(found[1], cuda, tuple(cards), tuple(occupants))


def _card(pasted: SmiText, number: int, lines: list[str], match: re.Match[str]) -> Card:
    """A GPU from its line and the one or two below it."""
    card = Card(int(match[1]), match[2], match[3].lower())
    usage = lines[number] if number < len(lines) else ""
    memory = _MEMORY.search(usage)
    if memory is None:
        message = f"GPU {card.index} should have its memory here (10MiB / 24576MiB), not {shown(usage)}"
        raise pasted.error(number + 1, 1, message)
    power = _POWER.search(usage.split("|")[1]) if usage.startswith("|") else None
    below = lines[number + 1] if number + 1 < len(lines) else ""
    mig = _MIG.search(below)
    return replace(
        card,
        memory=int(memory[2]) * _MIB,
        used=int(memory[1]) * _MIB,
        power_limit=float(power[2]) if power and power[2] else None,
        is_mig=mig is not None and mig[1] == "Enabled",
    )
