"""Unplanned pauses: ranks agree on a batch at which to save, every t minutes or when the run is asked to stop.

    rank 0 asks ──► every rank holds and posts the first batch it has not begun ──► all pause at the largest of them

Training is not affected until rank 0 asks: a thread per rank polls the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from torch.distributed import PrefixStore, Store

from stagewright.plan.plan import Plan
from stagewright.runtime.gate import Gate
from stagewright.runtime.job import NEVER

STOP = "stop"
_CHECKPOINT = "checkpoint"
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 0.005


def pause_batch(plan: Plan, reached: Iterable[int]) -> int:
    """The first batch at which all can pause, given the first one that each rank has not begun."""
    return -(-max(reached) // plan.pause_step) * plan.pause_step


class Pauses:
    """A rank's thread that waits for requests and agrees on a batch with the other ranks."""

    def __init__(self, store: Store, rank: int, plan: Plan, gate: Gate, minutes: float) -> None:
        self._control = store
        self._store = PrefixStore("pause", store)
        self._rank = rank
        self._plan = plan
        self._gate = gate
        self._seconds = 60 * minutes
        self._last = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._closing.is_set():
            asked = f"{number}/asked"
            if self._rank == 0 and (why := self._reason()):
                self._store.set(asked, why)
            if self._store.check([asked]):
                self._agree(number, is_last=self._store.get(asked).decode() == STOP)
                number += 1
            self._closing.wait(_POLL_SECONDS)

    def _reason(self) -> str | None:
        """Why rank 0 should ask for a pause now; None if it should not."""
        if self._control.check([STOP]):
            return STOP
        is_due = self._seconds and time.monotonic() - self._last >= self._seconds
        return _CHECKPOINT if is_due else None

    def _agree(self, number: int, *, is_last: bool) -> None:
        batch = f"{number}/batch"
        self._store.set(f"{number}/reached/{self._rank}", str(self._gate.hold()))
        if self._rank == 0:
            answers = [f"{number}/reached/{rank}" for rank in range(self._plan.world)]
            if self._await(answers):
                reached = [int(self._store.get(answer)) for answer in answers]
                self._store.set(batch, str(pause_batch(self._plan, reached)))
        if self._await([batch]):
            self._gate.pause_at(int(self._store.get(batch)), is_last=is_last)
        while self._gate.batch != NEVER and not self._closing.wait(_POLL_SECONDS):
            pass
        self._last = time.monotonic()

    def _await(self, keys: Sequence[str]) -> bool:
        """Wait until all keys are set; False if closed before that."""
        while not self._store.check(list(keys)):
            if self._closing.wait(_ANSWER_SECONDS):
                return False
        return True


class EmulatedPauses:
    """The gates of all emulated ranks: they agree at once when the next batch begins."""

    def __init__(self, plan: Plan, minutes: float, wants_stop: Callable[[], bool] = lambda: False) -> None:
        self._plan = plan
        self._wants_stop = wants_stop
        self._seconds = 60 * minutes
        self._last = time.monotonic()
        self._is_stopping = False
        self._paused = 0  # the last batch at which they paused
        self._gates: list[Gate] = []

    def gate(self) -> Gate:
        """A gate for one more worker."""
        self._gates.append(Gate(self._plan.microbatches, self.poll))
        return self._gates[-1]

    def stop(self) -> None:
        """Pause as soon as possible, and end there."""
        self._is_stopping = True

    def poll(self) -> None:
        """Agree on a batch if a pause is due."""
        self._is_stopping = self._is_stopping or self._wants_stop()
        paused = self._paused * self._plan.microbatches
        has_begun = any(gate.entered > paused for gate in self._gates)  # pauses without that would never end
        is_due = self._seconds and has_begun and time.monotonic() - self._last >= self._seconds
        if (self._is_stopping or is_due) and all(gate.batch == NEVER for gate in self._gates):
            self._paused = pause_batch(self._plan, [gate.hold() for gate in self._gates])
            for gate in self._gates:
                gate.pause_at(self._paused, is_last=self._is_stopping)
            self._last = time.monotonic()
