"""metrics.jsonl: a record a line, in their order; a run that goes back to a checkpoint takes back what came after."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stagewright.metrics import Evaluated, Replaced, Restarted, Resumed, Saved, Step, Unsaved

Record = Step | Evaluated | Replaced | Saved | Unsaved | Restarted | Resumed
_KINDS: dict[str, type[Record]] = {
    kind.__name__.lower(): kind for kind in (Step, Evaluated, Replaced, Saved, Unsaved, Restarted, Resumed)
}


class Journal:
    """The records of a run, handed to the system as soon as they are written; where there is no room, a bit later."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        path.touch()
        self._file = path.open("ab", buffering=0)
        self._waiting = b""  # for room on the disk
        self.records: tuple[Record, ...] = ()  # of what was trained before
        self.rewind(start)

    def write(self, record: Record) -> None:
        kind = type(record).__name__.lower()
        known = {name: value for name, value in asdict(record).items() if value is not None}
        self._waiting += json.dumps({"kind": kind, **known}).encode() + b"\n"
        with suppress(OSError):
            self._hand_over()
            if isinstance(record, Saved):
                os.fsync(self._file.fileno())

    def rewind(self, batch: int) -> None:
        """Keep what `batch` batches have left, and nothing else."""
        with suppress(OSError):
            self._hand_over()
        self._file.close()
        lines = [*self._path.read_bytes().splitlines(), *self._waiting.splitlines()]
        kept = [(line, record) for line, record in _read(lines) if _is_before(record, batch)]
        draft = self._path.with_suffix(".draft")
        with draft.open("wb") as file:
            file.writelines(line + b"\n" for line, _ in kept)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)
        self.records = tuple(record for _, record in kept)
        self._waiting = b""
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        try:
            self._hand_over()
        except OSError as error:
            lost = self._waiting.count(b"\n")
            raise ValueError(
                f"{lost} records could not be written to {self._path}: {error.strerror}; make room on the disk"
            ) from error
        finally:
            self._file.close()

    def _hand_over(self) -> None:
        """Write what waits, whole lines or nothing."""
        size = self._path.stat().st_size
        try:
            view = memoryview(self._waiting)
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            os.truncate(self._path, size)
            raise
        self._waiting = b""


def _read(lines: Iterable[bytes]) -> Iterator[tuple[bytes, Record]]:
    """The lines that are whole, and what they say; a run that was killed may leave a torn one."""
    for line in lines:
        try:
            fields: dict[str, Any] = json.loads(line)
            yield line, _KINDS[fields.pop("kind")](**fields)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue


def _is_before(record: Record, batch: int) -> bool:
    if isinstance(record, Replaced):
        return True
    return record.batch < batch if isinstance(record, Step) else record.batch <= batch
