"""Reads saved output of nvidia-smi: `topo -m` (the matrix of connections) and `-q -x` (the GPUs, as XML).

Both come from drivers old and new, with a terminal's colour codes or other output around them. What can't be read is a
UserError that names file, line and column.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from itertools import pairwise
from xml.etree import ElementTree
from xml.parsers import expat

from stagewright.errors import UserError
from stagewright.files import open_regular
from stagewright.hardware.gpu import Gpu
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
_RANGES = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?){0,200}")
_CONNECTIONS = {str(kind): Connection(kind) for kind in LinkKind if kind is not LinkKind.NVLINK} | {
    "SOC": Connection(LinkKind.SYSTEM)  # an old driver's name
}
_KNOWN = "X, NV#, PIX, PXB, PHB, NODE, SYS"
# The XML.
_LOG, _LOG_END = "<nvidia_smi_log>", "</nvidia_smi_log>"
_QUANTITY = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?) ?(?:MiB|W|x)?")
_MOST_NAME = 80  # characters
_LINK = "pci/pci_gpu_link_info"
_POWER = ("gpu_power_readings", "power_readings")  # of drivers new and old


@dataclass(frozen=True, slots=True)
class SmiText:
    """Saved output of nvidia-smi, and the file it came from."""

    name: str
    text: str

    def lines(self) -> list[str]:
        return [_TERMINAL_CODES.sub("", line).replace("\ufeff", "") for line in self.text.splitlines()]

    def error(self, line: int, column: int, message: str) -> UserError:
        """An error at a line and column, both counted from 1."""
        return UserError(f"{self.name} line {line}, column {column}: {message}")


def read_smi_text(path: str) -> SmiText:
    """A file, or standard input for `-`."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with os.fdopen(open_regular(path), "rb") as file:
                data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; give the file that holds nvidia-smi's output, or - for standard input"
        ) from error
    name = "standard input" if path == "-" else path
    if len(data) > _MOST_BYTES:
        raise UserError(f"{name} has more than {_MOST_BYTES} bytes; give the output of nvidia-smi alone")
    return SmiText(name, data.decode(errors="replace"))


def parse_topology(text: SmiText) -> Topology:
    """The GPUs of a matrix; network cards, affinities and the legend may be present or missing."""
    lines = text.lines()
    top, names = _header(text, lines)
    gpus = [name for name in names if _GPU.fullmatch(name)]
    cells: dict[tuple[str, str], Connection] = {}
    rows: dict[str, int] = {}  # the line of each
    processors: set[int] = set()
    for number, line in enumerate(lines[top:], top + 1):
        words = list(_WORD.finditer(line))
        if not words or (name := words[0][0]) not in gpus:
            continue
        if name in rows:
            raise text.error(number, words[0].start() + 1, f"{name} already has a row, in line {rows[name]}")
        rows[name] = number
        cells |= _row(text, number, name, names, words[1:])
        for word in words[1 + len(names) : 2 + len(names)]:
            processors |= _processors(word[0])
        if len(rows) == len(gpus):
            break
    if missing := [name for name in gpus if name not in rows]:
        message = f"{len(gpus)} GPUs are named here but {missing[0]} has no row"
        raise text.error(top, 1, f"{message}; save the whole output of nvidia-smi topo -m")
    for (one, other), there in cells.items():
        if there != (back := cells[other, one]):
            message = f"{one} to {other} is {there} but {other} to {one} is {back} in line {rows[other]}"
            raise text.error(rows[one], 1, message)
    return Topology(tuple(tuple(cells[one, other] for other in gpus) for one in gpus), len(processors) or None)


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
    raise UserError(
        f"{text.name} has no line that names the GPUs (GPU0 GPU1 ...) in {len(lines)} lines; "
        "save the whole output of nvidia-smi topo -m"
    )


def _row(
    text: SmiText, number: int, name: str, names: list[str], words: list[re.Match[str]]
) -> dict[tuple[str, str], Connection]:
    """The cells of a GPU's row."""
    cells: dict[tuple[str, str], Connection] = {}
    for place, other in enumerate(names):
        if not _GPU.fullmatch(other):
            continue
        if place >= len(words):
            end = words[-1].end() + 1 if words else len(name) + 1
            raise text.error(number, end, f"{name} has {len(words)} of {len(names)} entries, none for {other}")
        word = words[place]
        connection = _connection(word[0])
        if connection is None or (connection == SELF) != (other == name):
            wanted = "X" if other == name else _KNOWN.removeprefix("X, ")
            shown = repr(word[0][:_MOST_SHOWN])
            raise text.error(number, word.start() + 1, f"{name} to {other} is {shown}; expected {wanted}")
        cells[name, other] = connection
    return cells


