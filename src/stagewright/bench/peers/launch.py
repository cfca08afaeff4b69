"""The rank processes of each side: started once per case, they train in turns and sleep while another side trains.

Commands and events are JSON lines over the standard input and output of `peers.process`.
"""

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

from stagewright.bench.peers.cases import Side
from stagewright.hardware.meters import busy_seconds

Event = dict[str, Any]
_START_SECONDS = 300.0
_SEGMENT_SECONDS = 600.0
_LEAD_SECONDS = 0.05  # between the command and the common start
_EXIT_SECONDS = 2.0
_WARM_STEPS = 3


@dataclass(frozen=True, slots=True)
class Segment:
    """One side's turn: the time from the common start to the last rank's last update."""

    seconds: float
    loss: float  # of the last batch
    others: float  # cores that other processes kept busy meanwhile
    busiest: float | None = None  # share of the middle of the segment in which the busiest rank's GPU computed


class Ranks:
    """The rank processes of one side; leaving the context ends them."""

    def __init__(self, side: Side, job: Path, folder: Path, world: int) -> None:
        folder.mkdir()
        self.side = side
        self._events: queue.SimpleQueue[tuple[int, Event | None]] = queue.SimpleQueue()
        self._ranks = [_Process(side, job, rank, folder, self._events) for rank in range(world)]
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
        self._wait("ready", _START_SECONDS)

    def begin(self, steps: int) -> float:
        """Make every rank train the next batches, from a common start time that is returned."""
        at = time.monotonic() + _LEAD_SECONDS
        for rank in self._ranks:
            rank.send({"first": self._trained, "steps": steps, "at": at})
        self._trained += steps
        return at

    def wait_trained(self) -> list[Event]:
        return self._wait("timed", _SEGMENT_SECONDS)

    def train(self, steps: int) -> Segment:
        """Train the next batches and time them."""
        at = self.begin(steps)
        busy = busy_seconds(with_stolen=True)
        events = self.wait_trained()
        seconds = max(event["end"] for event in events) - at
        losses = [event["loss"] for event in events if event["loss"] is not None]
        others = busy_seconds(with_stolen=True) - busy - sum(event["used"] for event in events)
        busy_shares = [event["busy"] for event in events if event["busy"] is not None]
        busiest = max(busy_shares, default=None)
        return Segment(seconds, fmean(losses), max(0.0, others / (seconds + _LEAD_SECONDS)), busiest)

    def take_turn(self, steps: int, *, on_gpu: bool) -> Segment:
        """Train and time a segment; on a GPU warm up first, and give back memory that the next side may need."""
        if not on_gpu:
            return self.train(steps)
        self.train(_WARM_STEPS)
        segment = self.train(steps)
        for rank in self._ranks:
            rank.send({"rest": True})
        self._wait("rested", _SEGMENT_SECONDS)
        return segment

    def _wait(self, kind: str, timeout: float) -> list[Event]:
        """Wait for one event of a kind from every rank; events of other kinds are dropped."""
        limit = time.monotonic() + timeout
        events: list[Event] = []
        while len(events) < len(self._ranks):
            try:
                rank, event = self._events.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                raise ValueError(
                    f"{self.side.name}: a rank was not {kind} within {timeout:g} s; give fewer --steps"
                ) from None
            if event is None:
                raise ValueError(f"{self.side.name} rank {rank} {self._ranks[rank].fault()}")
            if event["kind"] == kind:
                events.append(event)
        return events


class _Process:
    """One rank's process: takes commands on its input and writes events to its output."""

    def __init__(
        self, side: Side, job: Path, rank: int, folder: Path, events: queue.SimpleQueue[tuple[int, Event | None]]
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
                start_new_session=True,  # Ctrl-C reaches only this process; a rank ends when its input does
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input = self._process.stdin
        threading.Thread(target=_read_events, args=(self._process.stdout, rank, events), daemon=True).start()

    def send(self, command: Event) -> None:
        with suppress(BrokenPipeError):  # it died: the end of its output is its last event
            self._input.write(json.dumps(command) + "\n")
            self._input.flush()

    def close(self) -> None:
        """End the process's input, which ends the process."""
        with suppress(BrokenPipeError):
            self._input.close()

    def end(self) -> None:
        """Wait for the process to end; kill it if it does not."""
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def fault(self) -> str:
        """How it ended, and the last line of its errors."""
        code = self._process.wait()
        said = self._errors.read_text(errors="replace").strip().splitlines() or ["no message"]
        return f"ended with code {code}: {said[-1]}"


def _read_events(lines: IO[str], rank: int, events: queue.SimpleQueue[tuple[int, Event | None]]) -> None:
    """Pass on a rank's events, and None once its output ends."""
    for line in lines:
        events.put((rank, json.loads(line)))
    events.put((rank, None))


def open_ranks(stack: ExitStack, jobs: Mapping[Side, Path], folder: Path, world: int) -> list[Ranks]:
    """Start the ranks of all sides at once and wait until they are ready; the stack ends them."""
    started = [
        stack.enter_context(Ranks(side, job, folder / f"side-{number}", world))
        for number, (side, job) in enumerate(jobs.items())
    ]
    for ranks in started:
        ranks.wait_ready()
    return started


def compile_together(sides: Sequence[Ranks]) -> None:
    """Train one batch on all sides at once, so that they compile at the same time."""
    for side in sides:
        side.begin(1)
    for side in sides:
        side.wait_trained()


def take_turns(
    turns: Sequence[Callable[[], Segment]], repeats: int, progress: Callable[[str], None]
) -> list[list[Segment]]:
    """The segments of each side, timed in the order A B A B ...; the first of each is a warm-up and does not count."""
    segments: list[list[Segment]] = [[] for _ in turns]
    for repeat in range(repeats + 1):
        progress(f"repeat {repeat} of {repeats}" if repeat else "warming up")
        for take_turn, timed in zip(turns, segments, strict=True):
            timed.append(take_turn())
    return [timed[1:] for timed in segments]
