"""A thread that keeps in touch with the other machines while ranks run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed import Store

_BEAT_SECONDS = 0.25
_LONGEST_TICK = 1.0


@dataclass(frozen=True, slots=True)
class Watch:
    """Who watches whom, and for how long it may be silent."""

    machine: int
    machines: int
    lost: float  # seconds

    @property
    def others(self) -> Sequence[int]:
        """The host watches all, everybody else the host."""
        return range(1, self.machines) if self.machine == 0 else (0,)


class Line:
    """Beats for this machine and sees the beats of others, a fault told by another machine, and the common end."""

    def __init__(self, open_store: Callable[[], Store], watch: Watch, start: int) -> None:
        self.lost: int | None = None  # a machine that is silent
        self.is_faulty = False  # another machine told of a fault
        self.ended: str | None = None  # somebody stopped the run, and how
        self.done = 0  # machines whose ranks are all done
        self._watch = watch
        self._start = start
        self._now = 0.0
        self._beats = dict.fromkeys(watch.others, (-1, 0.0))
        self._closing = threading.Event()
        self._store = open_store()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._looker = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        self._looker.start()

    def close(self) -> None:
        """Stop beating; a beat that is under way is not waited for."""
        self._closing.set()
        self._looker.join()

    def _run(self) -> None:
        while not self._closing.wait(_BEAT_SECONDS):
            try:
                self._beat()
            except RuntimeError:
                return  # the silence is noticed by the other thread

    def _beat(self) -> None:
        store, start = self._store, self._start
        store.add(f"beat/{self._watch.machine}", 1)
        for machine in self._watch.others:
            beat = store.add(f"beat/{machine}", 0)
            if beat != self._beats[machine][0]:
                self._beats[machine] = (beat, self._now)
        self.is_faulty = self.is_faulty or store.check([f"fault/{start}"])
        self.done = store.add(f"done/{start}", 0)
        if store.check(["end"]):
            self.ended = store.get("end").decode()

    def _look(self) -> None:
        """Count silence by a clock that stands still while this process does."""
        read = time.monotonic()
        while not self._closing.wait(_BEAT_SECONDS):
            now = time.monotonic()
            self._now += min(now - read, _LONGEST_TICK)
            read = now
            for machine, (_, heard) in self._beats.items():
                if self._now - heard > self._watch.lost:
                    self.lost = machine
