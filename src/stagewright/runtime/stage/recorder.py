"""Records what a rank does: its current action in the status file, and its last actions for the trace."""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from pathlib import Path

import torch

from stagewright.metrics import Span
from stagewright.runtime.comm.device import Device, Gpu, timed_event
from stagewright.runtime.status_file import (
    ABSENT,
    OPS,
    PROCESS,
    PROCESS_AT,
    RECORD,
    SIZE,
    STATE_AT,
    UPDATED_AT,
    RankState,
)
from stagewright.schedule.action import COMPUTES, RECEIVES, SENDS, SUMS, Action, Op

_MEMORY_SECONDS = 0.5  # between two readings of torch's memory
_SHORTEST_WAIT = 5e-5  # seconds; shorter ones would only fill the trace
_TRANSFER_LANE = (*SENDS, *SUMS)


class Recorder:
    """Called around every action; this default records nothing."""

    def begin(self, action: Action) -> None:
        """The worker has reached this action, and may have to wait for other ranks."""

    def ready(self, action: Action) -> None:
        """The wait is over, and the action starts."""

    def end(self, action: Action) -> None:
        """The action is done."""

    def save(self) -> None:
        """The worker starts to save its state."""


class FlightRecorder(Recorder):
    """Keeps the current action in the status file, which is mapped into memory, and the spans of the last actions.

    The file outlives the process, so the supervisor can name the action at which a rank was killed. It counts actions,
    so the supervisor can see that one hangs.
    """

    def __init__(self, path: Path, spans: int = 4096) -> None:
        path.write_bytes(bytes(PROCESS_AT) + PROCESS.pack(os.getpid(), ABSENT))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._spans: deque[tuple[Action, float, float]] = deque(maxlen=spans)
        self._waits: deque[tuple[Action, float, float]] = deque(maxlen=spans)
        self._begun = self._ready = 0.0
        self._count = 0

    def begin(self, action: Action) -> None:
        op, _, stage, microbatch, version, peer = action
        self._count += 1
        RECORD.pack_into(
            self._map,
            0,
            1 + OPS.index(op),
            stage,
            ABSENT if microbatch is None else microbatch,
            ABSENT if version is None else version,
            ABSENT if peer is None else peer,
            self._count,
            RankState.WAITING,
            self._map[UPDATED_AT],
        )
        self._begun = time.monotonic()

    def ready(self, action: Action) -> None:
        self._map[STATE_AT] = RankState.WORKING
        self._ready = time.monotonic()
        if self._ready - self._begun > _SHORTEST_WAIT:
            self._waits.append((action, self._begun, self._ready))

    def end(self, action: Action) -> None:
        self._spans.append((action, self._ready, time.monotonic()))
        self._finish(action)

    def _finish(self, action: Action) -> None:
        self._map[STATE_AT] = RankState.BETWEEN
        if action.op is Op.UPDATE:
            self._map[UPDATED_AT] = 1

    def save(self) -> None:
        """The rank writes its state; the watchdog allows --start-timeout for that."""
        self._map[STATE_AT] = RankState.SAVING

    def spans(self) -> tuple[Span, ...]:
        """The last actions, and the host's waits before them."""
        done = [
            _span("transfer" if action.op in _TRANSFER_LANE else "compute", action, start, end)
            for action, start, end in self._spans
            if action.op not in RECEIVES
        ]
        return (*done, *(_span("wait", *wait) for wait in self._waits))


class GpuRecorder(FlightRecorder):
    """Times computes by events on the GPU, since the host has issued them long before they end."""

    def __init__(self, path: Path, spans: int = 4096) -> None:
        super().__init__(path, spans)
        self._computes: deque[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=spans)
        self._began = timed_event()
        self._began.synchronize()
        self._origin = time.monotonic()
        self._event = self._began
        self._memory_read = 0.0

    def ready(self, action: Action) -> None:
        super().ready(action)
        if action.op in COMPUTES:
            self._event = timed_event()

    def end(self, action: Action) -> None:
        if action.op in COMPUTES:
            self._computes.append((action, self._event, timed_event()))
            self._finish(action)
        else:
            super().end(action)
        if action.op is Op.UPDATE and time.monotonic() - self._memory_read > _MEMORY_SECONDS:
            self._memory_read = time.monotonic()
            PROCESS.pack_into(self._map, PROCESS_AT, os.getpid(), torch.cuda.memory_reserved())

    def spans(self) -> tuple[Span, ...]:
        computes = (_span("compute", action, self._at(start), self._at(end)) for action, start, end in self._computes)
        return (*computes, *super().spans())

    def _at(self, event: torch.cuda.Event) -> float:
        event.synchronize()
        return float(self._origin + self._began.elapsed_time(event) / 1e3)


def _span(lane: str, action: Action, start: float, end: float) -> Span:
    return Span(action.rank, lane, str(action.op), str(action), start, end)


def make_recorder(path: Path, device: Device) -> FlightRecorder:
    """The recorder of a rank on that device."""
    return GpuRecorder(path) if isinstance(device, Gpu) else FlightRecorder(path)
