"""What is new in a file of JSON lines that grows, and may be taken back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Tail:
    """Reads a file from where it read before; from its beginning where it was replaced or cut."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._at = 0
        self._torn = b""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether what was read before counts no more, and the objects of the whole lines since then."""
        try:
            with self._path.open("rb") as file:
                status = self._path.stat()
                is_other = status.st_ino != self._inode or status.st_size < self._at
                if is_other:
                    self._inode, self._at, self._torn = status.st_ino, 0, b""
                file.seek(self._at)
                new = file.read()
        except OSError:
            return False, []
        self._at += len(new)
        *lines, self._torn = (self._torn + new).split(b"\n")
        return is_other, [found for line in lines if isinstance(found := _parse(line), dict)]


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
