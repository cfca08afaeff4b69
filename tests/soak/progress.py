"""How far a run is, from its metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.soak import check

_TAIL = 16384  # bytes of metrics.jsonl that surely hold a step


@dataclass(frozen=True, slots=True)
class Start:
    """A start of ranks, as the metrics show it: they are taken back to the batch that ranks start from."""

    before: int  # the most steps that had been there
    steps: int  # that are left


class Progress:
    """Reads how far a run is from its metrics."""

    def __init__(self, runs: Path) -> None:
        self.steps = 0  # in the metrics now
        self.most = 0  # ever
        self.starts: list[Start] = []
        self.most_partial = 0
        self._runs = runs
        self._inode = 0

    @property
    def run(self) -> Path | None:
        """Machine 0's run folder, once it exists."""
        return next((path.parent for path in self._runs.glob("machine-0/*/metrics.jsonl")), None)

    def poll(self) -> None:
        run = self.run
        if run is None:
            return
        with suppress(FileNotFoundError), (run / "metrics.jsonl").open("rb") as file:
            about = os.fstat(file.fileno())
            file.seek(max(0, about.st_size - _TAIL))
            self.steps = next((batch + 1 for batch in _step_batches(reversed(file.read().splitlines()))), 0)
            if about.st_ino != self._inode:
                self.starts.append(Start(self.most, self.steps))
                self._inode = about.st_ino
        self.most = max(self.most, self.steps)
        with suppress(OSError):
            names = (path.name for path in (run / "checkpoints").iterdir())
            self.most_partial = max(self.most_partial, check.count_partial(names))

    def has_checkpoint(self) -> bool:
        run = self.run
        return run is not None and any(run.glob("checkpoints/[0-9]*/manifest.json"))


def _step_batches(lines: Iterable[bytes]) -> Iterator[int]:
    for line in lines:
        with suppress(ValueError):  # the first may be half a line, and the last is being written
            record = json.loads(line)
            if record["kind"] == "step":
                yield record["batch"]


def read_losses(run: Path) -> check.Losses:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(record["batch"], record["loss"]) for record in records if record["kind"] == "step"]


def longest_gap(run: Path, first: int) -> float:
    """The longest time between two steps in a row, by the clock of the ranks, from step `first` - 1 on."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    moments = [r["seconds"] for r in records if r["kind"] == "step" and r["batch"] >= first - 1]
    return max((after - before for before, after in pairwise(moments)), default=0.0)
