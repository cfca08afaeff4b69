"""A whole examination: facts first, then what they mean, then measurements. An examination as text: one area after the other, advice below what it is about."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from stagewright.cluster.placement import format_devices
from stagewright.cluster.topology import Device
from stagewright.hardware.doctor.finding import Finding, Grade
from stagewright.hardware.doctor.gpus import gpu_findings, read_states, topology_findings
from stagewright.hardware.doctor.measure import (
    Measured,
    disk_finding,
    gpu_copies,
    loopback,
    memory_copy,
    read_disk,
    speed_findings,
)
from stagewright.hardware.doctor.system import read_system_state, software_findings, system_findings
from stagewright.hardware.environment import Environment, environment
from stagewright.hardware.gpu import visible
from stagewright.runtime.multinode.nodes import DEFAULT_PORT

if TYPE_CHECKING:
    from stagewright.hardware.doctor.measure import DiskRead


Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything that was found."""

    environment: Environment
    findings: tuple[Finding, ...]
    measured: tuple[Measured, ...]
    disk: DiskRead | None

    @property
    def verdict(self) -> str:
        """All of it in a line."""
        hurts = sum(found.grade is Grade.PROBLEM for found in self.findings)
        notes = sum(found.grade is Grade.NOTE for found in self.findings)
        devices = f"{len(self.environment.gpus)} GPUs" if self.environment.gpus else "no GPU: train with --device cpu"
        if not hurts and not notes:
            return f"{devices}; nothing to worry about"
        return f"{devices}; {hurts} will hurt, {notes} to note, {len(self.findings) - hurts - notes} fine"

    def describe(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "findings": [asdict(found) for found in self.findings],
            "measured": [asdict(one) for one in self.measured],
            "disk": None if self.disk is None else asdict(self.disk),
            "environment": self.environment.describe(),
        }


def examine(data: str | None, *, measures: bool, tell: Tell) -> Examination:
    """Look at this machine; `data` is a file or folder whose disk is to be timed."""
    read = None if data is None else _read_disk(data, tell)
    tell("system and GPUs")
    found = environment()
    states, peers = read_states()
    findings = [
        *system_findings(found, read_system_state(DEFAULT_PORT)),
        *software_findings(found),
        *gpu_findings(found.gpus, states),
        *topology_findings(found, peers),
    ]
    measured = tuple(_measured(tell)) if measures else ()
    return Examination(found, (*findings, *_speeds(found, measured, read)), measured, read)


def _read_disk(data: str, tell: Tell) -> DiskRead:
    tell(f"reading {data}")
    return read_disk(Path(data.partition(":")[2] if data.startswith(("folder:", "ofrecord:", "tensors:")) else data))


def _measured(tell: Tell) -> Iterator[Measured]:
    tell("copies of memory")
    yield _attempt("memory copy, one core", memory_copy, Measured)
    tell("messages between two ranks")
    yield _attempt("between two ranks", loopback, Measured)
    for name, copy in gpu_copies():
        tell(name)
        yield _attempt(name, copy, Measured)


def _attempt(name: str, work: Callable[[], Measured], measured: type[Measured]) -> Measured:
    """A measurement, or why there is none: a doctor does not fall ill of what it finds."""
    try:
        return work()
    except Exception as error:
        words = " ".join(str(error).split())[:120]
        return measured(name, None, trouble=words or type(error).__name__)


def _speeds(found: Environment, measured: tuple[Measured, ...], read: DiskRead | None) -> Iterator[Finding]:
    yield from speed_findings(measured, dict(enumerate(visible(found.gpus))))
    if read is not None:
        yield disk_finding(read)


_STYLES = {Grade.FINE: "green", Grade.NOTE: "yellow", Grade.PROBLEM: "bold red"}
_GRADE_WIDTH = len(Grade.PROBLEM) + 2
_NAME_WIDTH = 23
_WIDEST = 100
_NARROWEST = 40
_GPU = re.compile("GPU ([0-9]+)")


def show(console: Console, examination: Examination) -> None:
    width = max(min(console.width, _WIDEST), _NARROWEST)
    for area, found in itertools.groupby(_merged(examination.findings), lambda finding: finding.area):
        _print(console, Text(area, style="bold"))
        for finding in found:
            for line in _lines(finding, width):
                _print(console, line)
    topology = examination.environment.topology
    if topology is not None and len(topology) > 1:
        _print(console, Text("connections", style="bold"))
        for row in topology.table():
            _print(console, Text(f"  {row}"))
    _print(console, Text(""))
    _print(console, Text(textwrap.fill(examination.verdict, width)))


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """The same with what holds for several GPUs said once, their numbers behind its name."""
    gpus: dict[tuple[str, str, Grade, str], list[int]] = {}
    for finding in findings:
        if match := _GPU.fullmatch(finding.area):
            gpus.setdefault((finding.name, finding.value, finding.grade, finding.advice), []).append(int(match[1]))
    names = list(dict.fromkeys(name for name, *_ in gpus))
    together = [
        Finding("GPUs", f"{name} {_numbers(indices)}", value, grade, advice)
        for (name, value, grade, advice), indices in sorted(gpus.items(), key=lambda item: names.index(item[0][0]))
    ]
    first = next((place for place, finding in enumerate(findings) if _GPU.fullmatch(finding.area)), 0)
    others = [finding for finding in findings if not _GPU.fullmatch(finding.area)]
    return [*others[:first], *together, *others[first:]]


def _numbers(indices: Iterable[int]) -> str:
    return format_devices(Device(0, index) for index in indices).removeprefix("0:")


def _lines(finding: Finding, width: int) -> list[Text]:
    indent = 2 + _GRADE_WIDTH + _NAME_WIDTH
    values = textwrap.wrap(finding.value, max(width - indent, 20)) or [""]
    first = Text("  ")
    first.append(f"{finding.grade:<{_GRADE_WIDTH}}", style=_STYLES[finding.grade])
    first.append(f"{finding.name:<{_NAME_WIDTH - 1}} {values[0]}")
    lines = [first, *(Text(" " * indent + value) for value in values[1:])]
    margin = " " * (2 + _GRADE_WIDTH)
    advice = textwrap.wrap(finding.advice, width - len(margin) - 3)
    for number, line in enumerate(advice):
        lines.append(Text(f"{margin}{'-> ' if number == 0 else '   '}{line}", style="italic"))
    return lines


def _print(console: Console, line: Text) -> None:
    console.print(line, soft_wrap=True, highlight=False)
