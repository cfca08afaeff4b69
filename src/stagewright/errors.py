"""What a person is told when something goes wrong: the package's own exceptions, and the words that errors share.

Imports nothing of ours, so that every folder may import it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RunFailed(RuntimeError):
    """A rank failed; the message names it and what it was doing."""


class Interrupted(KeyboardInterrupt):
    """The user stopped the run."""

    def __init__(self, when: str, next_step: str = "") -> None:
        self.when = when
        super().__init__(f"{when}; nothing is left running{next_step and f'; {next_step}'}")


def first_line(error: BaseException, most: int | None = None) -> str:
    """The first line of an exception's message, at most so many characters; its type where it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the nearest known name, or all of them where none is near."""
    names = list(known)
    near = difflib.get_close_matches(name.lower(), names, 1, 0.5)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names)}"
