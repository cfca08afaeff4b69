"""Exceptions that end a command with one line, and the phrases that error messages share.

A `ValueError` says what is wrong with the user's input and is the third kind of such an exception. Imports nothing of
ours, so that every folder may import it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST_NAMES = 20  # in a list of known names


class RunFailed(RuntimeError):
    """A rank failed; the message names the rank and its action."""


class Interrupted(KeyboardInterrupt):
    """The user stopped the run, at the moment that `when` names."""

    def __init__(self, when: str, next_step: str = "") -> None:
        self.when = when
        super().__init__(f"{when}; nothing is left running{next_step and f'; {next_step}'}")


def first_line(error: BaseException, most: int | None = None) -> str:
    """The first line of an exception's message, cut to `most` characters; the exception's type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The last part of an error about an unknown name: the nearest known name, or if none is near, the known names."""
    names = list(known)
    near = difflib.get_close_matches(name.lower(), names, 1, 0.5)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"known: {', '.join(names[:_MOST_NAMES])}{f', ... ({len(names)} names)' if len(names) > _MOST_NAMES else ''}"


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun: 1 step, 3 steps, 2 batches (with the plural `es`)."""
    return f"{number} {noun}{'' if number == 1 else plural}"
