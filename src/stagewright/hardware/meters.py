"""Meters for one moment: what the processes of ranks, the whole machine and its GPUs use right now.

`HostMeter` reads memory and processor time, `GpuMeter` what the driver counts and who else computes on the GPUs. The
monitor reads both at a fixed rate.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from stagewright.events import GpuUsage, RankUsage
from stagewright.hardware.gpu import Nvml

# Reasons for a lower clock, by NVML's bits; bit 0, an idle GPU, is not one.
_THROTTLE_REASONS = {
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal",
    0x040: "hardware thermal",
    0x080: "power brake",
    0x100: "display clocks",
}
MPS = "nvidia-cuda-mps"  # the server that lets our own ranks share a GPU
_MEMORY_AS_SMI = "nvmlMemory_v2"  # leaves out what the driver reserves
_HZ = 1e6  # per MHz
SHORTEST_WINDOW = 0.1  # seconds; the kernel counts processor time in hundredths


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of a rank, and the bytes that torch holds on its device, where known."""

    rank: int
    process: int
    torch_memory: int | None = None


class GpuMeter:
    """Reads some GPUs of this machine, again and again."""

    def __init__(self, nvml: Nvml, uuids: Collection[str], name_of: Callable[[int], str | None]) -> None:
        self._nvml = nvml
        self._name_of = name_of  # the name of a process; None where no process has that number
        named = ((index, handle, nvml.ask("nvmlDeviceGetUUID", handle)) for index, handle in enumerate(nvml.handles()))
        self._gpus = [(index, handle, uuid) for index, handle, uuid in named if uuid in uuids]

    def read(self, ours: Collection[int]) -> tuple[GpuUsage, ...]:
        """Every GPU now; `ours` are the processes of this run's ranks. This process, their supervisor, is ours too."""
        allowed = {os.getpid()} - set(ours)
        listed = [self._processes(handle, allowed) for _, handle, _ in self._gpus]
        seen = {process for processes in listed for process in processes}
        others = _count_other_processes(listed, ours, len(set(ours) - seen), self._name_of)
        return tuple(
            self._read(index, handle, uuid, foreign)
            for (index, handle, uuid), foreign in zip(self._gpus, others, strict=True)
        )

    def _read(self, index: int, handle: Any, uuid: str, foreign: int) -> GpuUsage:
        ask, scaled, constant = self._nvml.ask, self._nvml.scaled, self._nvml.constant
        rates = ask("nvmlDeviceGetUtilizationRates", handle)
        version = constant(_MEMORY_AS_SMI)
        memory = None if version is None else ask("nvmlDeviceGetMemoryInfo", handle, version)
        memory = memory or ask("nvmlDeviceGetMemoryInfo", handle)
        reasons = (ask(f"nvmlDeviceGetCurrentClocks{name}Reasons", handle) for name in ("Event", "Throttle"))
        return GpuUsage(
            uuid,
            index,
            None if memory is None else int(memory.used),
            None if rates is None else rates.gpu / 100,
            scaled(1e-3, "nvmlDeviceGetPowerUsage", handle),
            scaled(1e-3, "nvmlDeviceGetTotalEnergyConsumption", handle),
            scaled(1, "nvmlDeviceGetTemperature", handle, constant("NVML_TEMPERATURE_GPU")),
            scaled(_HZ, "nvmlDeviceGetClockInfo", handle, constant("NVML_CLOCK_SM")),
            reasons_of(next((int(bits) for bits in reasons if bits is not None), 0)),
            foreign,
        )

    def _processes(self, handle: Any, allowed: Collection[int]) -> list[int]:
        entries = self._nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
        return [int(entry.pid) for entry in entries if int(entry.pid) not in allowed]


class HostMeter:
    """Reads memory and processor time, and remembers the reading before."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}
        self._clocks: dict[int, _Clock] = {}
        self._machine = _Clock(busy_seconds())

    def read(self, ranks: Iterable[RankProcess]) -> tuple[float, int, tuple[RankUsage, ...]]:
        """Cores kept busy since the last reading and bytes in use, by the whole machine and by each rank."""
        memory = psutil.virtual_memory()
        usages = [usage for rank in ranks if (usage := self._rank(rank)) is not None]
        return self._machine.cores(busy_seconds()), memory.total - memory.available, tuple(usages)

    def _rank(self, rank: RankProcess) -> RankUsage | None:
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
        return RankUsage(rank.rank, memory, clock.cores(spent), rank.torch_memory)


def name_of(process: int) -> str | None:
    """The name of a process; None where this machine, or this container, has no process of that number."""
    try:
        return str(psutil.Process(process).name())
    except psutil.AccessDenied:
        return "not known"
    except (psutil.Error, OSError):
        return None


def busy_seconds(*, with_stolen: bool = False) -> float:
    """Processor seconds that everything on this machine has used since it was started.

    With `with_stolen`, also those that the hypervisor gave to other virtual machines.
    """
    times = psutil.cpu_times()
    names = ("nice", "irq", "softirq", *(["steal"] if with_stolen else []))
    return float(times.user + times.system + sum(getattr(times, name, 0.0) for name in names))


def reasons_of(bits: int) -> tuple[str, ...]:
    """The names of the reasons that lower a GPU's clock."""
    return tuple(reason for bit, reason in _THROTTLE_REASONS.items() if bits & bit)


def _count_other_processes(
    listed: list[list[int]], ours: Collection[int], unlisted: int, name_of: Callable[[int], str | None]
) -> Iterator[int]:
    """For each GPU, how many of its processes are not of this run.

    In a container the driver lists processes by the host's numbers. A process without a name here may be one of our
    ranks, so as many of those as there are ranks that no GPU lists are not counted.
    """
    for processes in listed:
        names = {process: name_of(process) for process in processes if process not in ours}
        known = sum(name is not None and not name.startswith(MPS) for name in names.values())
        nameless = sum(name is None for name in names.values())
        excused = min(nameless, unlisted)
        unlisted -= excused
        yield known + nameless - excused


class _Clock:
    """Cores kept busy between two moments, from the processor seconds used by each; moments too close count as one."""

    def __init__(self, spent: float) -> None:
        self._spent, self._at, self._cores = spent, time.monotonic(), 0.0

    def cores(self, spent: float) -> float:
        now = time.monotonic()
        if now - self._at >= SHORTEST_WINDOW:
            self._cores = max(spent - self._spent, 0.0) / (now - self._at)
            self._spent, self._at = spent, now
        return self._cores
