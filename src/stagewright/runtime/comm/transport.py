"""What is under way: the words that channels, collectives and devices have in common. Sums a stage's gradient over its replicas, in buckets, each under way as soon as backward has filled it. Where a rank is: the address that others reach it at, and who is on the same machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stagewright.plan.plan import Plan


class LostPeer(RuntimeError):
    """Another rank is gone: its own story is the one to tell."""


class Pending(Protocol):
    """Something under way."""

    def is_completed(self) -> bool: ...
    def wait(self) -> object: ...


class Transport(Protocol):
    """Moves whole buffers from one rank to another, in order; knows nothing of what is in them."""

    def send(self, buffer: Tensor) -> Pending: ...
    def receive(self, buffer: Tensor) -> Pending: ...


class Done:
    """Nothing to wait for."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class AllOf:
    """Several things under way, as one."""

    def __init__(self, pendings: Sequence[Pending]) -> None:
        self._pendings = pendings

    def is_completed(self) -> bool:
        return all(pending.is_completed() for pending in self._pendings)

    def wait(self) -> None:
        for pending in self._pendings:
            pending.wait()


class Collective(Protocol):
    """Sums tensors in place over a fixed set of ranks; every member joins every sum in the same order."""

    def sum(self, tensor: Tensor) -> Pending: ...


class Alone:
    """The collective of one rank."""

    def sum(self, tensor: Tensor) -> Pending:
        return Done()


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
