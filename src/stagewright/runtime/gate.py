"""The gate before each batch: closed while the ranks agree where to pause, and where a script's loop ends or waits.

side thread:  hold() ── sends the batch this rank has reached ──►  answers of all ranks  ──►  pause_at(batch)
main thread:  enters batch after batch; from hold() on it waits before the next one, until pause_at()
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from stagewright.runtime.job import NEVER


class Feed(Protocol):
    """The batches that a script trains on."""

    def has(self, batch: int) -> bool | None:
        """Whether there is such a batch; None: the script has not given it yet."""
        ...


class Gate:
    """Admits a rank to one batch after another; as a `Pending`, it is complete while the gate is open."""

    def __init__(self, microbatches: int, ask: Callable[[], None] | None = None) -> None:
        """`ask` is called before a batch begins, and may ask for a pause."""
        self._microbatches = microbatches
        self._ask = ask
        self._changed = threading.Condition()
        self._held = NEVER  # the first microbatch that must wait for the agreement
        self.entered = 0  # microbatches: the end of the batches that this rank has begun
        self.batch = self._pause = NEVER  # where to pause: the batch, and its first microbatch
        self.is_last_pause = False
        self.feed: Feed | None = None  # of a script's loop; None: every batch is there
        self.end = NEVER  # the first microbatch that is not trained in this loop
        self.sure: int | None = None  # the loop can't end before this microbatch, as long as there are batches
        self.missing: int | None = None  # a batch that had not been given when this rank last wanted to enter it

    @property
    def limit(self) -> int:
        """The first microbatch that is not trained before the next pause, or in this loop."""
        return min(self._pause, self.end)

    @property
    def sure_limit(self) -> Callable[[], int] | None:
        """Tells at any time up to which microbatch a span will surely be trained; None: to its end, or at a pause."""
        if self.sure is None:
            return None
        return lambda: self.entered if self.feed is not None else max(self.entered, self.sure or 0)

    def enter(self, microbatch: int) -> bool:
        """Begin the batch of a microbatch, if it is admitted; a batch that has begun always continues."""
        if microbatch < self.entered:
            return True
        if self._ask is not None:
            self._ask()
        if not self._is_given(microbatch):
            return False
        with self._changed:
            if microbatch >= min(self._held, self.limit):
                return False
            self.entered = (microbatch // self._microbatches + 1) * self._microbatches
            return True

    def _is_given(self, microbatch: int) -> bool:
        """Whether the script has given the batch of a microbatch; where it has no more, the loop ends before it."""
        self.missing = None
        if self.feed is None or microbatch >= self.limit:
            return True
        batch = microbatch // self._microbatches
        is_there = self.feed.has(batch)
        if is_there is None:
            self.missing = batch
        elif not is_there:
            self.end = min(self.end, batch * self._microbatches)
        return bool(is_there)

    def hold(self) -> int:
        """Admit no further batch until `pause_at`; returns the first batch that this rank has not begun."""
        with self._changed:
            self._held = self.entered
            return self.entered // self._microbatches

    def pause_at(self, batch: int, *, is_last: bool = False) -> None:
        """Open the gate up to a batch that no rank has begun, and pause there."""
        with self._changed:
            self.batch, self._pause, self.is_last_pause = batch, batch * self._microbatches, is_last
            self._held = NEVER
            self._changed.notify_all()

    def start_at(self, batch: int) -> None:
        """Start at this batch, since an earlier run has trained those before it."""
        self.entered = batch * self._microbatches

    def reopen(self) -> None:
        """End the pause."""
        with self._changed:
            self.batch = self._pause = NEVER

    def is_completed(self) -> bool:
        return self._held == NEVER and self.missing is None

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(self.is_completed)
