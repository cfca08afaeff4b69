"""What the figures are measured on, and who else is using it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

_IDLE = (3, 4)  # idle, and waiting for a disk
_GUEST = 8  # from here on counted twice


def machine() -> dict[str, str]:
    """The machine in a few words."""
    return {
        "cpu": _cpu(),
        "cores": f"{num_cores()} cores",
        "torch": f"torch {version('torch')}",
        "python": f"Python {platform.python_version()}",
    }


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_seconds() -> float | None:
    """Processor time that everything on this machine has used so far, where the system tells."""
    try:
        first, *_ = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    ticks = [int(text) for text in first.split()[1 : 1 + _GUEST]]
    return sum(count for index, count in enumerate(ticks) if index not in _IDLE) / os.sysconf("SC_CLK_TCK")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
