"""Processes and the whole machine at a moment."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from stagewright.metrics import RankUse

_SHORTEST = 0.1  # seconds; the kernel counts in hundredths


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of a rank, and what torch holds on its device, where it says."""

    rank: int
    process: int
    torch_memory: int | None = None


class _Clock:
    """Cores kept busy, from processor seconds at two moments that are far enough apart to tell."""

    def __init__(self, spent: float) -> None:
        self._spent, self._at, self._cores = spent, time.monotonic(), 0.0

    def cores(self, spent: float) -> float:
        now = time.monotonic()
        if now - self._at >= _SHORTEST:
            self._cores = max(spent - self._spent, 0.0) / (now - self._at)
            self._spent, self._at = spent, now
        return self._cores


class HostMeter:
    """Looks at memory and at processor time, and remembers the look before."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}
        self._clocks: dict[int, _Clock] = {}
        self._machine = _Clock(_busy_seconds())

    def read(self, ranks: Iterable[RankProcess]) -> tuple[float, int, tuple[RankUse, ...]]:
        """Cores that everything kept busy since the last look, bytes that it uses, and the same of each rank."""
        memory = psutil.virtual_memory()
        uses = [use for rank in ranks if (use := self._rank(rank)) is not None]
        return self._machine.cores(_busy_seconds()), memory.total - memory.available, tuple(uses)

    def _rank(self, rank: RankProcess) -> RankUse | None:
        try:
            known = self._known.get(rank.process)
            if known is None:
                known = self._known[rank.process] = psutil.Process(rank.process)
            times, memory = known.cpu_times(), known.memory_info().rss
        except (psutil.Error, OSError):
            self._known.pop(rank.process, None)  # it has ended
            return None
        spent = times.user + times.system
        clock = self._clocks.setdefault(rank.process, _Clock(spent))
        return RankUse(rank.rank, memory, clock.cores(spent), rank.torch_memory)


def name_of(process: int) -> str | None:
    """A process's name; None where this machine, or this container, has none of that number."""
    try:
        return str(psutil.Process(process).name())
    except psutil.AccessDenied:
        return "not known"
    except (psutil.Error, OSError):
        return None


def _busy_seconds() -> float:
    """Processor time that everything on this machine has used so far."""
    times = psutil.cpu_times()
    return float(times.user + times.system + sum(getattr(times, name, 0.0) for name in ("nice", "irq", "softirq")))
