"""The versions that this release was tested with, and a line about any other; imports no library to find out."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

TESTED = {"Python": ("3.11", "3.13"), "torch": ("2.11", "2.15")}  # oldest and newest; pyproject.toml has no upper bound


def untested_versions() -> list[str]:
    """One line for each of Python and torch whose version was not tested; only the first rank of a launcher has any."""
    if any(os.environ.get(name, "0") != "0" for name in ("RANK", "SLURM_PROCID")):
        return []
    found = {"Python": platform.python_version()}
    with suppress(PackageNotFoundError):
        found["torch"] = version("torch")
    return [line for name, text in found.items() if (line := _line(name, text, *TESTED[name]))]


def _line(name: str, text: str, oldest: str, newest: str) -> str | None:
    number = _numbers(text)
    if _numbers(oldest) <= number <= _numbers(newest):
        return None
    how, bound = ("older", oldest) if number < _numbers(oldest) else ("newer", newest)
    shown = ".".join(map(str, number))
    return f"{name} {shown} is {how} than the tested {bound}; if something fails, use {name} {oldest} to {newest}"


def _numbers(text: str) -> tuple[int, ...]:
    """Major and minor version: (2, 13) of 2.13.0+cpu or 2.13.0a0."""
    return tuple(int(part) for part in text.split(".")[:2])