def _connection(word: str) -> Connection | None:
    links = _NVLINKS.fullmatch(word)
    if links:
        return Connection(LinkKind.NVLINK, int(links[1])) if int(links[1]) else None
    return _CONNECTIONS.get(word)


def _processors(text: str) -> set[int]:
    """The processors of `0-23,48-71`; empty where the column holds something else."""
    if not _RANGES.fullmatch(text):
        return set()
    ends = (piece.partition("-") for piece in text.split(","))
    return set().union(*(range(int(first), int(last or first) + 1) for first, _, last in ends))


def parse_smi(text: SmiText) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs of the XML, and its driver and CUDA in words; what is around it is ignored.

    The parser gets the log element alone: no document type, so no text can define entities or name other files.
    """
    whole = "\n".join(text.lines())
    starts, ends = whole.count(_LOG), whole.count(_LOG_END)
    if not starts:
        raise UserError(f"{text.name} has no {_LOG}; save the output of nvidia-smi -q -x (its plain table is not read)")
    if (starts, ends) != (1, 1):
        raise UserError(
            f"{text.name} has {starts} {_LOG} and {ends} {_LOG_END}; save the output of nvidia-smi -q -x once"
        )
    start, end = whole.index(_LOG), whole.index(_LOG_END) + len(_LOG_END)
    try:
        log = ElementTree.fromstring(whole[start:end])
    except ElementTree.ParseError as error:
        line, column = error.position
        line += whole.count("\n", 0, start)
        message = f"the XML is damaged ({expat.ErrorString(error.code)}); save the output of nvidia-smi -q -x again"
        raise text.error(line, column + 1, message) from error
    driver = _xml_text(log, "driver_version")
    gpus = tuple(_xml_gpu(text, index, gpu) for index, gpu in enumerate(log.findall("gpu")))
    attached = _quantity(log, "attached_gpus")
    if driver is None or (attached is not None and attached != len(gpus)):
        counts = f"{len(gpus)} of {attached or 0:.0f} GPUs and driver {driver or 'unknown'}"
        raise UserError(f"{text.name} describes {counts}; save the output of nvidia-smi -q -x without -i or -d")
    if not gpus:
        raise UserError(f"{text.name} names driver {driver} but no GPU; save the output of nvidia-smi -q -x again")
    cuda = _xml_text(log, "cuda_version")
    return gpus, f"driver {driver}" + (f", CUDA {cuda}" if cuda else "")


def _xml_gpu(text: SmiText, index: int, gpu: ElementTree.Element) -> Gpu:
    """A GPU by its position: the XML has the driver's order, but no indices."""
    name = _xml_text(gpu, "product_name")
    if name is None:
        raise UserError(f"{text.name}: GPU {index} has no product_name; save the output of nvidia-smi -q -x again")
    memory = _quantity(gpu, "fb_memory_usage/total")
    return Gpu(
        index,
        _xml_text(gpu, "uuid") or f"GPU {index}",
        name,
        None if memory is None else int(memory) * MIB,
        power_limit=_quantity(gpu, f"{_POWER[0]}/current_power_limit", f"{_POWER[1]}/enforced_power_limit"),
        power_default=_quantity(gpu, *(f"{readings}/default_power_limit" for readings in _POWER)),
        pcie_generation=_whole(gpu, f"{_LINK}/pcie_gen/max_link_gen"),
        pcie_width=_whole(gpu, f"{_LINK}/link_widths/current_link_width"),
        card_generation=_whole(gpu, f"{_LINK}/pcie_gen/max_device_link_gen"),
        card_width=_whole(gpu, f"{_LINK}/link_widths/max_link_width"),
        is_mig=_xml_text(gpu, "mig_mode/current_mig") == "Enabled",
    )


def _xml_text(element: ElementTree.Element, path: str) -> str | None:
    """The text of an element on one line; None where the driver does not know it."""
    text = " ".join((element.findtext(path) or "").split())[:_MOST_NAME]
    return text if text not in ("", "N/A", "Unknown Error") else None


def _quantity(element: ElementTree.Element, *paths: str) -> float | None:
    """The first of some elements that holds a number, without its unit."""
    texts = (_QUANTITY.fullmatch(_xml_text(element, path) or "") for path in paths)
    return next((float(match[1]) for match in texts if match), None)


def _whole(element: ElementTree.Element, path: str) -> int | None:
    """A whole number; None for 0, which stands for unknown."""
    return int(_quantity(element, path) or 0) or None
