"""The interfaces that networks implement: pending operations, transports and collectives; and a rank's address."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stagewright.errors import first_line
from stagewright.plan.plan import Plan

LOOPBACK = "127.0.0.1"
ADDRESS = "STAGEWRIGHT_ADDRESS"  # the environment variable that holds a rank's address


_SOURCE_LINE = re.compile(r"\[\S+:\d+\]\s*")  # of gloo's code, which it puts before its messages


class LostPeer(RuntimeError):
    """Another rank is gone; its own failure, not this one, is the cause to report."""

    @staticmethod
    def because(error: RuntimeError) -> LostPeer:
        return LostPeer(_SOURCE_LINE.sub("", first_line(error)))


class Pending(Protocol):
    """An operation that has started."""

    def is_completed(self) -> bool: ...
    def wait(self) -> object: ...


class Transport(Protocol):
    """Moves whole buffers from one rank to another, in order, whatever they contain."""

    def send(self, buffer: Tensor) -> Pending: ...
    def receive(self, buffer: Tensor) -> Pending: ...


class Collective(Protocol):
    """Sums tensors in place over a fixed set of ranks; every member joins every sum in the same order."""

    def sum(self, tensor: Tensor) -> Pending: ...


class Done:
    """An operation that was complete from the start."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class AllOf:
    """Several pending operations as one."""

    def __init__(self, pendings: Sequence[Pending]) -> None:
        self._pendings = pendings

    def is_completed(self) -> bool:
        return all(pending.is_completed() for pending in self._pendings)

    def wait(self) -> None:
        for pending in self._pendings:
            pending.wait()


class Solo:
    """The collective of a single rank, whose sums are what it already holds."""

    def sum(self, tensor: Tensor) -> Pending:
        return Done()


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's address, and the ranks on its machine; None means that all ranks are."""

    address: str = LOOPBACK
    local: frozenset[int] | None = None

    def is_local(self, rank: int) -> bool:
        return self.local is None or rank in self.local

    @staticmethod
    def of(plan: Plan, rank: int) -> Place:
        """The place of a rank, whose address the supervisor passes in the environment."""
        machine = plan.devices[rank].machine
        local = frozenset(other for other, device in enumerate(plan.devices) if device.machine == machine)
        return Place(os.environ.get(ADDRESS, LOOPBACK), local)
