"""Loads microbatches by number: on demand, or ahead of time by threads or processes that decode on the CPU.

`make_loaders` chooses the loader that fits a source and its options; loaders that use the device are in `on_device`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from stagewright.data.formats.fields import Fields, cast, to_device
from stagewright.data.formats.records import BadRecord
from stagewright.data.on_device import CachedLoader, DeviceLoader, SyntheticLoader, torchcodec_decoder
from stagewright.data.order import ReplicaSlice, Sampler
from stagewright.data.own import DatasetLoader, DatasetSource
from stagewright.data.pool import BadRecordCounter, Batch, Buffers, Decode, LoaderOptions, Pool, ReadAhead, arrive
from stagewright.data.processes import ProcessPool
from stagewright.data.sources import ImageSource, Source
from stagewright.data.synthetic import SyntheticSource
from stagewright.errors import UserError

Make = Callable[[Tensor, Tensor], Fields]  # images and labels of a batch, on their device, to its fields
Made = tuple[dict[int, tuple[BadRecord, ...]], Fields, torch.cuda.Event | None]  # bad records; fields, then there


class Loader(Protocol):
    """Loads microbatches, in the data type the model computes with."""

    @property
    def targets(self) -> tuple[str, ...]:
        """The fields that are targets; all others are inputs of the model."""
        ...

    def microbatch(self, number: int) -> Fields:
        """One microbatch on the run's device; any number is allowed, the next one in order is fastest."""
        ...

    def close(self) -> None:
        """Stop loading ahead; a later microbatch starts it again."""
        ...


def make_loaders(options: LoaderOptions, *slices: tuple[Source, ReplicaSlice]) -> tuple[Loader, ...]:
    """One loader per source; loaders of images share their threads or processes."""
    threads, processes = Pool(options.threads), ProcessPool(options.image_workers) if options.image_workers else None
    return tuple(_make_loader(source, numbers, options, threads, processes) for source, numbers in slices)


def _make_loader(
    source: Source, replica_slice: ReplicaSlice, options: LoaderOptions, threads: Pool, processes: ProcessPool | None
) -> Loader:
    if isinstance(source, DatasetSource):
        return DatasetLoader(source, replica_slice, options)
    if not isinstance(source, ImageSource):
        if isinstance(source, SyntheticSource):
            layout = {"channels_last": options.channels_last, "is_compiled": options.is_compiled}
            source.to(options.device, options.dtype, **layout)
            if options.device.type == "cuda":
                return SyntheticLoader(source, replica_slice, options)
        return DirectLoader(source, replica_slice.sampler, options)
    if options.decode is Decode.CPU:
        return ImageLoader(source, replica_slice, options, processes or threads)
    if options.decode is Decode.ONCE:
        return CachedLoader(source, replica_slice, options, threads)
    if source.labels.follows_view:
        raise UserError("--decode gpu can't crop masks; use --decode cpu")
    return DeviceLoader(source, replica_slice, options, torchcodec_decoder(options.device))


@dataclass(frozen=True, slots=True)
class DirectLoader:
    """Loads samples that are cheap to make, on demand."""

    source: Source
    sampler: Sampler
    options: LoaderOptions

    @property
    def targets(self) -> tuple[str, ...]:
        return self.source.targets

    def microbatch(self, number: int) -> Fields:
        fields = self.source.batch(self.sampler.indices(number))
        fields = {name: to_device(tensor, self.options.device) for name, tensor in fields.items()}
        return cast(fields, self.targets, self.options.dtype)

    def close(self) -> None:
        pass


class Copies:
    """How batches become fields on the run's device: on the CPU at once, when they are requested."""

    runs_ahead = False  # whether the next batch is made before it is requested

    def begin(self, batch: Batch, make: Make) -> tuple[Fields, torch.cuda.Event | None]:
        """The fields of a full batch, to be used after `arrive`."""
        return make(batch.images, batch.labels.clone()), None


class CudaCopies(Copies):
    """On a GPU by a stream of its own, so that the next batch is copied and normalized while it trains on this one."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, batch: Batch, make: Make) -> tuple[Fields, torch.cuda.Event | None]:
        batch.buffers.pin()
        with torch.cuda.stream(self._stream):
            images, labels = (part.to(self._device, non_blocking=True) for part in (batch.images, batch.labels))
            batch.buffers.copied = self._event()
            return make(images, labels), self._event()

    def _event(self) -> torch.cuda.Event:
        """The end of what is queued so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


class ImageLoader:
    """Images decoded ahead of time by threads or processes, into batches whose memory is reused."""

    def __init__(
        self,
        source: ImageSource,
        replica_slice: ReplicaSlice,
        options: LoaderOptions,
        pool: Pool | ProcessPool,
        copies: Copies | None = None,
    ) -> None:
        self.targets = source.targets
        self._source = source
        self._sampler = replica_slice.sampler
        self._step = replica_slice.step
        self._options = options
        self._pool = pool
        self._copies = copies or (CudaCopies(options.device) if options.device.type == "cuda" else Copies())
        self._next: tuple[int, Made] | None = None  # a microbatch that is made before it is requested
        self._bad = BadRecordCounter(options)
        self._ahead = ReadAhead(replica_slice, options.ahead, self._begin, self._cancel)
        self._free: deque[Buffers] = deque()
        if isinstance(pool, ProcessPool):
            microbatches = max(1, -(-replica_slice.stop // replica_slice.step))
            self._free += pool.reserve(source, self._sampler.size, min(options.ahead + 1, microbatches))

    def microbatch(self, number: int) -> Fields:
        """One microbatch; the threads or processes continue with the ones after it."""
        made = self._next[1] if self._next is not None and self._next[0] == number else self._make(number)
        bad, fields, event = made
        self._next = None
        self._bad.count_all(bad)
        arrive(fields, event)
        batch = self._ahead.following(number) if self._copies.runs_ahead else None
        if batch is not None and self._pool.is_full(batch) and batch.error is None:
            self._next = number + self._step, self._make(number + self._step)
        return fields

    def pixels(self, number: int) -> tuple[Tensor, Tensor]:
        """A microbatch as bytes, before normalization; valid until the next microbatch is requested."""
        with self._filled(number) as batch:
            return batch.images, batch.labels

    def close(self) -> None:
        self._next = None
        self._ahead.abandon()
        self._pool.close()

    def _make(self, number: int) -> Made:
        options = self._options
        make = partial(self._source.fields, dtype=options.dtype, channels_last=options.channels_last)
        with self._filled(number) as batch:
            return batch.bad, *self._copies.begin(batch, make)

    @contextmanager
    def _filled(self, number: int) -> Iterator[Batch]:
        """A full batch; its buffers are free afterwards, and used again once no copy reads them."""
        batch = self._ahead.take(number)
        try:
            self._pool.wait(batch)
            yield batch
        finally:
            self._free.append(batch.buffers)

    def _begin(self, number: int) -> Batch:
        batch = Batch(self._sampler.indices(number), self._sampler.augment_seed(number), self._free_buffers())
        self._pool.submit(batch, self._source.load)
        return batch

    def _cancel(self, batch: Batch) -> None:
        self._pool.abandon(batch)
        self._free.append(batch.buffers)

    def _free_buffers(self) -> Buffers:
        """Buffers that nothing uses any more; new ones, for threads, only while there are too few."""
        if self._free:
            buffers = self._free.popleft()
            buffers.wait_until_copied()
            return buffers
        is_pinned = self._options.device.type == "cuda"
        return Buffers(*self._source.allocate(self._sampler.size, is_pinned=is_pinned))
