"""Where a rank is, for whoever asks after its death, and what it did last, for the trace."""

from __future__ import annotations

import mmap
import struct
import time
from collections import deque
from pathlib import Path

from stagewright.runtime.worker import Recorder
from stagewright.schedule.action import Action, Op

_OPS = tuple(Op)
_RECORD = struct.Struct("<6q")
_ABSENT = -1
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
        self._ready = 0.0

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

    def ready(self, action: Action) -> None:
        self._ready = time.monotonic()

    def end(self, action: Action) -> None:
        self._spans.append((action, self._ready, time.monotonic()))

    def spans(self) -> list[tuple[str, str, str, float, float]]:
        """Lane, kind, name, start and end of the last actions; waiting is the gap between them."""
        return [
            (_LANES.get(action.op, "compute"), str(action.op), str(action), start, end)
            for action, start, end in self._spans
            if action.op not in (Op.RECV_ACT, Op.RECV_GRAD)
        ]


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
