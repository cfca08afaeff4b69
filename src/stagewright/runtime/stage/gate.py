"""Where a rank may go on to: anywhere, unless a pause is being agreed on.

side thread:  hold() ── tells the batch this rank has reached ──►  everyone's answers  ──►  settle(batch)
main thread:  enters batch after batch; from hold() on it waits before the next one, until settle()"""

from __future__ import annotations

import threading

from stagewright.runtime.job import NEVER


class Gate:
    """Lets a rank into one batch after another; as a thing under way, it is over when the rank need not wait."""

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._changed = threading.Condition()
        self._entered = 0  # microbatches: of every batch that this rank has begun
        self._held = NEVER  # the first microbatch that waits for an answer
        self.batch = self.limit = NEVER  # at which to pause, and its first microbatch
        self.is_last_pause = False

    def enter(self, microbatch: int) -> bool:
        """Begin a microbatch's batch, if that may be; one that has begun may always go on."""
        if microbatch < self._entered:
            return True
        with self._changed:
            if microbatch >= min(self._held, self.limit):
                return False
            self._entered = (microbatch // self._microbatches + 1) * self._microbatches
            return True

    def hold(self) -> int:
        """Let no further batch begin until `settle`; the first that this rank has not begun."""
        with self._changed:
            self._held = self._entered
            return self._entered // self._microbatches

    def settle(self, batch: int, *, is_last: bool = False) -> None:
        """Go on up to a batch that no rank has begun, and pause there."""
        with self._changed:
            self.batch, self.limit, self.is_last_pause = batch, batch * self._microbatches, is_last
            self._held = NEVER
            self._changed.notify_all()

    def start_at(self, batch: int) -> None:
        """The batches before this one have been trained by somebody else."""
        self._entered = batch * self._microbatches

    def reopen(self) -> None:
        """The pause is over."""
        with self._changed:
            self.batch = self.limit = NEVER

    def is_completed(self) -> bool:
        return self._held == NEVER

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(self.is_completed)
