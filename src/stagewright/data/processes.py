"""Worker processes that fill batches: what the threads of a `Pool` do, without Python's lock between them.

    rank ── tasks: one pipe ──► workers ── results: a pipe each ──► rank
              images, labels and indices: memory that all of them have mapped

A task is some rows of one batch, so one batch keeps all workers busy; the worker that is free takes the next. Tasks
are written to the pipe whole and read whole, so nobody holds a lock that would be lost with a worker that is killed.
Workers end when they are told to, and when the pipe ends, which it does however the rank ended.

torch's DataLoader is not used: it makes new shared memory for each batch, whose pages are faulted in twice and copied
to be pinned, and it needs that memory in /dev/shm, of which containers often have 64 MiB. Here batches are reused,
workers write them in place, and they lie in anonymous memory, which has no such bound.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import traceback
import warnings
from collections import deque
from contextlib import suppress
from functools import cache
from math import prod
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from selectors import EVENT_READ, DefaultSelector

import torch
from torch import Tensor

from stagewright.data.decode import Decoder
from stagewright.data.formats.records import BadRecord, DataError
from stagewright.data.order import AugmentSeed
from stagewright.data.pool import Batch, Buffers, Load
from stagewright.data.sources import ImageSource
from stagewright.errors import UserError, counted
from stagewright.metrics import GIB

_TASK = struct.Struct("<5q2Q")  # buffers, ticket, first row, stop, whether it is augmented, seed, epoch
_END = _TASK.pack(-1, 0, 0, 0, 0, 0, 0)  # one for each worker
_MOST_ROWS = 8  # of a task: few enough that no worker waits long for the last, and a task's own time hardly counts
_PATIENCE = 10.0  # seconds in which a worker that was told to end does


class SharedBuffers(Buffers):
    """Memory of one batch that workers fill: made before they start, and pinned for a GPU afterwards."""

    def __init__(self, number: int, source: ImageSource, samples: int) -> None:
        images, labels = (_shared(samples, one) for one in source.allocate(1))
        super().__init__(images, labels)
        numbers = _shared(samples + 1, torch.zeros(1, dtype=torch.int64)).numpy()
        self.number = number
        self.load: Load = source.load
        self.indices = numbers[1:]
        self.ticket = numbers[:1]  # of the batch that is wanted: tasks of another are only reported
        self._is_pinned = False

    def pin(self) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for memory in () if self._is_pinned else (self.images, self.labels):
            if error := int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
                size = f"{memory.nbytes:,} bytes of a microbatch"
                raise DataError(f"{size} can't be pinned (CUDA error {error}); use --workers 0")
        self._is_pinned = True

    def unpin(self) -> None:
        """Leave the memory as it was made, so that workers may start anew."""
        if self._is_pinned:
            self.wait_until_copied()
            for memory in (self.images, self.labels):
                torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
            self._is_pinned = False


def _shared(rows: int, like: Tensor) -> Tensor:
    """Zeros, as a tensor with one row, that processes started later have too."""
    shape = (rows, *like.shape[1:])
    size = prod(shape) * like.dtype.itemsize
    try:
        memory = mmap.mmap(-1, max(size, 1))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{rows} samples of a microbatch need {size / GIB:,.1f} GiB of memory, which can't be had; "
            "reduce --image, --batch or --ahead"
        ) from error
    return torch.frombuffer(memory, dtype=like.dtype, count=prod(shape)).view(shape)


class ProcessPool:
    """Processes that start with the first batch and end with `close`; used as a `Pool` is."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._buffers: list[SharedBuffers] = []
        self._workers: dict[Connection, ForkProcess] = {}  # by the pipe of their results
        self._selector = DefaultSelector()  # of those pipes
        self._tasks = -1  # the end of their pipe that is written to
        self._unsent: deque[bytes] = deque()  # tasks that the pipe has no room for
        self._batches: dict[int, Batch] = {}  # that are being filled, by ticket
        self._last_ticket = 0

    def reserve(self, source: ImageSource, samples: int, count: int) -> list[Buffers]:
        """Memory for as many batches of a source, which workers know from their start."""
        assert not self._workers, "workers know what was reserved before they started"
        first = len(self._buffers)
        made = [SharedBuffers(number, source, samples) for number in range(first, first + count)]
        self._buffers += made
        return [*made]

    def submit(self, batch: Batch, load: Load) -> None:
        """Queue a batch of reserved buffers to be filled."""
        buffers, seed, count = batch.buffers, batch.seed, len(batch.indices)
        assert isinstance(buffers, SharedBuffers) and load == buffers.load
        self._last_ticket = ticket = self._last_ticket + 1
        self._batches[ticket] = batch
        buffers.indices[:count] = batch.indices
        buffers.ticket[0] = ticket
        augmented = (0, 0, 0) if seed is None else (1, seed.seed % 2**64, seed.epoch)
        rows = max(1, min(_MOST_ROWS, count // self._num_workers))
        for first in range(0, count, rows):
            self._unsent.append(_TASK.pack(buffers.number, ticket, first, min(first + rows, count), *augmented))
        self._start()
        self._send()

    def is_full(self, batch: Batch) -> bool:
        """Whether nothing is left to fill; does not wait."""
        while batch.left and self._collect(timeout=0):
            pass
        return not batch.left

    def wait(self, batch: Batch) -> None:
        """Wait until a batch is full; raise what a worker raised while filling it."""
        while batch.left:
            self._collect()
        if batch.error is not None:
            raise batch.error

    def abandon(self, batch: Batch) -> None:
        """Stop filling a batch, and wait until no worker writes into it."""
        assert isinstance(batch.buffers, SharedBuffers)
        batch.buffers.ticket[0] = 0
        while batch.left:
            self._collect()

    def close(self) -> None:
        """End the workers, once what was submitted is done; a later batch starts new ones."""
        while self._batches:
            self._collect()
        with suppress(BrokenPipeError):
            for _ in self._workers:
                os.write(self._tasks, _END)
        self._end()
        for buffers in self._buffers:
            buffers.unpin()

    def _start(self) -> None:
        if self._workers:
            return
        tasks, self._tasks = os.pipe()
        os.set_blocking(self._tasks, False)
        context = get_context("fork")  # shares what is mapped, and starts in milliseconds
        for number in range(self._num_workers):
            results, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(tasks, self._tasks, sender, self._buffers), name=f"loader-{number}", daemon=True
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # a rank has threads; workers use no lock of theirs
                process.start()
            sender.close()
            self._workers[results] = process
            self._selector.register(results, EVENT_READ)
        os.close(tasks)

    def _send(self) -> None:
        """Write tasks as long as the pipe has room; the rest follow when results show that some were taken."""
        with suppress(BlockingIOError, BrokenPipeError):  # a broken pipe: all workers are gone, as `_collect` will see
            while self._unsent:
                os.write(self._tasks, self._unsent[0])
                self._unsent.popleft()

    def _collect(self, timeout: float | None = None) -> bool:
        """Wait for results, and enter them in their batches; whether there were some."""
        self._send()
        ready = [key.fileobj for key, _ in self._selector.select(timeout)]
        for results in ready:
            assert isinstance(results, Connection)
            try:
                ticket, rows, bad, error = results.recv()
            except (EOFError, OSError):
                self._lose(self._workers[results])
                break
            batch = self._batches[ticket]
            batch.bad |= bad
            if error is not None:
                is_known, text = error
                batch.error = batch.error or (DataError(text) if is_known else RuntimeError(text))
            batch.left -= rows
            if not batch.left:
                del self._batches[ticket]
        return bool(ready)

    def _lose(self, process: ForkProcess) -> None:
        """End all workers where one is gone: what it was filling stays unfinished."""
        process.join(_PATIENCE)
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        error = DataError(
            f"process {process.pid}, one of {counted(self._num_workers, 'process', 'es')} that load images, {how}; "
            "if the memory was full, give fewer --workers or a smaller --ahead"
        )
        for batch in self._batches.values():
            batch.error, batch.left = batch.error or error, 0
        self._batches.clear()
        self._unsent.clear()
        for worker in self._workers.values():
            worker.kill()
        self._end()

    def _end(self) -> None:
        """Wait for the end of all workers, and forget them."""
        for results, process in self._workers.items():
            process.join(_PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            self._selector.unregister(results)
            results.close()
        if self._workers:
            os.close(self._tasks)
        self._workers = {}

    def __del__(self) -> None:
        if self._workers:
            os.close(self._tasks)  # workers end by themselves


def _work(tasks: int, writing: int, results: Connection, buffers: list[SharedBuffers]) -> None:
    """A worker: fill rows until told to end, or until nobody can write tasks any more."""
    os.close(writing)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for all its processes: the rank ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    decoder = Decoder()
    rows = cache(
        lambda number: list(zip(buffers[number].images.unbind(), buffers[number].labels.unbind(), strict=True))
    )
    with suppress(BrokenPipeError):
        while (task := os.read(tasks, _TASK.size)) not in (b"", _END):
            number, ticket, first, stop, is_augmented, *seed = _TASK.unpack(task)
            own, view = buffers[number], AugmentSeed(*seed) if is_augmented else None
            bad: dict[int, tuple[BadRecord, ...]] = {}
            error: tuple[bool, str] | None = None
            for row in range(first, stop):
                if own.ticket[0] != ticket:
                    break  # it was abandoned meanwhile
                try:
                    if found := own.load(int(own.indices[row]), view, *rows(number)[row], decoder):
                        bad[row] = found
                except UserError as caught:
                    error = error or (True, str(caught))
                except Exception:  # raised again by `wait`
                    error = error or (False, traceback.format_exc())
            results.send((ticket, stop - first, bad, error))
