"""What a command tells its user while it works. Silent unless somebody listens.

Every function that has something to say takes a `Voice` and calls what it needs; the command line, a notebook or a
test decides where the words go. Errors are raised, never said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Say = Callable[[str], None]


def _silent(text: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Voice:
    """Three ways of saying a line."""

    warn: Say = _silent  # something is probably not as the user wants it
    note: Say = _silent  # something was decided or done that the user may want to know
    progress: Say = _silent  # what is being done now; the next line may replace it


SILENT = Voice()
