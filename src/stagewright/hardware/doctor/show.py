"""Prints what `doctor` found, for a terminal: one area after the other, each piece of advice below its finding."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from stagewright.cluster.placement import format_devices
from stagewright.cluster.topology import Device
from stagewright.hardware.doctor.check import MachineCheck
from stagewright.hardware.doctor.finding import Finding, Grade

_STYLES = {Grade.FINE: "green", Grade.NOTE: "yellow", Grade.PROBLEM: "bold red"}
_GRADE_WIDTH = len(Grade.PROBLEM) + 2
_NAME_WIDTH = 23
_MOST_WIDTH = 100
_LEAST_WIDTH = 40
_GPU = re.compile("GPU ([0-9]+)")


def show(console: Console, check: MachineCheck) -> None:
    """Print the findings, area by area, then the matrix of connections and the summary."""
    width = max(min(console.width, _MOST_WIDTH), _LEAST_WIDTH)
    for area, found in itertools.groupby(_merged(check.findings), lambda finding: finding.area):
        _print(console, Text(area, style="bold"))
        for finding in found:
            for line in _lines(finding, width):
                _print(console, line)
    topology = check.environment.topology
    if topology is not None and len(topology) > 1:
        _print(console, Text("connections", style="bold"))
        for row in topology.table():
            _print(console, Text(f"  {row}"))
    _print(console, Text(""))
    _print(console, Text(textwrap.fill(check.summary, width)))


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Findings that hold for several GPUs said once, with their numbers after the name."""
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
