"""The watchdog: finds ranks that hang, from their status files and from the kernel's view of their processes.

limit            applies to
10 s             a process that the kernel shows as stopped (SIGSTOP)
--timeout        an action that a rank works at; 1.5 times as long for one in which it waits for another rank, so that
                 the rank that keeps others waiting is named first
--start-timeout  the start (data index, connections, compilation) until every rank of this machine has made its first
                 update, and saving at the end"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stagewright.runtime.faults import HungRank, PausingClock
from stagewright.runtime.status_file import RankState, RankStatus, read_status, status_path

_STOPPED_SECONDS = 10.0
_WAITING_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a rank may go without progress."""

    timeout: float
    start: float

    def of(self, status: RankStatus, is_started: bool) -> float:
        if not is_started or status.state is RankState.SAVING:
            return self.start
        return self.timeout if status.state is RankState.WORKING else self.timeout * _WAITING_FACTOR


class Watchdog:
    """Watches the ranks of this machine during one start; call `find_hung` several times per second."""

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        is_stopped: Callable[[int], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._limits = limits
        self._is_stopped = is_stopped or _is_stopped
        self._clock = PausingClock(clock)
        self._seen: dict[int, tuple[RankStatus, float]] = {}  # a rank's status, and since when it has been the same
        self._running: dict[int, float] = {}  # when a process was last seen not to be stopped

    def find_hung(self, processes: Mapping[int, int]) -> HungRank | None:
        """The rank to blame, if one of these (rank to process id) hangs."""
        now = self._clock.tick()
        statuses = {rank: read_status(status_path(self._folder, rank), rank) for rank in processes}
        for rank, status in list(statuses.items()):
            before, _ = self._seen.get(rank, (status, now))
            if before.count and not status.count:  # somebody has deleted the file: it says nothing any more
                statuses[rank] = before
                self._seen[rank] = (before, now)
            elif rank not in self._seen or before != status:
                self._seen[rank] = (status, now)
            if rank not in self._running or not self._is_stopped(processes[rank]):
                self._running[rank] = now
        return self._stopped(statuses) or self._stuck(statuses)

    def _stopped(self, statuses: Mapping[int, RankStatus]) -> HungRank | None:
        limit = min(_STOPPED_SECONDS, self._limits.timeout)
        rank = min(statuses, key=lambda rank: self._running[rank])
        seconds = self._clock.now - self._running[rank]
        if seconds < limit:
            return None
        return HungRank.at(rank, statuses[rank].action, f"its process has been stopped for {seconds:.0f} s")

    def _stuck(self, statuses: Mapping[int, RankStatus]) -> HungRank | None:
        is_started = all(status.has_updated for status in statuses.values())
        late: list[tuple[bool, float, int]] = []
        for rank, status in statuses.items():
            since = self._seen[rank][1]
            if self._clock.now - since > self._limits.of(status, is_started):
                late.append((status.state is not RankState.WORKING, since, rank))
        if not late:
            return None
        waits, since, rank = min(late)  # a rank that works before those that wait, then the longest
        verb = "waited" if waits and is_started else "made no progress"
        option = "--timeout" if is_started and statuses[rank].state is not RankState.SAVING else "--start-timeout"
        cause = f"it has {verb} for {self._clock.now - since:.0f} s (see {option})"
        return HungRank.at(rank, statuses[rank].action, cause)


def _is_stopped(process: int) -> bool:
    """Whether the kernel shows a process as stopped; False on systems without /proc."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False
