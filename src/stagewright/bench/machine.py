"""What the figures are measured on, and who else is using it."""

from __future__ import annotations

import os
from pathlib import Path

from stagewright.machine.environment import environment
from stagewright.machine.host import num_cores

__all__ = ["busy_seconds", "machine", "num_cores"]

_IDLE = (3, 4)  # idle, and waiting for a disk
_GUEST = 8  # from here on counted twice


def machine() -> dict[str, str]:
    """The machine in a few words."""
    return environment().words()


def busy_seconds() -> float | None:
    """Processor time that everything on this machine has used so far, where the system tells."""
    try:
        first, *_ = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    ticks = [int(text) for text in first.split()[1 : 1 + _GUEST]]
    return sum(count for index, count in enumerate(ticks) if index not in _IDLE) / os.sysconf("SC_CLK_TCK")
