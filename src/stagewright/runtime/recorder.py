"""Where a rank is, for whoever asks after its death, and what it did last, for the trace."""

from __future__ import annotations

import mmap
import struct
import time
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from stagewright.runtime.worker import Recorder
from stagewright.schedule.action import Action, Op

_OPS = tuple(Op)
_RECORD = struct.Struct("<6q2B")
_STATE_AT, _SETTLED_AT = _RECORD.size - 2, _RECORD.size - 1
_ABSENT = -1
_LANES = {Op.SEND_ACT: "transfer", Op.SEND_GRAD: "transfer", Op.REDUCE: "transfer"}


class State(IntEnum):
    """What a rank is busy with."""

    STARTING = 0
    WAITING = 1  # for what its action needs
    WORKING = 2
    BETWEEN = 3  # two actions: choosing the next one, where it may choose
    SAVING = 4


class FlightRecorder(Recorder):
    """Keeps the current action in a small file mapped into memory, and the last spans.

    The file outlives the process, so the supervisor can name the action at which a rank was killed; it counts actions,
    so the supervisor can see one that hangs.
    """

    def __init__(self, path: Path, spans: int = 4096) -> None:
        path.write_bytes(bytes(_RECORD.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size)
        self._spans: deque[tuple[Action, float, float]] = deque(maxlen=spans)
        self._ready = 0.0
        self._count = 0

    def begin(self, action: Action) -> None:
        op, _, stage, microbatch, version, peer = action
        self._count += 1
        _RECORD.pack_into(
            self._map,
            0,
            1 + _OPS.index(op),
            stage,
            _ABSENT if microbatch is None else microbatch,
            _ABSENT if version is None else version,
            _ABSENT if peer is None else peer,
            self._count,
            State.WAITING,
            self._map[_SETTLED_AT],
        )

    def ready(self, action: Action) -> None:
        self._map[_STATE_AT] = State.WORKING
        self._ready = time.monotonic()

    def end(self, action: Action) -> None:
        self._spans.append((action, self._ready, time.monotonic()))
        self._map[_STATE_AT] = State.BETWEEN
        if action.op is Op.UPDATE:
            self._map[_SETTLED_AT] = 1

    def save(self) -> None:
        """The rank writes what it leaves behind: that takes as long as it takes."""
        self._map[_STATE_AT] = State.SAVING

    def spans(self) -> list[tuple[str, str, str, float, float]]:
        """Lane, kind, name, start and end of the last actions; waiting is the gap between them."""
        return [
            (_LANES.get(action.op, "compute"), str(action.op), str(action), start, end)
            for action, start, end in self._spans
            if action.op not in (Op.RECV_ACT, Op.RECV_GRAD)
        ]


@dataclass(frozen=True, slots=True)
class Sight:
    """What a rank's file shows from outside."""

    action: Action | None = None
    count: int = 0  # of the actions begun
    state: State = State.STARTING
    is_settled: bool = False  # it has made its first update


def look(path: Path, rank: int) -> Sight:
    """Where a rank was when it last wrote to its file."""
    try:
        op, stage, *numbers, count, state, settled = _RECORD.unpack(path.read_bytes())
        state = State(state)
    except (OSError, struct.error, ValueError):
        return Sight()
    if not 0 < op <= len(_OPS):
        return Sight(None, count, state, bool(settled))
    microbatch, version, peer = (None if number == _ABSENT else number for number in numbers)
    return Sight(Action(_OPS[op - 1], rank, stage, microbatch, version, peer), count, state, bool(settled))


def last_action(path: Path, rank: int) -> Action | None:
    """The action that a rank was at when it last wrote to its file."""
    return look(path, rank).action
