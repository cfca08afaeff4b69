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

from stagewright.bench.machine import busy_seconds
from stagewright.bench.peers.cases import Side

Event = dict[str, Any]
_START_SECONDS = 300.0
_SEGMENT_SECONDS = 600.0
_LEAD_SECONDS = 0.05  # from the command to the common start
_PATIENCE_SECONDS = 2.0
_WARM_STEPS = 3


@dataclass(frozen=True, slots=True)
class Segment:
    """One side's turn: the time from the common start to the last rank's last update."""

    seconds: float
    loss: float  # of the last batch
    others: float  # cores that other processes kept busy meanwhile; 0 where the system does not tell
    busiest: float | None = None  # share of the middle of the segment that the busiest rank's GPU work took


class Ranks:
    """The living rank processes of one side."""

    def __init__(self, side: Side, job: Path, folder: Path, world: int) -> None:
        folder.mkdir()
        self.side = side
        self._heard: queue.SimpleQueue[tuple[int, Event | None]] = queue.SimpleQueue()
        self._ranks = [_Process(side, job, rank, folder, self._heard) for rank in range(world)]
        self._trained = 0

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
        self._hear("ready", _START_SECONDS)

    def begin(self, steps: int) -> float:
        """Have every rank train the next batches from a common start on, which is soon."""
        at = time.monotonic() + _LEAD_SECONDS
        for rank in self._ranks:
            rank.tell({"first": self._trained, "steps": steps, "at": at})
        self._trained += steps
        return at

    def wait_trained(self) -> list[Event]:
        return self._hear("timed", _SEGMENT_SECONDS)

    def train(self, steps: int) -> Segment:
        """Train the next batches."""
        at = self.begin(steps)
        busy = busy_seconds()
        events = self.wait_trained()
        seconds = max(event["end"] for event in events) - at
        losses = [event["loss"] for event in events if event["loss"] is not None]
        others = 0.0 if busy is None else (busy_seconds() or 0.0) - busy - sum(event["used"] for event in events)
        busy_shares = [event["busy"] for event in events if event["busy"] is not None]
        busiest = max(busy_shares, default=None)
        return Segment(seconds, fmean(losses), max(0.0, others / (seconds + _LEAD_SECONDS)), busiest)

    def rest(self) -> None:
        """Give back memory that the next side may need."""
        for rank in self._ranks:
            rank.tell({"rest": True})
        self._hear("rested", _SEGMENT_SECONDS)

    def _hear(self, kind: str, timeout: float) -> list[Event]:
        """One event of a kind from every rank; other kinds are dropped."""
        limit = time.monotonic() + timeout
        events: list[Event] = []
        while len(events) < len(self._ranks):
            try:
                rank, event = self._heard.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                raise ValueError(
                    f"{self.side.name}: a rank was not {kind} after {timeout:g} s; give fewer --steps"
                ) from None
            if event is None:
                raise ValueError(f"{self.side.name} rank {rank} {self._ranks[rank].story()}")
            if event["kind"] == kind:
                events.append(event)
        return events


class _Process:
    """One rank's process: commands go to its input, events come from its output."""

    def __init__(
        self, side: Side, job: Path, rank: int, folder: Path, heard: queue.SimpleQueue[tuple[int, Event | None]]
    ) -> None:
        self._errors = folder / f"{rank}.err"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stagewright.bench.peers.process", side.kind, str(job), str(rank), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                start_new_session=True,  # Ctrl-C reaches us alone; a rank ends when its input does
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input = self._process.stdin
        threading.Thread(target=_listen, args=(self._process.stdout, rank, heard), daemon=True).start()

    def tell(self, command: Event) -> None:
        with suppress(BrokenPipeError):  # the end of its output tells of its death
            self._input.write(json.dumps(command) + "\n")
            self._input.flush()

    def close(self) -> None:
        """End the process's input, which ends the process."""
        with suppress(BrokenPipeError):
            self._input.close()

    def end(self) -> None:
        """Make sure that it is gone."""
        try:
            self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def story(self) -> str:
        """How it ended, and the last thing it said."""
        code = self._process.wait()
        said = self._errors.read_text(errors="replace").strip().splitlines() or ["no message"]
        return f"ended with code {code}: {said[-1]}"


def _listen(lines: IO[str], rank: int, heard: queue.SimpleQueue[tuple[int, Event | None]]) -> None:
    """Pass on a rank's events, and after the last one that it is gone."""
    for line in lines:
        heard.put((rank, json.loads(line)))
    heard.put((rank, None))


def open_ranks(stack: ExitStack, jobs: Mapping[Side, Path], folder: Path, world: int) -> list[Ranks]:
    """Start every side's ranks at once, and wait until all are ready; the stack ends them."""
    started = [
        stack.enter_context(Ranks(side, job, folder / f"side-{number}", world))
        for number, (side, job) in enumerate(jobs.items())
    ]
    for ranks in started:
        ranks.wait_ready()
    return started


def compile_together(sides: Sequence[Ranks]) -> None:
    """One batch of every side at once: compilers need cores, and would otherwise take turns."""
    for side in sides:
        side.begin(1)
    for side in sides:
        side.wait_trained()


@dataclass(frozen=True, slots=True)
class Turn:
    """One side's way to take a turn: on a GPU it warms up first, and gives memory back afterwards."""

    ranks: Ranks
    steps: int
    on_gpu: bool = False

    def take(self) -> Segment:
        if self.on_gpu:
            self.ranks.train(_WARM_STEPS)
        segment = self.ranks.train(self.steps)
        if self.on_gpu:
            self.ranks.rest()
        return segment


def take_turns(turns: Sequence[Turn], repeats: int, tell: Callable[[str], None]) -> list[list[Segment]]:
    """Each side's segments, in the order A B A B ...; a first one of each does not count."""
    segments: list[list[Segment]] = [[] for _ in turns]
    for repeat in range(repeats + 1):
        tell(f"repeat {repeat} of {repeats}" if repeat else "warming up")
        for turn, timed in zip(turns, segments, strict=True):
            timed.append(turn.take())
    return [timed[1:] for timed in segments]
