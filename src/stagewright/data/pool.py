"""What all loaders share: their options, the count of bad records, reading ahead, and the threads that fill batches.

The threads of a `Pool` fill batches one sample at a time, in the order in which the batches were submitted; a
`processes.ProcessPool` is used in the same way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

import torch
from torch import Tensor

from stagewright.data.decode import Decoder
from stagewright.data.formats.fields import Fields
from stagewright.data.formats.records import BadRecord, DataError
from stagewright.data.order import AugmentSeed, Indices, ReplicaSlice
from stagewright.errors import counted

Load = Callable[[int, AugmentSeed | None, Tensor, Tensor, Decoder], tuple[BadRecord, ...]]
Task = tuple["Batch", Load, int, int, Tensor, Tensor]  # a row of a batch: its number, its sample, where it is written
Work = TypeVar("Work")


class Decode(StrEnum):
    """Where images are decoded."""

    CPU = "cpu"
    GPU = "gpu"
    ONCE = "once"  # on the CPU, then cached on the device


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """The type and device of samples, the threads, how far they load ahead, and how many records may be bad."""

    dtype: torch.dtype = torch.float32
    threads: int = 1
    ahead: int = 4  # microbatches
    max_bad: int = 0
    on_bad: Callable[[BadRecord], None] = lambda bad: None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    channels_last: bool = False  # the memory layout of images, where a source can choose it
    is_compiled: bool = False  # what makes samples on a GPU, where a source has code for that
    decode: Decode = Decode.CPU
    workers: int = 0  # processes that load a user's own dataset; 0: this one
    image_workers: int = 0  # processes that decode images; 0: threads


class BadRecordCounter:
    """Counts each bad record once and reports it; raises when there are too many."""

    def __init__(self, options: LoaderOptions) -> None:
        self._most = options.max_bad
        self._on_bad = options.on_bad
        self._seen: set[int] = set()

    def count_all(self, bad: dict[int, tuple[BadRecord, ...]]) -> None:
        """Count the bad records of a batch, in the order of its rows."""
        for row in sorted(bad):
            for record in bad[row]:
                self.count(record)

    def count(self, bad: BadRecord) -> None:
        if bad.index in self._seen:
            return
        self._seen.add(bad.index)
        self._on_bad(bad)
        if len(self._seen) > self._most:
            raise DataError(
                f"{counted(len(self._seen), 'bad record')} but --max-bad is {self._most}; the last: {bad.reason}; "
                "fix the data or raise --max-bad"
            )


class ReadAhead(Generic[Work]):
    """Work on a microbatch and on the ones after it, begun before they are requested.

    requested: 12        window: 12 14 16 18 20        (step 2, 4 ahead; threads complete it from the left)
    """

    def __init__(
        self, replica_slice: ReplicaSlice, ahead: int, begin: Callable[[int], Work], cancel: Callable[[Work], object]
    ) -> None:
        self.ahead = ahead
        self._slice = replica_slice
        self._begin = begin
        self._cancel = cancel
        self._window: deque[tuple[int, Work]] = deque()

    def following(self, number: int) -> Work | None:
        """The work on the microbatch after this one, if it was begun."""
        is_begun = bool(self._window) and self._window[0][0] == number + self._slice.step
        return self._window[0][1] if is_begun else None

    def take(self, number: int) -> Work:
        """The work on this microbatch, perhaps still unfinished; the window moves on to the ones after it."""
        if self._window and self._window[0][0] != number:
            self.abandon()
        step = self._slice.step
        first = self._window[-1][0] + step if self._window else number
        for following in range(first, max(self._slice.stop, number + 1), step):
            if len(self._window) > self.ahead:
                break
            self._window.append((following, self._begin(following)))
        return self._window.popleft()[1]

    def abandon(self) -> None:
        """Cancel everything that was begun."""
        while self._window:
            self._cancel(self._window.popleft()[1])


def arrive(fields: Fields, made: torch.cuda.Event | None) -> None:
    """Have the device wait for fields that another stream makes; None where they are there."""
    if made is not None:
        current = torch.cuda.current_stream(next(iter(fields.values())).device)
        current.wait_event(made)
        for tensor in fields.values():
            tensor.record_stream(current)  # which may use it after it is freed here


class Buffers:
    """Memory of one batch, pinned for a GPU, and the copy that may still be reading it."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels
        self.copied: torch.cuda.Event | None = None

    def pin(self) -> None:
        """Pin memory that was not made so."""

    def wait_until_copied(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


class Batch:
    """Samples being loaded: which ones, where they are written, and how many are left."""

    def __init__(self, indices: Indices, seed: AugmentSeed | None, buffers: Buffers) -> None:
        self.indices = indices
        self.seed = seed
        self.buffers = buffers
        self.images = buffers.images[: len(indices)]
        self.labels = buffers.labels[: len(indices)]
        self.bad: dict[int, tuple[BadRecord, ...]] = {}  # by row
        self.error: BaseException | None = None
        self.left = len(indices)


class Pool:
    """Threads that start with the first batch and end with `close`."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._tasks: deque[Task] = deque()  # that no thread has begun
        self._condition = threading.Condition()
        self._is_closing = False

    def submit(self, batch: Batch, load: Load) -> None:
        """Queue a batch to be filled."""
        rows = enumerate(zip(batch.indices.tolist(), batch.images.unbind(), batch.labels.unbind(), strict=True))
        tasks = [(batch, load, row, *sample) for row, sample in rows]
        with self._condition:
            self._tasks += tasks
            self._condition.notify_all()
        self._start()

    def is_full(self, batch: Batch) -> bool:
        """Whether nothing is left to fill; does not wait."""
        return not batch.left

    def wait(self, batch: Batch) -> None:
        """Wait until a batch is full; raise what a thread raised while filling it."""
        self._start()
        with self._condition:
            self._condition.wait_for(lambda: not batch.left)
        if batch.error is not None:
            raise batch.error

    def abandon(self, batch: Batch) -> None:
        """Stop filling a batch, and wait until no thread writes into it."""
        with self._condition:
            others = deque(task for task in self._tasks if task[0] is not batch)
            batch.left -= len(self._tasks) - len(others)
            self._tasks = others
            self._condition.wait_for(lambda: not batch.left)

    def close(self) -> None:
        """Stop the threads; a later batch starts new ones."""
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
        while (task := self._claim()) is not None:
            batch, load, row, index, image, label = task
            bad: tuple[BadRecord, ...] = ()
            error: BaseException | None = None
            try:
                bad = load(index, batch.seed, image, label, decoder)
            except BaseException as caught:  # raised again by `wait`
                error = caught
            with self._condition:
                if bad:
                    batch.bad[row] = bad
                batch.error = batch.error or error
                batch.left -= 1
                if not batch.left:
                    self._condition.notify_all()

    def _claim(self) -> Task | None:
        """Wait for a task; None once the pool closes."""
        with self._condition:
            self._condition.wait_for(lambda: self._tasks or self._is_closing)
            return None if self._is_closing else self._tasks.popleft()
