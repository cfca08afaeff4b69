"""Sees ranks that hang: a process that is stopped, an action that does not end, a message that does not come.

limit            applies to
10 s             a process that the kernel shows as stopped (SIGSTOP)
--timeout        an action that a rank works at; half as long again for one that it waits in, so that the rank that
                 others wait for is named first
--start-timeout  the start (data index, connections, compilation) until every rank here has made its first update,
                 and saving at the end What happened, in one message: which rank, where, at what action, and why. A GPU without memory to spare: what was asked of it, and what this rank could have had."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stagewright.plan.plan import Plan
from stagewright.runtime.status_file import last_action, status_path
from stagewright.schedule.action import Action


@dataclass(frozen=True, slots=True)
class HungRank:
    """A rank that made no progress in time, and what it was at."""

    rank: int
    action: str | None
    stage: int | None
    cause: str

    @staticmethod
    def at(rank: int, action: Action | None, cause: str) -> HungRank:
        return HungRank(rank, None if action is None else str(action), None if action is None else action.stage, cause)


@dataclass(frozen=True, slots=True)
class RankExit:
    """A rank process that ended, and the action that it was at."""

    rank: int
    code: int  # as subprocess gives it: negative for a signal
    action: str | None
    stage: int | None

    @staticmethod
    def of(folder: Path, rank: int, code: int) -> RankExit:
        action = last_action(status_path(folder, rank), rank)
        return RankExit(rank, code, None if action is None else str(action), None if action is None else action.stage)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why the ranks had to stop."""

    text: str
    is_final: bool  # what it is will not go away by trying again


def describe_fault(
    plan: Plan,
    failures: Sequence[Mapping[str, Any]],
    exits: Sequence[RankExit],
    hung: Sequence[HungRank] = (),
    lost: Sequence[str] = (),
) -> Fault:
    """Who failed first, where, at what, and why."""
    primary = [failure for failure in failures if not failure["is_secondary"]]
    killed = sorted((exit for exit in exits if exit.code < 0), key=lambda exit: exit.rank)
    users = [failure for failure in primary if failure["is_users"]]
    if users or (primary and not killed):  # losing a rank that was killed may also look like an error of another rank
        return _raised(plan, (users or primary)[0])
    if killed:
        exit = killed[0]
        name = _signal_name(-exit.code)
        return Fault(f"{plan.name_replica(exit.rank, exit.stage)} was killed by {name} at {_at(exit.action)}", False)
    if hung:
        name = plan.name_replica(hung[0].rank, hung[0].stage)
        return Fault(f"{name} hangs at {_at(hung[0].action)}: {hung[0].cause}", False)
    if lost:
        return Fault(lost[0], False)
    if failures:
        failure = failures[0]
        return Fault(f"{plan.name_replica(failure['rank'])} failed: {failure['cause']}", False)
    for exit in exits:
        name = plan.name_replica(exit.rank, exit.stage)
        return Fault(f"{name} ended with code {exit.code} at {_at(exit.action)}, without a word", False)
    return Fault("a rank ended without a word", False)


def _raised(plan: Plan, failure: Mapping[str, Any]) -> Fault:
    is_users = bool(failure["is_users"])
    if is_users and failure["action"] is None:
        return Fault(str(failure["cause"]).partition(": ")[2], is_final=True)
    action, stage = failure["action"] or (None, None)
    return Fault(f"{plan.name_replica(failure['rank'], stage)} failed at {_at(action)}: {failure['cause']}", is_users)


def _at(action: str | None) -> str:
    return "start" if action is None else action


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def log_fault(folder: Path, fault: Fault, failures: Sequence[Mapping[str, Any]]) -> None:
    """Keep every rank's own account, the secondary ones as well, in the run's log."""
    with (folder / "log.txt").open("a") as log:
        log.write(f"{fault.text}\n")
        for failure in failures:
            log.write(f"rank {failure['rank']}:\n{failure['traceback']}\n")


GIB = 2**30
_ASKED = re.compile(r"Tried to allocate ([0-9.]+ [KMG]iB)")


def describe_shortage(error: torch.OutOfMemoryError, samples: int) -> str:
    """The numbers of an allocation that failed."""
    asked = _ASKED.search(str(error))
    free, total = torch.cuda.mem_get_info()
    return (
        f"out of GPU memory with microbatches of {samples} samples: {asked[1] if asked else 'something'} more needed, "
        f"{free / GIB:.2f} GiB free of {total / GIB:.1f}"
    )


def shortage_event(rank: int) -> dict[str, Any]:
    """What the rank holds and what is free: all that it could have had."""
    return {"kind": "shortage", "rank": rank, "room": torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()}
