"""What is under way: the words that channels, collectives and devices have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


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


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
