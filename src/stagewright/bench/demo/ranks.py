"""The rank processes of each side: started once per case, they train in turns and sleep while another side trains.

Commands and events are JSON lines over the standard input and output of `process`.
"""

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
from typing import IO, Any, Protocol

from stagewright.errors import UserError
from stagewright.hardware.meters import busy_seconds
from stagewright.runtime.process.children import Children

Event = dict[str, Any]
_START_SECONDS = 300.0
_SEGMENT_SECONDS = 600.0
_LEAD_SECONDS = 0.05  # between the command and the common start
_EXIT_SECONDS = 2.0
_WARM_STEPS = 3


@dataclass(frozen=True, slots=True)
class Where:
    """Where a rank runs: what its command begins with, and variables of its environment."""

    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: {"GLOO_SOCKET_IFNAME": "lo"})


HERE = Where()


class Side(Protocol):
    """One way to train."""

    @property
    def name(self) -> str: ...

    @property
    def runner(self) -> str:
        """The class of `process.Runner` that trains a rank, as module:Class."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """One side's turn: the time from the common start to the last rank's last update."""

    seconds: float
    loss: float  # of the last batch
    others: float  # cores that other processes kept busy meanwhile
    busiest: float | None = None  # share of the middle of the segment in which the busiest rank's GPU computed
    cores: float | None = None  # that the process with the most processor time kept busy


class Ranks:
    """The rank processes of one side; leaving the context ends them."""

    def __init__(self, side: Side, job: Path, folder: Path, places: Sequence[Where]) -> None:
        folder.mkdir()
        self.side = side
        self._folder = folder
        self._children = Children()
        self._events: queue.SimpleQueue[tuple[int, Event | None]] = queue.SimpleQueue()
        self._ranks = [self._start(job, rank, place) for rank, place in enumerate(places)]
        self._trained = 0

    def _start(self, job: Path, rank: int, place: Where) -> subprocess.Popen[str]:
        module = [*place.command, sys.executable, "-m", "stagewright.bench.demo.process"]
        process = self._children.start(
            [*module, self.side.runner, str(job), str(rank), str(self._folder)],
            place.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._folder / f"{rank}.err",
        )
        threading.Thread(target=_read_events, args=(process.stdout, rank, self._events), daemon=True).start()
        return process

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

    def _send(self, command: Event) -> None:
        for rank in self._ranks:
            with suppress(BrokenPipeError):  # it died: the end of its output is its last event
                rank.stdin.write(json.dumps(command) + "\n")  # type: ignore[union-attr]
                rank.stdin.flush()  # type: ignore[union-attr]

    def wait_ready(self) -> None:
        self._wait("ready", _START_SECONDS)

    def begin(self, steps: int) -> float:
        """Make every rank train the next batches, from a common start time that is returned."""
        at = time.monotonic() + _LEAD_SECONDS
        self._send({"first": self._trained, "steps": steps, "at": at})
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
        cores = max(event["used"] for event in events) / seconds
        return Segment(seconds, fmean(losses), max(0.0, others / (seconds + _LEAD_SECONDS)), busiest, cores)

    def save(self, folder: Path) -> None:
        """Make every rank write its weights (`RANK.safetensors`) and the spans of its last actions (`RANK.json`)."""
        self._send({"save": str(folder)})
        self._wait("saved", _SEGMENT_SECONDS)

    def processes(self) -> list[int]:
        return self._children.processes()

    def take_turn(self, steps: int, *, on_gpu: bool) -> Segment:
        """Train and time a segment; on a GPU warm up first, and give back memory that the next side may need."""
        if not on_gpu:
            return self.train(steps)
        self.train(_WARM_STEPS)
        segment = self.train(steps)
        self._send({"rest": True})
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
                raise UserError(
                    f"{self.side.name}: a rank was not {kind} within {timeout:g} s; give fewer --steps"
                ) from None
            if event is None:
                raise UserError(f"{self.side.name} rank {rank} {self._fault(rank)}")
            if event["kind"] == kind:
                events.append(event)
        return events

    def _fault(self, rank: int) -> str:
        """How a rank ended, and the last line of its errors."""
        said = (self._folder / f"{rank}.err").read_text(errors="replace").strip().splitlines() or ["no message"]
        return f"ended with code {self._ranks[rank].wait()}: {said[-1]}"


def _read_events(lines: IO[str], rank: int, events: queue.SimpleQueue[tuple[int, Event | None]]) -> None:
    """Pass on a rank's events, and None once its output ends."""
    for line in lines:
        events.put((rank, json.loads(line)))
    events.put((rank, None))
