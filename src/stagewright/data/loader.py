"""Loads microbatches by number: on demand, or ahead of time by threads or processes that decode on the CPU.

`make_loaders` chooses the loader that fits a source and its options; loaders that use the device are in `on_device`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stagewright.data.formats.fields import Fields, cast, to_device
from stagewright.data.on_device import CachedLoader, DeviceLoader, SyntheticLoader, torchcodec_decoder
from stagewright.data.order import ReplicaSlice, Sampler
from stagewright.data.own import DatasetLoader, DatasetSource
from stagewright.data.pool import BadRecordCounter, Batch, Buffers, Decode, LoaderOptions, Pool, ReadAhead
from stagewright.data.processes import ProcessPool
from stagewright.data.sources import ImageSource, Source
from stagewright.data.synthetic import SyntheticSource
from stagewright.errors import UserError


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
            source.to(options.device, channels_last=options.channels_last, is_compiled=options.is_compiled)
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
    """How batches get to the run's device: on the CPU they are there, and only their labels outlive them."""

    runs_ahead = False  # whether the next batch is copied before it is requested

    def begin(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Images and labels of a full batch on the device, to be used after `await_all`."""
        return batch.images, batch.labels.clone()

    def await_all(self, batch: Batch, *copies: Tensor) -> None:
        """Have the device wait for the copies of a batch."""


class CudaCopies(Copies):
    """To a GPU on a stream of its own, so that the next batch is copied while it trains on this one."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, batch: Batch) -> tuple[Tensor, Tensor]:
        batch.buffers.pin()
        with torch.cuda.stream(self._stream):
            images, labels = (part.to(self._device, non_blocking=True) for part in (batch.images, batch.labels))
            batch.buffers.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            batch.buffers.copied.record(self._stream)
        return images, labels

    def await_all(self, batch: Batch, *copies: Tensor) -> None:
        assert batch.buffers.copied is not None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(batch.buffers.copied)
        for tensor in copies:
            tensor.record_stream(current)  # which may use it after it is freed here


@dataclass(frozen=True, slots=True)
class _Copied:
    """A full batch, and its copies on the device."""

    number: int
    batch: Batch
    images: Tensor
    labels: Tensor


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
        self._next: _Copied | None = None
        self._bad = BadRecordCounter(options)
        self._ahead = ReadAhead(replica_slice, options.ahead, self._begin, self._cancel)
        self._free: deque[Buffers] = deque()
        if isinstance(pool, ProcessPool):
            microbatches = max(1, -(-replica_slice.stop // replica_slice.step))
            self._free += pool.reserve(source, self._sampler.size, min(options.ahead + 1, microbatches))

    def microbatch(self, number: int) -> Fields:
        """One microbatch; the threads or processes continue with the ones after it."""
        copied = self._take(number)
        try:
            self._bad.count_all(copied.batch.bad)
            self._copies.await_all(copied.batch, copied.images, copied.labels)
            options = self._options
            fields = self._source.fields(
                copied.images, copied.labels, options.dtype, channels_last=options.channels_last
            )
        finally:
            self._free.append(copied.batch.buffers)
        self._copy_following(number)
        return fields

    def pixels(self, number: int) -> tuple[Tensor, Tensor]:
        """A microbatch as bytes, before normalization; valid until the next microbatch is requested."""
        batch = self._take(number).batch
        self._free.append(batch.buffers)
        return batch.images, batch.labels

    def close(self) -> None:
        self._forget_next()
        self._ahead.abandon()
        self._pool.close()

    def _take(self, number: int) -> _Copied:
        """A full batch that is being copied; whoever takes it frees its buffers."""
        if self._next is not None and self._next.number == number:
            copied, self._next = self._next, None
            return copied
        self._forget_next()
        batch = self._ahead.take(number)
        try:
            self._pool.wait(batch)
            return _Copied(number, batch, *self._copies.begin(batch))
        except BaseException:
            self._free.append(batch.buffers)
            raise

    def _copy_following(self, number: int) -> None:
        """Begin to copy the microbatch after this one, if it is full and nothing is wrong with it."""
        batch = self._ahead.following(number) if self._copies.runs_ahead else None
        if batch is not None and self._pool.is_full(batch) and batch.error is None:
            self._next = self._take(number + self._step)

    def _forget_next(self) -> None:
        if self._next is not None:
            self._free.append(self._next.batch.buffers)
            self._next = None

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
