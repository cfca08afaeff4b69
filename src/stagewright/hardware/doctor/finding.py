"""A finding of `doctor`: one fact, how much it matters, and what to do about it; and how findings print."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.text import Text

from stagewright.cluster.placement import format_devices
from stagewright.cluster.topology import Device

UNKNOWN = "not known"


class Grade(StrEnum):
    """How much a fact matters."""

    FINE = "fine"
    NOTE = "note"
    PROBLEM = "problem"  # training will fail, or be clearly slower


_STYLES = {Grade.FINE: "green", Grade.NOTE: "yellow", Grade.PROBLEM: "bold red"}
_GRADE_WIDTH = len(Grade.PROBLEM) + 2
_LEAST_NAME = 21  # columns of the names; an area with longer ones has more
_GPU = re.compile("GPU ([0-9]+)")


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact with its grade; whatever is not fine has advice."""

    area: str  # system, software, GPUs, ...
    name: str
    value: str
    grade: Grade = Grade.FINE
    advice: str = ""


def finding(area: str, name: str, value: object, *troubles: tuple[bool, Grade, str]) -> Finding:
    """A fact with the grade and advice of the first trouble that holds; the value None reads "not known"."""
    shown = UNKNOWN if value is None else str(value)
    grade, advice = next(((grade, advice) for holds, grade, advice in troubles if holds), (Grade.FINE, ""))
    return Finding(area, name, shown, grade, advice)


def finding_lines(findings: Sequence[Finding], width: int) -> Iterator[Text]:
    """The findings for a terminal: one area after the other, each piece of advice below its finding."""
    for area, group in itertools.groupby(_merged(findings), lambda finding: finding.area):
        found = list(group)
        names = max(_LEAST_NAME, *(len(finding.name) for finding in found)) + 2
        yield Text(area, style="bold")
        for finding in found:
            yield from _lines(finding, names, width)


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Findings that hold for several GPUs said once, with their numbers after the name."""
    gpus: dict[tuple[str, str, Grade, str], list[Device]] = {}
    for finding in findings:
        if match := _GPU.fullmatch(finding.area):
            gpu = Device(0, int(match[1]))
            gpus.setdefault((finding.name, finding.value, finding.grade, finding.advice), []).append(gpu)
    names = list(dict.fromkeys(name for name, *_ in gpus))
    together = [
        Finding("GPUs", f"{name} {format_devices(alike).removeprefix('0:')}", value, grade, advice)
        for (name, value, grade, advice), alike in sorted(gpus.items(), key=lambda item: names.index(item[0][0]))
    ]
    first = next((place for place, finding in enumerate(findings) if _GPU.fullmatch(finding.area)), 0)
    others = [finding for finding in findings if not _GPU.fullmatch(finding.area)]
    return [*others[:first], *together, *others[first:]]


def _lines(finding: Finding, names: int, width: int) -> Iterator[Text]:
    margin, indent = 2 + _GRADE_WIDTH, 2 + _GRADE_WIDTH + names
    value, *rest = textwrap.wrap(finding.value, max(width - indent, 20)) or [""]
    grade = (f"{finding.grade:<{_GRADE_WIDTH}}", _STYLES[finding.grade])
    yield Text.assemble("  ", grade, f"{finding.name:<{names - 1}} {value}")
    for value in rest:
        yield Text(" " * indent + value)
    for number, line in enumerate(textwrap.wrap(finding.advice, width - margin - 3)):
        yield Text(f"{' ' * margin}{'   ' if number else '-> '}{line}", style="italic")
