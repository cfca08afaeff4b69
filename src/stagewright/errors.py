"""Exceptions that end a command with one line, and the phrases that error messages share.

A `UserError` says what is wrong with the user's input, `RunFailed` why a run ended, `Interrupted` when it was stopped.
Any other exception is a bug of ours: it keeps its traceback, and a run may be restarted after it. Imports nothing of
ours, so that every folder may import it.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk is, or what this user may use of it
_MOST_NAMES = 20  # in a list of known names


class UserError(ValueError):
    """Something that the user gave is wrong; the message says what, with both numbers, and what to do instead."""


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
    near = nearest(name.lower(), names, 0.5)
    if near is not None:
        return f"did you mean '{near}'?"
    return f"known: {', '.join(names[:_MOST_NAMES])}{f', ... ({len(names)} names)' if len(names) > _MOST_NAMES else ''}"


def nearest(name: str, known: Iterable[str], least: float = 0.6) -> str | None:
    """The known name that is most like this one, first those of the same letters (modle: model, not mode), or None."""
    near = difflib.get_close_matches(name, list(known), 3, least)
    return min(near, key=lambda other: sorted(other) != sorted(name), default=None)


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun: 1 step, 3 steps, 2 batches (with the plural `es`)."""
    return f"{number} {noun}{'' if number == 1 else plural}"


def either_of(names: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: Python and numpy raise a MemoryError, torch a RuntimeError that says so."""
    reason = str(error)
    return isinstance(error, MemoryError) or "allocate memory" in reason or "out of memory" in reason


@contextmanager
def within_memory(**asked: int | None) -> Iterator[None]:
    """Turn a failed allocation into an error that names the options that decide its size."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        options = ", ".join(f"--{name} {value}" for name, value in asked.items() if value is not None)
        raise UserError(f"not enough memory for {options}; reduce the largest of these options") from error


def printable(text: str) -> str:
    """One line of text that may come from anywhere: what a terminal would obey or can't encode is shown as an escape.

    Everything that is printed, logged or put on a page goes through here, so no name forges a line or hides one.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """A text of several lines, such as a traceback: only its line ends stay what they are."""
    return "\n".join(map(printable, text.split("\n")))


def is_text(text: str) -> bool:
    """Whether a text can be stored as UTF-8: names of files may be any bytes, of which Python makes lone surrogates."""
    return not any("\ud800" <= c <= "\udfff" for c in text)
