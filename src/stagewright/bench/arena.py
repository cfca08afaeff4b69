"""Where sides take turns: rank processes that are started once and sleep while another side runs."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import IO, Any

from stagewright.bench.suites import Side

_WORLD = 2
_START_SECONDS = 300.0
_SEGMENT_SECONDS = 600.0
_LEAD_SECONDS = 0.05  # from the command to the common start
_PATIENCE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Segment:
    """One side's turn: the time from the common start to the last rank's last update."""

    seconds: float
    loss: float  # of the last batch


class Ranks:
    """The living rank processes of one side."""

    def __init__(self, side: Side, job: Path, folder: Path) -> None:
        folder.mkdir()
        self._ranks = [_Process(side, job, rank, folder) for rank in range(_WORLD)]
        self._done = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self._ranks:
            rank.close()
        for rank in self._ranks:
            rank.end()

    def wait_ready(self) -> None:
        for rank in self._ranks:
            rank.hear("ready", _START_SECONDS)

    def train(self, steps: int) -> Segment:
        """Train the next batches."""
        at = time.monotonic() + _LEAD_SECONDS
        for rank in self._ranks:
            rank.tell({"first": self._done, "steps": steps, "at": at})
        self._done += steps
        events = [rank.hear("timed", _SEGMENT_SECONDS) for rank in self._ranks]
        losses = [event["loss"] for event in events if event["loss"] is not None]
        return Segment(max(event["end"] for event in events) - at, fmean(losses))


class _Process:
    """One rank's process and the lines between it and us."""

    def __init__(self, side: Side, job: Path, rank: int, folder: Path) -> None:
        self._name = f"{side.name} rank {rank}"
        self._errors = folder / f"{rank}.err"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stagewright.bench.rank", side.kind, str(job), str(rank), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                start_new_session=True,  # Ctrl-C reaches us alone; the ranks end when their input does
            )
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def tell(self, command: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ValueError(self._story()) from None

    def hear(self, kind: str, timeout: float) -> dict[str, Any]:
        """The next event of a kind; others are dropped."""
        limit = time.monotonic() + timeout
        while True:
            try:
                event = self._events.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                raise ValueError(f"{self._name} said nothing for {timeout:g} s; is the machine overloaded?") from None
            if event is None:
                raise ValueError(self._story())
            if event["kind"] == kind:
                return event

    def close(self) -> None:
        """End the process's input, which ends the process."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self) -> None:
        try:
            self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            self._events.put(json.loads(line))
        self._events.put(None)

    def _story(self) -> str:
        code = self._process.wait()
        said = self._errors.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        return f"{self._name} ended with code {code}: {said[-1]}"


def open_ranks(stack: ExitStack, jobs: Mapping[Side, Path], folder: Path) -> list[Ranks]:
    """Start every side's ranks at once, and wait until all are ready; the stack ends them."""
    started = [
        stack.enter_context(Ranks(side, job, folder / f"side-{number}"))
        for number, (side, job) in enumerate(jobs.items())
    ]
    for ranks in started:
        ranks.wait_ready()
    return started


def take_turns(sides: Sequence[Ranks], repeats: int, steps: int, tell: Callable[[str], None]) -> list[list[Segment]]:
    """Each side's segments, in the order A B A B ...; a first one of each does not count."""
    segments: list[list[Segment]] = [[] for _ in sides]
    for repeat in range(repeats + 1):
        tell(f"repeat {repeat} of {repeats}" if repeat else "warming up")
        for side, timed in zip(sides, segments, strict=True):
            timed.append(side.train(steps))
    return [timed[1:] for timed in segments]
