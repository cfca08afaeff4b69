"""Loaders that work on the device: one makes synthetic images there, one decodes JPEGs, one caches small images.

`SyntheticLoader` makes a microbatch while the device computes with the one before it.
`DeviceLoader` decodes with torchcodec (nvJPEG) and gives the order, crops and labels of the CPU's loader; its pixels
may differ by rounding. `CachedLoader` decodes each image once on the CPU and keeps it on the device, where every epoch
shifts and mirrors it differently; its samples equal those of the CPU's loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from stagewright.data.augment import Cropping, View
from stagewright.data.decode import Decoder, jittered, jpeg_header
from stagewright.data.formats.fields import Fields, cast
from stagewright.data.formats.records import BadRecordError, Record
from stagewright.data.order import AugmentSeed, Indices, ReplicaSlice
from stagewright.data.pool import BadRecordCounter, Batch, Buffers, LoaderOptions, Pool, ReadAhead, arrive
from stagewright.data.sources import ImageSource
from stagewright.data.synthetic import SyntheticSource
from stagewright.errors import UserError, first_line

DecodeBatch = Callable[[list[bytes]], list[Tensor]]  # JPEGs to uint8 [RGB, rows, columns] on the device


def torchcodec_decoder(device: torch.device) -> DecodeBatch:
    """A decoder of whole batches, one call of nvJPEG each."""
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"--decode gpu needs torchcodec 0.17 or later, which can't be imported ({first_line(error)}); "
            "pip install torchcodec, or use --decode cpu"
        ) from error
    return partial(decode_jpeg, mode="RGB", device=device)


class SideStream:
    """A stream beside the one that computes: what it fills is used there later, and meanwhile both run.

    The memory is the computing stream's, which reuses it in its own order, so nothing may be dropped half filled.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def filling(self) -> Iterator[torch.cuda.Event]:
        """What is queued in the context runs once all that is queued now has run; yields the event of its end."""
        filled = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield filled
            filled.record()


class SyntheticLoader:
    """Synthetic images on a GPU, each microbatch made ahead on a stream of its own.

    computing   ── 12 ─────────┬── 14 ─────────┬── 16 ──
    making         └─ 14 ─┘       └─ 16 ─┘        └─ 18 ─┘       (step 2)

    Nothing is made beside the first, with which cuDNN measures which convolutions are the fastest.
    """

    def __init__(self, source: SyntheticSource, replica_slice: ReplicaSlice, options: LoaderOptions) -> None:
        self.targets = source.targets
        self._source = source
        self._sampler = replica_slice.sampler
        self._options = options
        self._side = SideStream(options.device)
        self._ahead = ReadAhead(replica_slice, 0, self._begin, lambda begun: arrive(*begun))

    def microbatch(self, number: int) -> Fields:
        fields, filled = self._ahead.take(number)
        self._ahead.ahead = 1
        arrive(fields, filled)
        return cast(fields, self.targets, self._options.dtype)

    def close(self) -> None:
        self._ahead.abandon()

    def _begin(self, number: int) -> tuple[Fields, torch.cuda.Event]:
        indices = self._sampler.indices(number)
        room = self._source.allocate(len(indices))
        with self._side.filling() as filled:
            return self._source.batch(indices, room), filled


class DeviceLoader:
    """Threads read records ahead; the device decodes a microbatch in one call, then crops, resizes and normalizes it.

    A microbatch with a bad record or another image format is decoded on the CPU, which replaces bad records.
    """

    def __init__(
        self, source: ImageSource, replica_slice: ReplicaSlice, options: LoaderOptions, decode: DecodeBatch
    ) -> None:
        self.targets = source.targets
        self._source = source
        self._sampler = replica_slice.sampler
        self._options = options
        self._bad = BadRecordCounter(options)
        self._decode = decode
        self._threads = ThreadPoolExecutor(options.threads, "reader")  # which start with the first record to read
        self._decoder = Decoder()
        self._ahead = ReadAhead(replica_slice, options.ahead, self._begin, Future.cancel)

    def microbatch(self, number: int) -> Fields:
        """One microbatch on the device; the threads continue to read the ones after it."""
        records = self._ahead.take(number).result()
        indices, seed = self._sampler.indices(number), self._sampler.augment_seed(number)
        decoded, labels = self._on_device(records) or self._on_cpu(indices)
        side = self._source.augmentation.side
        images = [
            draw_view(pixels, self._source.view(seed, int(index), *pixels.shape[1:]), side)
            for index, pixels in zip(indices, decoded, strict=True)
        ]
        return self._source.fields(
            torch.stack(images), torch.stack(labels).to(self._options.device), self._options.dtype
        )

    def close(self) -> None:
        self._ahead.abandon()
        self._threads.shutdown()
        self._threads = ThreadPoolExecutor(self._options.threads, "reader")

    def _begin(self, number: int) -> Future[list[Record] | None]:
        return self._threads.submit(self._read, self._sampler.indices(number))

    def _read(self, indices: Indices) -> list[Record] | None:
        """The records of a microbatch; None unless all are readable JPEGs of a size that may be decoded."""
        try:
            records = [self._source.records.get(int(index)) for index in indices]
            for record in records:
                height, width, _ = jpeg_header(record.data)
                self._source.require_view(record.name, height, width)
        except BadRecordError:
            return None
        return records

    def _on_device(self, records: list[Record] | None) -> tuple[list[Tensor], list[Tensor]] | None:
        """Pixels [RGB, rows, columns] and labels; None if a record is bad."""
        if records is None:
            return None
        try:
            decoded = self._decode([record.data for record in records])
        except torch.OutOfMemoryError:  # a RuntimeError, but not caused by a record
            raise
        except (RuntimeError, ValueError):
            return None
        sizes = (pixels.shape[1:] for pixels in decoded)
        return decoded, [self._source.labels.read(record, *size) for record, size in zip(records, sizes, strict=True)]

    def _on_cpu(self, indices: Indices) -> tuple[list[Tensor], list[Tensor]]:
        decoded, labels = [], []
        for index in indices:
            label, pixels, bad = self._source.first_good(int(index), self._decoder)
            for one in bad:
                self._bad.count(one)
            decoded.append(torch.from_numpy(pixels.copy()).permute(2, 0, 1).to(self._options.device))
            labels.append(label)
        return decoded, labels


