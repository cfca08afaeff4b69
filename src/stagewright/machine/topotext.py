"""Reads the matrix of `nvidia-smi topo -m` from text."""

from __future__ import annotations

import re
from itertools import pairwise

from stagewright.machine.pasted import Pasted, shown
from stagewright.machine.topology import SELF, Connection, Topology, Way

_GPU = re.compile(r"GPU[0-9]+")
_WORD = re.compile(r"\S+")
_LINKS = re.compile(r"NV([0-9]{1,2})")
_RANGES = re.compile(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*")
_WAYS = {str(way): Connection(way) for way in Way if way is not Way.NVLINK} | {"SOC": Connection(Way.SYSTEM)}
_KNOWN = "X, NV#, PIX, PXB, PHB, NODE, SYS"
_MOST = 1024


def parse_topology(pasted: Pasted) -> Topology:
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


def _header(pasted: Pasted, lines: list[str]) -> tuple[int, list[str]]:
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


def _row(pasted: Pasted, number: int, name: str, names: list[str], words: list[re.Match[str]]) -> dict[str, Connection]:
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
        return Connection(Way.NVLINK, int(links[1])) if int(links[1]) else None
    return _WAYS.get(word)


def _require_whole(
    pasted: Pasted, top: int, gpus: list[str], rows: dict[str, tuple[int, dict[str, Connection]]]
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
