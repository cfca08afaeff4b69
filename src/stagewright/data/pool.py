"""Threads that fill batches, one sample at a time, in the order in which the batches were asked for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from torch import Tensor

from stagewright.data.decode import Decoder
from stagewright.data.order import Indices
from stagewright.data.sources import Bad, Draw

Load = Callable[[int, Draw | None, Tensor, Decoder], tuple[int, tuple[Bad, ...]]]


class Batch:
    """Samples on their way: which ones, where they go, and how many are still to come."""

    def __init__(self, indices: Indices, draw: Draw | None, images: Tensor, labels: Indices) -> None:
        self.indices = indices
        self.draw = draw
        self.images = images
        self.labels = labels
        self.bad: dict[int, tuple[Bad, ...]] = {}
        self.error: BaseException | None = None
        self.claimed = 0
        self.left = len(indices)

    @property
    def is_unclaimed(self) -> bool:
        return self.claimed < len(self.indices)


class Pool:
    """So many threads; they start with the first batch and end with `close`."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._waiting: deque[tuple[Batch, Load]] = deque()
        self._condition = threading.Condition()
        self._is_closing = False

    def submit(self, batch: Batch, load: Load) -> None:
        """Have a batch filled after those before it."""
        with self._condition:
            self._waiting.append((batch, load))
            self._condition.notify_all()
        self._start()

    def wait(self, batch: Batch) -> None:
        """Return once a batch is full; what went wrong with it is raised here."""
        self._start()
        with self._condition:
            while batch.left:
                self._condition.wait()
        if batch.error is not None:
            raise batch.error

    def abandon(self, batch: Batch) -> None:
        """Have no more of a batch filled, and return when nobody writes into it."""
        with self._condition:
            batch.left -= len(batch.indices) - batch.claimed
            batch.claimed = len(batch.indices)
            while batch.left:
                self._condition.wait()

    def close(self) -> None:
        """End the threads; a later batch starts new ones."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _start(self) -> None:
        if self._threads:
            return
        self._is_closing = False
        for number in range(self._num_threads):
            self._threads.append(threading.Thread(target=self._work, name=f"loader-{number}", daemon=True))
            self._threads[-1].start()

    def _work(self) -> None:
        decoder = Decoder()
        while (claim := self._claim()) is not None:
            batch, load, row = claim
            bad: tuple[Bad, ...] = ()
            error: BaseException | None = None
            try:
                batch.labels[row], bad = load(int(batch.indices[row]), batch.draw, batch.images[row], decoder)
            except BaseException as caught:  # whoever waits for the batch gets it
                error = caught
            self._finish(batch, row, bad, error)

    def _claim(self) -> tuple[Batch, Load, int] | None:
        """The next sample that nobody has begun, waiting for one; nothing once the pool closes."""
        with self._condition:
            while not self._is_closing:
                while self._waiting and not self._waiting[0][0].is_unclaimed:
                    self._waiting.popleft()
                if self._waiting:
                    batch, load = self._waiting[0]
                    batch.claimed += 1
                    return batch, load, batch.claimed - 1
                self._condition.wait()
        return None

    def _finish(self, batch: Batch, row: int, bad: tuple[Bad, ...], error: BaseException | None) -> None:
        with self._condition:
            if bad:
                batch.bad[row] = bad
            batch.error = batch.error or error
            batch.left -= 1
            if not batch.left:
                self._condition.notify_all()
