"""Where a rank is: the address that others reach it at, and who is on the same machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from stagewright.plan.plan import Plan

LOOPBACK = "127.0.0.1"
ADDRESS = "STAGEWRIGHT_ADDRESS"  # the environment variable that holds a rank's address


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's address, and the ranks beside it; None where all are."""

    address: str = LOOPBACK
    beside: frozenset[int] | None = None

    def is_beside(self, rank: int) -> bool:
        return self.beside is None or rank in self.beside

    @staticmethod
    def of(plan: Plan, rank: int) -> Place:
        """The place that this process was started for."""
        machine = plan.devices[rank].machine
        beside = frozenset(other for other, device in enumerate(plan.devices) if device.machine == machine)
        return Place(os.environ.get(ADDRESS, LOOPBACK), beside)
