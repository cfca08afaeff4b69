"""Faults: what one rank or machine reports when something goes wrong, and the one sentence a person reads about it.

A supervisor observes `RankExit` and `HungRank` from outside; a rank sends a `Failure` before it exits.
`describe_fault` picks the one that caused the others."""

from __future__ import annotations

import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from stagewright.errors import RunFailed, UserError, first_line, printable, printable_lines
from stagewright.events import Failure, Shortage, SignedInt
from stagewright.metrics import GIB
from stagewright.plan.plan import Plan
from stagewright.runtime.status_file import last_action, status_path
from stagewright.schedule.action import Action

_LONGEST_TICK = 1.0  # seconds
_TAIL, _LONGEST_LINE = 4096, 200  # bytes of a file that are looked at, and characters of a line that are shown
_REQUESTED = re.compile(r"Tried to allocate ([0-9.]+ [KMG]iB)")
_FULL = "CUDA error: out of memory"  # of the driver, before torch asks for a tensor


class PausingClock:
    """Counts the seconds in which this process ran: time that it was stopped or suspended blames nobody else.

    `now` moves only in `tick`, by at most one second, so the process must tick more often than that.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = 0.0
        self._clock = clock
        self._read = clock()

    def tick(self) -> float:
        """Advance to the present; the new `now`."""
        read = self._clock()
        self.now += min(read - self._read, _LONGEST_TICK)
        self._read = read
        return self.now


@dataclass(frozen=True, slots=True)
class HungRank:
    """A rank that made no progress in time, and the action it stayed in."""

    rank: int
    action: str | None
    stage: int | None
    cause: str

    @staticmethod
    def at(rank: int, action: Action | None, cause: str) -> HungRank:
        return HungRank(rank, *_text_and_stage(action), cause)


@dataclass(frozen=True, slots=True)
class RankExit:
    """A rank process that ended with an error, and its last action."""

    rank: int
    code: SignedInt  # as subprocess reports it: negative for a signal
    action: str | None
    stage: int | None
    last_line: str = ""  # on its standard error

    @staticmethod
    def of(folder: Path, rank: int, code: int, errors: Path) -> RankExit:
        """`errors`: the file with what it wrote on its standard error."""
        action = last_action(status_path(folder, rank), rank)
        return RankExit(rank, code, *_text_and_stage(action), _last_line(errors))


def _last_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            lines = file.read(_TAIL).decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((printable(line.strip())[:_LONGEST_LINE] for line in reversed(lines) if line.strip()), "")


@dataclass(frozen=True, slots=True)
class Fault:
    """Why the ranks had to stop."""

    text: str
    is_final: bool = False  # a restart would fail in the same way
    is_raised: bool = False  # by code, which may raise it again; a signal or a lost machine may have any cause


def describe_fault(
    plan: Plan,
    failures: Sequence[Failure],
    exits: Sequence[RankExit],
    hung: Sequence[HungRank] = (),
    lost: Sequence[str] = (),
) -> Fault:
    """Which rank failed first, at which action, and why; `lost` has one sentence per machine that is out of reach.

    In order: an error of the user's, a killed rank, any other error, a hung rank, a lost machine, and last a rank that
    only lost its peer. A killed rank comes before other errors because those may be how its peers noticed.
    """
    primary = [failure for failure in failures if not failure.is_secondary]
    killed = sorted((ended for ended in exits if ended.code < 0), key=lambda ended: ended.rank)
    users = [failure for failure in primary if failure.is_users]
    if users or (primary and not killed):
        first = (users or primary)[0]
        if first.is_users and first.action is None:
            return Fault(first.cause.removeprefix(f"{first.error}: "), is_final=True)
        return Fault(_told(plan, first, "failed", f": {first.cause}"), first.is_users, is_raised=True)
    if killed:
        return Fault(_told(plan, killed[0], f"was killed by {_signal_name(-killed[0].code)}"))
    if hung:
        return Fault(_told(plan, hung[0], "hangs", f": {hung[0].cause}"))
    if lost:
        return Fault(lost[0])
    silent = [ended for ended in exits if ended.rank not in {failure.rank for failure in failures}]
    if silent:  # its peers noticed, and say so
        line = silent[0].last_line
        said = f"; its last line: {line}" if line else " without an error message"
        return Fault(_told(plan, silent[0], f"exited with code {silent[0].code}", said), is_raised=True)
    if failures:
        return Fault(f"{plan.name_replica(failures[0].rank)} failed: {failures[0].cause}")
    return Fault("a rank exited without an error message")


def _told(plan: Plan, seen: Failure | RankExit | HungRank, what: str, why: str = "") -> str:
    return f"{plan.name_replica(seen.rank, seen.stage)} {what} at {seen.action or 'start'}{why}"


def log_fault(folder: Path, fault: Fault, failures: Sequence[Failure]) -> bool:
    """Append the fault and the traceback of every rank, also of those that only lost a peer, to the run's log."""
    tracebacks = (f"rank {failure.rank}:\n{failure.traceback}\n" for failure in failures)
    return append_log(folder, f"{printable(fault.text)}\n{''.join(tracebacks)}")


def append_log(folder: Path, text: str) -> bool:
    """Append lines to the run's log, all of them or none; whether the disk had room for them.

    They are without control characters: the log may be shown on a terminal.
    """
    content = printable_lines(text).encode()
    with suppress(OSError), (folder / "log.txt").open("ab", buffering=0) as log:
        size = log.tell()
        if log.write(content) == len(content):
            return True
        log.truncate(size)
    return False


@contextmanager
def traceback_in_log(folder: Path) -> Iterator[None]:
    """Append the traceback of an exception that is nobody's mistake but ours to the run's log."""
    try:
        yield
    except (UserError, RunFailed):
        raise
    except Exception:
        append_log(folder, traceback.format_exc())
        raise


def describe_shortage(error: torch.OutOfMemoryError, samples: int) -> str:
    """How much GPU memory an allocation asked for, and how much was free."""
    requested = _REQUESTED.search(str(error))
    free, total = torch.cuda.mem_get_info()
    return (
        f"out of GPU memory with microbatches of {samples} samples: {requested[1] if requested else 'something'} more "
        f"needed, {free / GIB:.2f} GiB free of {total / GIB:.1f}"
    )


def shortage_of(rank: int) -> Shortage:
    """The bytes that this rank could have had: those it holds and those that are free."""
    return Shortage(rank, torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())


def failure_of(
    rank: int, action: Action | None, error: BaseException, samples: int, *, is_secondary: bool = False
) -> Failure:
    """The exception that ended a rank; a microbatch has `samples` samples."""
    name, is_full = type(error).__name__, isinstance(error, RuntimeError) and _FULL in str(error)
    if isinstance(error, torch.OutOfMemoryError):
        cause = describe_shortage(error, samples)
    elif is_full:
        cause = f"the GPU of rank {rank} is already full ({_FULL}); nvidia-smi shows what holds it"
    else:
        cause = f"{name}: {first_line(error)}"
    return Failure(
        rank,
        name,
        cause,
        *_text_and_stage(action),
        is_secondary=is_secondary,
        is_users=is_full or isinstance(error, UserError | torch.OutOfMemoryError),
        traceback="".join(traceback.format_exception(error)),
    )


def _text_and_stage(action: Action | None) -> tuple[str | None, int | None]:
    return (None, None) if action is None else (str(action), action.stage)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
