"""The rank processes of one side: started once, they train in turns and sleep while another side trains."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import IO, Any

from stagewright.errors import UserError
from stagewright.hardware.meters import busy_seconds
from stagewright.runtime.process.children import Children

_START_SECONDS = 300.0
_CALL_SECONDS = 600.0
_LEAD_SECONDS = 0.05  # between the call and the common start
_EXIT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Where:
    """Where a rank runs: what its command begins with, and variables of its environment."""

    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: {"GLOO_SOCKET_IFNAME": "lo"})


HERE = Where()


@dataclass(frozen=True, slots=True)
class Segment:
    """One side's turn: the time from the common start to the last rank's last update."""

    seconds: float
    loss: float  # of the last batch
    others: float  # cores that other processes kept busy meanwhile
    cores: float = 0.0  # that the process with the most processor time kept busy
    results: tuple[Mapping[str, Any], ...] = ()  # of each rank


class Ranks:
    """The rank processes of one side; leaving the context ends them."""

    def __init__(self, name: str, runner: str, job: Path, folder: Path, places: Sequence[Where]) -> None:
        """`runner` is the class of a `process.Runner`, as module:Class."""
        folder.mkdir()
        self.name, self._folder = name, folder
        self._children = Children()
        self._results: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        self._ranks: list[subprocess.Popen[str]] = []
        self._trained = 0
        for rank, place in enumerate(places):
            module = [*place.command, sys.executable, "-m", "stagewright.bench.demo.process"]
            process = self._children.start(
                [*module, runner, str(job), str(rank), str(folder)],
                place.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=folder / f"{rank}.err",
            )
            threading.Thread(target=_read_results, args=(process.stdout, rank, self._results), daemon=True).start()
            self._ranks.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            with suppress(BrokenPipeError):
                rank.stdin.close()  # type: ignore[union-attr] # a rank ends by itself when its input does
        limit = time.monotonic() + _EXIT_SECONDS
        for rank in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, limit - time.monotonic()))
        self._children.stop()

    @property
    def first_process(self) -> int:
        return self._children.processes()[0]

    def wait_ready(self) -> None:
        self.wait(_START_SECONDS)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What a method of every rank's runner returns."""
        self.send(method, *arguments)
        return self.wait()

    def send(self, method: str, *arguments: Any) -> None:
        for rank in self._ranks:
            with suppress(BrokenPipeError):  # it died: the end of its output is its last result
                rank.stdin.write(json.dumps([method, arguments]) + "\n")  # type: ignore[union-attr]
                rank.stdin.flush()  # type: ignore[union-attr]

    def wait(self, timeout: float = _CALL_SECONDS) -> list[Any]:
        """Wait for the result of every rank."""
        limit = time.monotonic() + timeout
        found: list[Any] = []
        while len(found) < len(self._ranks):
            try:
                rank, result = self._results.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                raise UserError(f"{self.name}: a rank was not done within {timeout:g} s; give fewer --steps") from None
            if result is None:
                errors = (self._folder / f"{rank}.err").read_text(errors="replace").strip()
                last = (errors.splitlines() or ["no message"])[-1]
                raise UserError(f"{self.name} rank {rank} ended with code {self._ranks[rank].wait()}: {last}")
            found.append(json.loads(result))
        return found

    def begin(self, steps: int) -> float:
        """Make every rank train the next batches, from a common start time that is returned."""
        at = time.monotonic() + _LEAD_SECONDS
        self.send("timed", self._trained, steps, at)
        self._trained += steps
        return at

    def train(self, steps: int) -> Segment:
        """Train the next batches and time them."""
        at, busy = self.begin(steps), busy_seconds(with_stolen=True)
        results = self.wait()
        seconds = max(result["end"] for result in results) - at
        others = busy_seconds(with_stolen=True) - busy - sum(result["used"] for result in results)
        loss = fmean(result["loss"] for result in results if result["loss"] is not None)
        cores = max(result["used"] for result in results) / seconds
        return Segment(seconds, loss, max(0.0, others / (seconds + _LEAD_SECONDS)), cores, tuple(results))


def _read_results(lines: IO[str], rank: int, results: queue.SimpleQueue[tuple[int, str | None]]) -> None:
    """Pass on a rank's results, and None once its output ends."""
    for line in lines:
        results.put((rank, line))
    results.put((rank, None))
