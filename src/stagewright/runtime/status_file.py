"""The small file that each rank keeps, as others read it: where it is, and which process it is."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from stagewright.schedule.action import Action, Op

OPS = tuple(Op)
RECORD = struct.Struct("<6q2B")
STATE_AT, UPDATED_AT = RECORD.size - 2, RECORD.size - 1
PROCESS = struct.Struct("<2q")  # its number, and the bytes that torch holds on its device, or -1
PROCESS_AT = 56
SIZE = PROCESS_AT + PROCESS.size
ABSENT = -1


class State(IntEnum):
    """What a rank is busy with."""

    STARTING = 0
    WAITING = 1  # for what its action needs
    WORKING = 2
    BETWEEN = 3  # two actions: choosing the next one, where it may choose
    SAVING = 4


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank's file shows from outside."""

    action: Action | None = None
    count: int = 0  # of the actions begun
    state: State = State.STARTING
    has_updated: bool = False  # it has made its first update


def status_path(folder: Path, rank: int) -> Path:
    return folder / "ranks" / f"{rank}.at"


def read_status(path: Path, rank: int) -> RankStatus:
    """Where a rank was when it last wrote to its file."""
    try:
        op, stage, *numbers, count, state, settled = RECORD.unpack_from(path.read_bytes())
        state = State(state)
    except (OSError, struct.error, ValueError):
        return RankStatus()
    if not 0 < op <= len(OPS):
        return RankStatus(None, count, state, bool(settled))
    microbatch, version, peer = (None if number == ABSENT else number for number in numbers)
    return RankStatus(Action(OPS[op - 1], rank, stage, microbatch, version, peer), count, state, bool(settled))


def last_action(path: Path, rank: int) -> Action | None:
    """The action that a rank was at when it last wrote to its file."""
    return read_status(path, rank).action


def read_process(path: Path) -> tuple[int, int | None]:
    """The process of a rank and the bytes that torch holds on its device; 0 and None before it has begun."""
    try:
        process, held = PROCESS.unpack_from(path.read_bytes(), PROCESS_AT)
    except (OSError, struct.error):
        return 0, None
    return process, None if held == ABSENT else held
