"""The status file of a rank: 72 bytes that the rank maps into memory and updates with every action.

It outlives the process, so a supervisor can name the action at which a rank was killed; it counts actions, so a
watchdog can see one that hangs. `runtime.stage.recorder` writes it; supervisors, reports and the monitor read it.

offset  content
0       RECORD: op (0 for none), stage, microbatch, version, peer, actions begun, state, whether it has made an update
56      PROCESS: process id, and the bytes that torch holds on its device, or -1"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from stagewright.files import read_regular
from stagewright.schedule.action import Action, Op

OPS = tuple(Op)
RECORD = struct.Struct("<6q2B")
STATE_AT, UPDATED_AT = RECORD.size - 2, RECORD.size - 1
PROCESS = struct.Struct("<2q")
PROCESS_AT = 56
SIZE = PROCESS_AT + PROCESS.size
ABSENT = -1


class RankState(IntEnum):
    """What a rank is doing."""

    STARTING = 0
    WAITING = 1  # for the inputs of its action
    WORKING = 2
    BETWEEN = 3  # two actions: choosing the next one, where the schedule is dynamic
    SAVING = 4


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The first part of a status file."""

    action: Action | None = None
    count: int = 0  # of the actions begun
    state: RankState = RankState.STARTING
    has_updated: bool = False  # it has made its first update


def status_path(folder: Path, rank: int) -> Path:
    return folder / "ranks" / f"{rank}.at"


def read_status(path: Path, rank: int) -> RankStatus:
    """What a rank last wrote; the status of a rank that is starting where the file is missing or damaged."""
    try:
        op, stage, *numbers, count, state, has_updated = RECORD.unpack_from(read_regular(path))
        state = RankState(state)
    except (OSError, struct.error, ValueError):
        return RankStatus()
    if not 0 < op <= len(OPS):
        return RankStatus(None, count, state, bool(has_updated))
    microbatch, version, peer = (None if number == ABSENT else number for number in numbers)
    return RankStatus(Action(OPS[op - 1], rank, stage, microbatch, version, peer), count, state, bool(has_updated))


def last_action(path: Path, rank: int) -> Action | None:
    """The action that a rank began last."""
    return read_status(path, rank).action


def read_process(path: Path) -> tuple[int, int | None]:
    """A rank's process id and the bytes that torch holds on its device; 0 and None before it has started."""
    try:
        process, held = PROCESS.unpack_from(read_regular(path), PROCESS_AT)
    except (OSError, struct.error):
        return 0, None
    return process, None if held == ABSENT else held
