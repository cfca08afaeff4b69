"""metrics.jsonl: a record a line, in their order; a run that goes back to a checkpoint takes back what came after."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stagewright.metrics import Evaluated, Replaced, Restarted, Saved, Step, Unsaved

Record = Step | Evaluated | Replaced | Saved | Unsaved | Restarted
_KINDS: dict[str, type[Record]] = {
    kind.__name__.lower(): kind for kind in (Step, Evaluated, Replaced, Saved, Unsaved, Restarted)
}


class Journal:
    """The records of a run, on the disk as soon as they are written."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        path.touch()
        self._file = path.open("a")
        self.records: tuple[Record, ...] = ()  # of what was trained before
        self.rewind(start)

    def write(self, record: Record) -> None:
        kind = type(record).__name__.lower()
        self._file.write(json.dumps({"kind": kind, **asdict(record)}) + "\n")
        self._file.flush()
        if isinstance(record, Saved):
            os.fsync(self._file.fileno())

    def rewind(self, batch: int) -> None:
        """Keep what `batch` batches have left, and nothing else."""
        self._file.close()
        kept = [(line, record) for line, record in _read(self._path) if _is_before(record, batch)]
        draft = self._path.with_suffix(".draft")
        with draft.open("w") as file:
            file.writelines(line + "\n" for line, _ in kept)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)
        self.records = tuple(record for _, record in kept)
        self._file = self._path.open("a")

    def close(self) -> None:
        self._file.close()


def _read(path: Path) -> Iterator[tuple[str, Record]]:
    """The lines that are whole, and what they say; a run that was killed may leave a torn one."""
    for line in path.read_text(errors="replace").splitlines():
        try:
            fields: dict[str, Any] = json.loads(line)
            yield line, _KINDS[fields.pop("kind")](**fields)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue


def _is_before(record: Record, batch: int) -> bool:
    if isinstance(record, Replaced):
        return True
    return record.batch < batch if isinstance(record, Step) else record.batch <= batch
