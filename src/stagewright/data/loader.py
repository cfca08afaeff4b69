"""Microbatches by number: made on the spot, or by threads that work ahead."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stagewright.data.microbatches import BadRecords, Decode, Loading, Numbering, Share
from stagewright.data.on_device import DeviceLoader, KeptLoader, torchcodec_decoder
from stagewright.data.order import Indices
from stagewright.data.pool import Batch, Pool
from stagewright.data.sources import ImageSource, Source, SyntheticSource


class Loader(Protocol):
    """Samples of microbatches, in the type the model computes with."""

    def microbatch(self, number: int) -> tuple[Tensor, Tensor]:
        """The inputs and labels of one microbatch; any number may come, the expected one is quickest."""
        ...

    def close(self) -> None:
        """End what works ahead; a later microbatch starts it again."""
        ...


def make_loaders(loading: Loading, *shares: tuple[Source, Share]) -> tuple[Loader, ...]:
    """A loader for each source; those of images have their threads in common."""
    pool = Pool(loading.threads)
    return tuple(_make_loader(source, share, loading, pool) for source, share in shares)


def _make_loader(source: Source, share: Share, loading: Loading, pool: Pool) -> Loader:
    if not isinstance(source, ImageSource):
        if isinstance(source, SyntheticSource):
            source.to(loading.device)
        return DirectLoader(source, share.numbering, loading)
    if loading.decode is Decode.CPU:
        return ImageLoader(source, share, loading, pool)
    if loading.decode is Decode.ONCE:
        return KeptLoader(source, share, loading, pool)
    return DeviceLoader(source, share, loading, torchcodec_decoder(loading.device))


@dataclass(frozen=True, slots=True)
class DirectLoader:
    """Samples that are quick to make, made when asked for."""

    source: Source
    numbering: Numbering
    loading: Loading

    def microbatch(self, number: int) -> tuple[Tensor, Tensor]:
        inputs, labels = self.source.batch(self.numbering.indices(number))
        dtype = self.loading.dtype if inputs.is_floating_point() else inputs.dtype
        return inputs.to(self.loading.device, dtype), labels.to(self.loading.device)

    def close(self) -> None:
        pass


class ImageLoader:
    """Images decoded by threads into batches whose memory is used again and again.

    asked for: 12        window: 12 14 16 18 20        (step 2, 4 ahead; the threads fill it from the left)
    """

    def __init__(self, source: ImageSource, share: Share, loading: Loading, pool: Pool) -> None:
        self._source = source
        self._share = share
        self._loading = loading
        self._pool = pool
        self._bad = BadRecords(loading)
        self._window: deque[tuple[int, Batch, _Room]] = deque()
        self._free: deque[_Room] = deque()

    def microbatch(self, number: int) -> tuple[Tensor, Tensor]:
        """One microbatch; the threads go on with those after it."""
        batch, room = self._next(number)
        for row in sorted(batch.bad):
            for bad in batch.bad[row]:
                self._bad.count(bad)
        labels = torch.from_numpy(batch.labels).to(self._loading.device, non_blocking=True, copy=True)
        inputs = self._source.normalization.apply(room.moved(batch.images, self._loading.device), self._loading.dtype)
        self._free.append(room)
        return inputs, labels

    def pixels(self, number: int) -> tuple[Tensor, Tensor]:
        """A microbatch as bytes, before it is normalised; they are overwritten after the next one was asked for."""
        batch, room = self._next(number)
        self._free.append(room)
        return batch.images, torch.from_numpy(batch.labels)

    def close(self) -> None:
        self._abandon()
        self._pool.close()

    def _next(self, number: int) -> tuple[Batch, _Room]:
        """A full batch off the window, whose memory is the caller's until it is free again."""
        if self._window and self._window[0][0] != number:
            self._abandon()
        self._fill(number)
        self._pool.wait(self._window[0][1])
        _, batch, room = self._window.popleft()
        return batch, room

    def _fill(self, number: int) -> None:
        """Have the threads work on this microbatch and on those after it, up to the bound."""
        numbering, step = self._share.numbering, self._share.step
        first = self._window[-1][0] + step if self._window else number
        for following in range(first, max(self._share.stop, number + 1), step):
            if len(self._window) > self._loading.ahead:
                break
            indices, room = numbering.indices(following), self._room()
            images, labels = room.images[: len(indices)], room.labels[: len(indices)]
            batch = Batch(indices, numbering.draw(following), images, labels)
            self._window.append((following, batch, room))
            self._pool.submit(batch, self._source.load)

    def _room(self) -> _Room:
        """Memory that nobody uses; new memory only while there is too little."""
        if self._free:
            room = self._free.popleft()
            room.await_copy()
            return room
        is_pinned = self._loading.device.type == "cuda"
        return _Room(*self._source.empty(self._share.numbering.size, is_pinned=is_pinned))

    def _abandon(self) -> None:
        for _, batch, room in self._window:
            self._pool.abandon(batch)
            self._free.append(room)
        self._window.clear()


class _Room:
    """Memory of one batch, pinned on GPUs, and the copy that may still be reading it."""

    def __init__(self, images: Tensor, labels: Indices) -> None:
        self.images = images
        self.labels = labels
        self._copied: torch.cuda.Event | None = None

    def moved(self, images: Tensor, device: torch.device) -> Tensor:
        """The images on the device."""
        if device.type != "cuda":
            return images
        there = images.to(device, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()
        return there

    def await_copy(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
