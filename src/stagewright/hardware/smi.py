"""Reads saved output of nvidia-smi: `topo -m` (the matrix of connections), `-q -x` (XML) and the plain table of GPUs.

The XML says more than the table, which people paste in forums: whole names, and the slot of each GPU. Neither has the
matrix. All come from drivers old and new, with a terminal's colour codes or other output around them. What can't be
read is a UserError that names file, line and column.
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
_RANGES = re.compile(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*")
_CONNECTIONS = {str(kind): Connection(kind) for kind in LinkKind if kind is not LinkKind.NVLINK} | {
    "SOC": Connection(LinkKind.SYSTEM)  # an old driver's name
}
_KNOWN = "X, NV#, PIX, PXB, PHB, NODE, SYS"
# The table.
_VERSIONS = re.compile(r"(?:Driver|KMD) Version:\s*([0-9.]+)(?:.*?CUDA(?: UMD)? Version:\s*([0-9.]+|N/A|ERR!))?")
_TABLE_GPU = re.compile(
    r"\|\s*([0-9]{1,4})\s+(\S.{0,80}?)\s+(?:On|Off|N/A|WDDM|TCC|MCDM)\s*\|\s*[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9]"
)
_MEMORY = re.compile(r"[0-9]{1,9}\s{0,9}MiB\s{0,9}/\s{0,9}([0-9]{1,9})\s{0,9}MiB")
_MIG = re.compile(r"\|\s*(Enabled|Disabled|N/A)\*?\s*\|$")
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


@dataclass(frozen=True, slots=True)
class SmiOutput:
    """The GPUs that nvidia-smi shows, and the versions of its driver."""

    driver: str
    cuda: str | None
    gpus: tuple[Gpu, ...]  # names from a table end in ... where the column was too narrow


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
    raise UserError(
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


def parse_smi(text: SmiText) -> SmiOutput:
    """The GPUs of the XML where the text holds it, else those of the table; what is around it is ignored."""
    found = _parse_xml(text) if _LOG in text.text else _parse_table(text)
    if not found.gpus:
        raise UserError(f"{text.name} names driver {found.driver} but no GPU; save the whole output of nvidia-smi")
    return found


def _parse_table(text: SmiText) -> SmiOutput:
    lines = [line.strip() for line in text.lines()]
    found = next((match for line in lines if (match := _VERSIONS.search(line))), None)
    if found is None:
        raise UserError(
            f"{text.name} has no line with a driver version in {len(lines)} lines; save the whole output of nvidia-smi"
        )
    cuda = found[2] if found[2] and found[2][0].isdigit() else None
    matches = [(number, _TABLE_GPU.match(line)) for number, line in enumerate(lines, 1)]
    gpus = tuple(_table_gpu(text, number, lines, match) for number, match in matches if match)
    indices = [gpu.index for gpu in gpus]
    if len(set(indices)) < len(indices):
        twice = next(index for index in indices if indices.count(index) > 1)
        raise UserError(f"{text.name} shows GPU {twice} {indices.count(twice)} times; save one table")
    return SmiOutput(found[1], cuda, gpus)


def _table_gpu(text: SmiText, number: int, lines: list[str], match: re.Match[str]) -> Gpu:
    """A GPU from its line and the one or two below it."""
    index = int(match[1])
    usage = lines[number] if number < len(lines) else ""
    memory = _MEMORY.search(usage)
    if memory is None:
        message = f"GPU {index} should have its memory here (10MiB / 24576MiB), not {_quoted(usage)}"
        raise text.error(number + 1, 1, message)
    mig = _MIG.search(lines[number + 1]) if number + 1 < len(lines) else None
    is_mig = mig is not None and mig[1] == "Enabled"
    return Gpu(index, f"GPU {index}", match[2], int(memory[1]) * MIB, is_mig=is_mig)


def _parse_xml(text: SmiText) -> SmiOutput:
    """The parser gets the log element alone: no document type, so no text can define entities or name other files."""
    whole = "\n".join(text.lines())
    starts, ends = whole.count(_LOG), whole.count(_LOG_END)
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
    return SmiOutput(driver, _xml_text(log, "cuda_version"), gpus)


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


def _quoted(word: str) -> str:
    return repr(word[:_MOST_SHOWN])
