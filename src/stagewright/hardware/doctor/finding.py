"""One thing that a doctor has to say."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

UNKNOWN = "not known"


class Grade(StrEnum):
    """How much it matters."""

    FINE = "fine"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact with its grade; what is not fine says what to do."""

    area: str  # system, software, GPUs, ...
    name: str
    value: str
    grade: Grade = Grade.FINE
    advice: str = ""


def finding(area: str, name: str, value: object, *troubles: tuple[bool, Grade, str]) -> Finding:
    """A fact, with the first trouble that holds; None is a fact that nobody tells."""
    shown = UNKNOWN if value is None else str(value)
    grade, advice = next(((grade, advice) for holds, grade, advice in troubles if holds), (Grade.FINE, ""))
    return Finding(area, name, shown, grade, advice)
