"""Text that somebody pasted: lines without a terminal's codes, and errors that say where."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\([A-Z]")
_MOST_BYTES = 4 << 20
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Pasted:
    """A text and where it came from."""

    name: str
    text: str

    def lines(self) -> list[str]:
        return [_CODES.sub("", line).replace("\ufeff", "") for line in self.text.splitlines()]

    def error(self, line: int, column: int, message: str) -> ValueError:
        """What is wrong, at a line and column that count from 1."""
        return ValueError(f"{self.name} line {line}, column {column}: {message}")


def read_pasted(path: str) -> Pasted:
    """A file, or standard input for `-`."""
    if path == "-":
        return Pasted("standard input", sys.stdin.read(_MOST_BYTES))
    try:
        with Path(path).open(errors="replace") as file:
            return Pasted(path, file.read(_MOST_BYTES))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give the file that nvidia-smi's text was saved to") from error


def shown(word: str) -> str:
    return repr(word[:_SHOWN])
