"""The gate before each batch, closed while the ranks agree at which batch to pause.

side thread:  hold() ── sends the batch this rank has reached ──►  answers of all ranks  ──►  pause_at(batch)
main thread:  enters batch after batch; from hold() on it waits before the next one, until pause_at()
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from stagewright.runtime.job import NEVER


class Gate:
    """Admits a rank to one batch after another; as a `Pending`, it is complete while the gate is open."""

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._changed = threading.Condition()
        self._entered = 0  # microbatches: all those of the batches that this rank has begun
        self._held = NEVER  # the first microbatch that must wait for the agreement
        self.batch = self._pause = NEVER  # where to pause: the batch, and its first microbatch
        self.is_last_pause = False

    @property
    def entered(self) -> int:
        """The end of the batches that this rank has begun, in microbatches."""
        return self._entered

    @property
    def limit(self) -> int:
        """The first microbatch that is not trained before the next pause."""
        return self._pause

    @property
    def sure_limit(self) -> Callable[[], int] | None:
        """Tells at any time up to which microbatch a span will surely be trained; None: to its end, or at a pause."""
        return None

    def enter(self, microbatch: int) -> bool:
        """Begin the batch of a microbatch, if it is admitted; a batch that has begun always continues."""
        if microbatch < self._entered:
            return True
        with self._changed:
            if microbatch >= min(self._held, self.limit):
                return False
            self._entered = (microbatch // self._microbatches + 1) * self._microbatches
            return True

    def hold(self) -> int:
        """Admit no further batch until `pause_at`; returns the first batch that this rank has not begun."""
        with self._changed:
            self._held = self._entered
            return self._entered // self._microbatches

    def pause_at(self, batch: int, *, is_last: bool = False) -> None:
        """Open the gate up to a batch that no rank has begun, and pause there."""
        with self._changed:
            self.batch, self._pause, self.is_last_pause = batch, batch * self._microbatches, is_last
            self._held = NEVER
            self._changed.notify_all()

    def start_at(self, batch: int) -> None:
        """Start at this batch, since an earlier run has trained those before it."""
        self._entered = batch * self._microbatches

    def reopen(self) -> None:
        """End the pause."""
        with self._changed:
            self.batch = self._pause = NEVER

    def is_completed(self) -> bool:
        return self._held == NEVER

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(self.is_completed)


class Feed(Protocol):
    """The batches that a script trains on."""

    def has(self, batch: int) -> bool | None:
        """Whether there is such a batch; None: the script has not given it yet."""
        ...


class ScriptGate(Gate):
    """A gate that also waits for the batches of a script's loop, and closes where the loop ends."""

    def __init__(self, microbatches: int) -> None:
        super().__init__(microbatches)
        self.feed: Feed | None = None  # None: every batch is there
        self.end = NEVER  # the first microbatch that is not trained in this loop
        self.sure = 0  # the loop can't end before this microbatch, as long as there are batches
        self.missing: int | None = None  # a batch that had not been given when this rank last wanted to enter it

    @property
    def limit(self) -> int:
        return min(self._pause, self.end)

    @property
    def sure_limit(self) -> Callable[[], int] | None:
        return lambda: self._entered if self.feed is not None else max(self._entered, self.sure)

    def enter(self, microbatch: int) -> bool:
        self.missing = None
        if self.feed is not None and self._entered <= microbatch < self.limit:
            batch = microbatch // self._microbatches
            there = self.feed.has(batch)
            if there is False:
                self.end = min(self.end, batch * self._microbatches)
            self.missing = batch if there is None else None
            if not there:
                return False
        return super().enter(microbatch)

    def is_completed(self) -> bool:
        return super().is_completed() and self.missing is None
