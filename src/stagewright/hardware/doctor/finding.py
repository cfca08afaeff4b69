"""A finding of `doctor`: one fact, how much it matters, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

UNKNOWN = "not known"


class Grade(StrEnum):
    """How much a fact matters."""

    FINE = "fine"
    NOTE = "note"
    PROBLEM = "problem"  # training will fail, or be clearly slower


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
