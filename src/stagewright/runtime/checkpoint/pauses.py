"""Agreeing on a pause that nobody planned: every t minutes, or because the run is asked to stop.

    rank 0 asks ──► every rank holds, and tells the first batch it has not begun ──► the largest of them is the pause

Nothing of this touches training before somebody asks: a thread of each rank looks at the store now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from torch.distributed import PrefixStore, Store

from stagewright.plan.plan import Plan
from stagewright.runtime.job import NEVER
from stagewright.runtime.stage.gate import Gate

STOP = "stop"
_CHECKPOINT = "checkpoint"
_LOOK_SECONDS = 0.2
_ANSWER_SECONDS = 0.005


def pause_batch(plan: Plan, reached: Iterable[int]) -> int:
    """The first batch at which all can pause, given the first that each has not begun."""
    return -(-max(reached) // plan.pause_step) * plan.pause_step


class Pauses:
    """A rank's thread that waits for requests and agrees with the other ranks on a batch."""

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
            self._closing.wait(_LOOK_SECONDS)

    def _reason(self) -> str | None:
        """Why rank 0 asks for a pause now."""
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
        while self._gate.batch != NEVER and not self._closing.wait(_LOOK_SECONDS):
            pass
        self._last = time.monotonic()

    def _await(self, keys: Sequence[str]) -> bool:
        """Wait until all are there; whether they are."""
        while not self._store.check(list(keys)):
            if self._closing.wait(_ANSWER_SECONDS):
                return False
        return True


class EmulatedPauses:
    """All the gates of one process: a request is settled when the next batch begins."""

    def __init__(self, plan: Plan, minutes: float) -> None:
        self._plan = plan
        self._seconds = 60 * minutes
        self._last = time.monotonic()
        self._is_stopping = False
        self._gates: list[Gate] = []

    def gate(self) -> Gate:
        """A gate for one more worker."""
        gate = _EmulatedGate(self._plan.microbatches, self)
        self._gates.append(gate)
        return gate

    def stop(self) -> None:
        """Pause as soon as possible, for the last time."""
        self._is_stopping = True

    def look(self) -> None:
        """Settle what is asked for."""
        is_due = self._seconds and time.monotonic() - self._last >= self._seconds
        if (self._is_stopping or is_due) and all(gate.batch == NEVER for gate in self._gates):
            batch = pause_batch(self._plan, [gate.hold() for gate in self._gates])
            for gate in self._gates:
                gate.pause_at(batch, is_last=self._is_stopping)
            self._last = time.monotonic()


class _EmulatedGate(Gate):
    def __init__(self, microbatches: int, pauses: EmulatedPauses) -> None:
        super().__init__(microbatches)
        self._pauses = pauses

    def enter(self, microbatch: int) -> bool:
        if microbatch >= self._entered:
            self._pauses.look()
        return super().enter(microbatch)