def draw_view(pixels: Tensor, view: View, side: int) -> Tensor:
    """A view of uint8 [RGB, rows, columns], as uint8 [side, side, RGB] on the same device."""
    box = pixels[:, view.top : view.top + view.height, view.left : view.left + view.width]
    box = (box.flip(2) if view.is_mirrored else box).unsqueeze(0).float()
    size = (view.rows, view.columns)
    resized = box if box.shape[2:] == size else functional.interpolate(box, size, mode="bilinear", antialias=True)
    border = (-view.right, view.right + side - view.columns, -view.down, view.down + side - view.rows)
    window = functional.pad(resized, border)  # a negative border crops
    drawn = window.squeeze(0).permute(1, 2, 0).round_().clamp_(0, 255).to(torch.uint8)
    drawn = drawn if view.jitter is None else jittered(drawn, view.jitter)
    if view.cutout is not None:
        view.cutout.apply(drawn)
    return drawn


def require_cacheable(source: ImageSource) -> None:
    """Raise if the augmentation does more to sizes than shift and cut out; the rules exclude --jitter."""
    augmentation = source.augmentation
    if source.labels.follows_view:
        raise UserError("--decode once can't crop masks; use --decode cpu")
    if augmentation.cropping is not Cropping.PADDED:
        raise UserError(
            f"--decode once caches whole images, but --crop is {augmentation.cropping} at {augmentation.side} pixels; "
            "use --crop padded or --decode cpu"
        )


class CachedLoader:
    """Decodes every image once, keeps all of them on the device, and draws each epoch's views there."""

    def __init__(self, source: ImageSource, replica_slice: ReplicaSlice, options: LoaderOptions, pool: Pool) -> None:
        require_cacheable(source)
        self.targets = source.targets
        self._source = source
        self._sampler = replica_slice.sampler
        self._options = options
        self._pool = pool

    def microbatch(self, number: int) -> Fields:
        images, labels = self._cached
        indices, seed = self._sampler.indices(number), self._sampler.augment_seed(number)
        rows = torch.from_numpy(indices).to(self._options.device, non_blocking=True)
        pixels = images[rows] if seed is None else self._views(images, rows, indices, seed)
        return self._source.fields(pixels, labels[rows], self._options.dtype)

    def close(self) -> None:
        self._pool.close()

    @cached_property
    def _cached(self) -> tuple[Tensor, Tensor]:
        """Every image, whole, and its label; decoded and counted at the first use."""
        images, labels = self._source.allocate(len(self._source))
        batch = Batch(np.arange(len(self._source)), None, Buffers(images, labels))
        self._pool.submit(batch, self._source.load)
        self._pool.wait(batch)
        BadRecordCounter(self._options).count_all(batch.bad)
        return images.to(self._options.device), labels.to(self._options.device)

    def _views(self, images: Tensor, rows: Tensor, indices: Indices, seed: AugmentSeed) -> Tensor:
        """The training views of the samples in these rows."""
        augmentation = self._source.augmentation
        shifts = torch.from_numpy(augmentation.shifts(seed.seed, seed.epoch, indices))
        down, right, mirrored, top, left = shifts.to(images.device, non_blocking=True).unbind(1)
        windows = _windows(images, rows, down, right, mirrored.bool())
        if not augmentation.cutout:
            return windows
        return windows * ~_squares(top, left, augmentation.cutout, augmentation.side)


def _windows(images: Tensor, rows: Tensor, down: Tensor, right: Tensor, mirrored: Tensor) -> Tensor:
    """A window of each row's image, as large as the image; black outside it."""
    side = images.shape[1]
    steps = torch.arange(side, device=images.device)
    lines, columns = down[:, None] + steps, right[:, None] + steps
    columns = torch.where(mirrored[:, None], side - 1 - columns, columns)
    windows = images[rows[:, None, None], lines.clamp(0, side - 1)[:, :, None], columns.clamp(0, side - 1)[:, None]]
    return windows * _squares(-down, -right, side, side)


def _squares(top: Tensor, left: Tensor, side: int, whole: int) -> Tensor:
    """A mask [images, rows, columns, 1] of one square per image of `whole` x `whole` pixels."""
    steps = torch.arange(whole, device=top.device)
    in_rows, in_columns = ((steps >= first[:, None]) & (steps < first[:, None] + side) for first in (top, left))
    return (in_rows[:, :, None] & in_columns[:, None])[..., None]
