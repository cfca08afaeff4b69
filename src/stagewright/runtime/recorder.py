"""Where a rank is, for whoever asks after its death, and what it did last, for the trace."""

from __future__ import annotations

import mmap
import struct
import time
from collections import deque
from pathlib import Path

import torch

from stagewright.runtime.device import Device
from stagewright.runtime.worker import Recorder
from stagewright.schedule.action import Action, Op

_OPS = tuple(Op)
_RECORD = struct.Struct("<6q")
_ABSENT = -1
_SHORTEST_WAIT = 5e-5  # seconds; shorter ones would only fill the trace
_COMPUTES = (Op.FORWARD, Op.BACKWARD, Op.UPDATE)
_LANES = {Op.SEND_ACT: "transfer", Op.SEND_GRAD: "transfer", Op.REDUCE: "transfer"}


class FlightRecorder(Recorder):
    """Keeps the current action in a small file mapped into memory, and the last spans.

    The file outlives the process, so the supervisor can name the action at which a rank was killed.
    """

    def __init__(self, path: Path, spans: int = 4096) -> None:
        path.write_bytes(bytes(_RECORD.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size)
        self._spans: deque[tuple[Action, float, float]] = deque(maxlen=spans)
        self._waits: deque[tuple[Action, float, float]] = deque(maxlen=spans)
        self._begun = self._ready = 0.0

    def begin(self, action: Action) -> None:
        op, _, stage, microbatch, version, peer = action
        _RECORD.pack_into(
            self._map,
            0,
            1 + _OPS.index(op),
            stage,
            _ABSENT if microbatch is None else microbatch,
            _ABSENT if version is None else version,
            _ABSENT if peer is None else peer,
            0,
        )
        self._begun = time.monotonic()

    def ready(self, action: Action) -> None:
        self._ready = time.monotonic()
        if self._ready - self._begun > _SHORTEST_WAIT:
            self._waits.append((action, self._begun, self._ready))

    def end(self, action: Action) -> None:
        self._spans.append((action, self._ready, time.monotonic()))

    def spans(self) -> list[tuple[str, str, str, float, float]]:
        """Lane, kind, name, start and end of the last actions, and of the times that the host waited before one."""
        done = [
            (_LANES.get(action.op, "compute"), str(action.op), str(action), start, end)
            for action, start, end in self._spans
            if action.op not in (Op.RECV_ACT, Op.RECV_GRAD)
        ]
        waits = [("wait", str(action.op), str(action), start, end) for action, start, end in self._waits]
        return done + waits


class GpuRecorder(FlightRecorder):
    """Times computes by events on the GPU's own clock: the host is done long before."""

    def __init__(self, path: Path, spans: int = 4096) -> None:
        super().__init__(path, spans)
        self._computes: deque[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=spans)
        self._began = _timed()
        self._began.synchronize()
        self._origin = time.monotonic()
        self._event = self._began

    def ready(self, action: Action) -> None:
        super().ready(action)
        if action.op in _COMPUTES:
            self._event = _timed()

    def end(self, action: Action) -> None:
        if action.op in _COMPUTES:
            self._computes.append((action, self._event, _timed()))
        else:
            super().end(action)

    def spans(self) -> list[tuple[str, str, str, float, float]]:
        computes = [
            ("compute", str(action.op), str(action), self._at(start), self._at(end))
            for action, start, end in self._computes
        ]
        return computes + super().spans()

    def _at(self, event: torch.cuda.Event) -> float:
        event.synchronize()
        return float(self._origin + self._began.elapsed_time(event) / 1e3)


def _timed() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def make_recorder(path: Path, device: Device) -> FlightRecorder:
    """What keeps a rank's actions."""
    return FlightRecorder(path) if device.device.type == "cpu" else GpuRecorder(path)


def last_action(path: Path, rank: int) -> Action | None:
    """The action that a rank was at when it last wrote to its file."""
    try:
        op, stage, *numbers, _ = _RECORD.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    if not op:
        return None
    microbatch, version, peer = (None if number == _ABSENT else number for number in numbers)
    return Action(_OPS[op - 1], rank, stage, microbatch, version, peer)
