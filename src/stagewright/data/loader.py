"""Loads microbatches by number: on demand, or ahead of time by threads that decode on the CPU.

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
from stagewright.data.pool import BadRecordCounter, Batch, Decode, LoaderOptions, Pool, ReadAhead
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
    """One loader per source; loaders of images share their threads."""
    pool = Pool(options.threads)
    return tuple(_make_loader(source, replica_slice, options, pool) for source, replica_slice in slices)


def _make_loader(source: Source, replica_slice: ReplicaSlice, options: LoaderOptions, pool: Pool) -> Loader:
    if isinstance(source, DatasetSource):
        return DatasetLoader(source, replica_slice, options)
    if not isinstance(source, ImageSource):
        if isinstance(source, SyntheticSource):
            source.to(options.device, channels_last=options.channels_last, is_compiled=options.is_compiled)
            if options.device.type == "cuda":
                return SyntheticLoader(source, replica_slice, options)
        return DirectLoader(source, replica_slice.sampler, options)
    if options.decode is Decode.CPU:
        return ImageLoader(source, replica_slice, options, pool)
    if options.decode is Decode.ONCE:
        return CachedLoader(source, replica_slice, options, pool)
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


class ImageLoader:
    """Images decoded ahead of time by threads, into batches whose memory is reused."""

    def __init__(self, source: ImageSource, replica_slice: ReplicaSlice, options: LoaderOptions, pool: Pool) -> None:
        self.targets = source.targets
        self._source = source
        self._sampler = replica_slice.sampler
        self._options = options
        self._pool = pool
        self._bad = BadRecordCounter(options)
        self._ahead = ReadAhead(replica_slice, options.ahead, self._begin, self._cancel)
        self._free: deque[_Buffers] = deque()

    def microbatch(self, number: int) -> Fields:
        """One microbatch; the threads continue with the ones after it."""
        batch, buffers = self._next(number)
        self._bad.count_all(batch.bad)
        labels = batch.labels.to(self._options.device, non_blocking=True, copy=True)
        images = buffers.to_device(batch.images, self._options.device)
        fields = self._source.fields(images, labels, self._options.dtype)
        self._free.append(buffers)
        return fields

    def pixels(self, number: int) -> tuple[Tensor, Tensor]:
        """A microbatch as bytes, before normalization; valid until the next microbatch is requested."""
        batch, buffers = self._next(number)
        self._free.append(buffers)
        return batch.images, batch.labels

    def close(self) -> None:
        self._ahead.abandon()
        self._pool.close()

    def _next(self, number: int) -> tuple[Batch, _Buffers]:
        """A full batch; the caller returns its buffers to the free ones."""
        batch, buffers = self._ahead.take(number)
        self._pool.wait(batch)
        return batch, buffers

    def _begin(self, number: int) -> tuple[Batch, _Buffers]:
        indices, buffers = self._sampler.indices(number), self._free_buffers()
        images, labels = buffers.images[: len(indices)], buffers.labels[: len(indices)]
        batch = Batch(indices, self._sampler.augment_seed(number), images, labels)
        self._pool.submit(batch, self._source.load)
        return batch, buffers

    def _cancel(self, begun: tuple[Batch, _Buffers]) -> None:
        batch, buffers = begun
        self._pool.abandon(batch)
        self._free.append(buffers)

    def _free_buffers(self) -> _Buffers:
        """Buffers that nothing uses any more; new ones only while there are too few."""
        if self._free:
            buffers = self._free.popleft()
            if buffers.copied is not None:
                buffers.copied.synchronize()
            return buffers
        is_pinned = self._options.device.type == "cuda"
        return _Buffers(*self._source.allocate(self._sampler.size, is_pinned=is_pinned))


class _Buffers:
    """Memory of one batch, pinned for a GPU, and the copy that may still be reading it."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels
        self.copied: torch.cuda.Event | None = None

    def to_device(self, images: Tensor, device: torch.device) -> Tensor:
        """The images on the device; the copy may still be running when this returns."""
        if device.type != "cuda":
            return images
        on_device = images.to(device, non_blocking=True)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.copied.record()
        return on_device
