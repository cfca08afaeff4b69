"""JPEGs decoded on the GPU, by torchcodec where it is installed: the same order, crops and labels as on the CPU. Small images decoded once and kept on the device, where each epoch shifts and mirrors them anew."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from stagewright.data.augment import Cropping, View
from stagewright.data.decode import Decoder, jittered
from stagewright.data.microbatches import BadRecords, Decode, Loading, Share
from stagewright.data.order import Indices
from stagewright.data.pool import Batch, Pool
from stagewright.data.records import BadRecord, Record
from stagewright.data.sources import Draw, ImageSource

DecodeBatch = Callable[[list[bytes]], list[Tensor]]  # JPEGs to uint8 [RGB, rows, columns] on the device
_JPEG = b"\xff\xd8"


def require_decoder(decode: str, device: str) -> None:
    """An error where JPEGs can't be decoded there."""
    if decode == Decode.GPU:
        if device == "cpu":
            raise ValueError(f"--decode gpu needs --device cuda, but the device is {device}; use --decode cpu")
        torchcodec_decoder(torch.device(device))


def torchcodec_decoder(device: torch.device) -> DecodeBatch:
    """A whole batch in one call of nvJPEG."""
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"--decode gpu needs torchcodec 0.17 or later, which can't be used here ({reason}); "
            "pip install torchcodec, or use --decode cpu"
        ) from error

    def decode(batch: list[bytes]) -> list[Tensor]:
        images: list[Tensor] = decode_jpeg(batch, mode="RGB", device=device)
        return images

    return decode


class DeviceLoader:
    """Threads read records ahead; the device decodes a microbatch at once, then crops, resizes and normalises it.

    A microbatch that is not all good JPEGs is decoded on the CPU, which names the bad ones and replaces them.
    """

    def __init__(self, source: ImageSource, share: Share, loading: Loading, decode: DecodeBatch) -> None:
        self._source = source
        self._share = share
        self._loading = loading
        self._bad = BadRecords(loading)
        self._decode = decode
        self._threads = self._new_threads()
        self._decoder = Decoder()
        self._window: deque[tuple[int, Future[list[Record] | None]]] = deque()

    def microbatch(self, number: int) -> tuple[Tensor, Tensor]:
        """One microbatch on the device; the threads go on reading those after it."""
        if self._window and self._window[0][0] != number:
            self._abandon()
        self._fill(number)
        records = self._window.popleft()[1].result()
        indices, draw = self._share.numbering.indices(number), self._share.numbering.draw(number)
        pictures, labels = self._on_device(records) or self._on_cpu(indices)
        side = self._source.augmentation.side
        images = [
            draw_view(picture, self._source.view(draw, int(index), *picture.shape[1:]), side)
            for index, picture in zip(indices, pictures, strict=True)
        ]
        inputs = self._source.normalization.apply(torch.stack(images), self._loading.dtype)
        return inputs, torch.tensor(labels, device=self._loading.device)

    def close(self) -> None:
        self._abandon()
        self._threads.shutdown()
        self._threads = self._new_threads()

    def _new_threads(self) -> ThreadPoolExecutor:
        """Threads that start when there is something to read."""
        return ThreadPoolExecutor(self._loading.threads, "reader")

    def _abandon(self) -> None:
        """Drop what was read ahead, and read no more of it."""
        for _, reading in self._window:
            reading.cancel()
        self._window.clear()

    def _fill(self, number: int) -> None:
        first = self._window[-1][0] + self._share.step if self._window else number
        for following in range(first, max(self._share.stop, number + 1), self._share.step):
            if len(self._window) > self._loading.ahead:
                break
            indices = self._share.numbering.indices(following)
            self._window.append((following, self._threads.submit(self._read, indices)))

    def _read(self, indices: Indices) -> list[Record] | None:
        """The records of a microbatch, where all can be read and are JPEGs."""
        try:
            records = [self._source.records.get(int(index)) for index in indices]
        except BadRecord:
            return None
        return records if all(record.data[:2] == _JPEG for record in records) else None

    def _on_device(self, records: list[Record] | None) -> tuple[list[Tensor], list[int]] | None:
        """Pictures [RGB, rows, columns] and labels; nothing where a record is bad."""
        if records is None:
            return None
        try:
            return self._decode([record.data for record in records]), [record.label for record in records]
        except torch.OutOfMemoryError:  # a RuntimeError that no record is to blame for
            raise
        except (RuntimeError, ValueError):
            return None

    def _on_cpu(self, indices: Indices) -> tuple[list[Tensor], list[int]]:
        pictures, labels = [], []
        for index in indices:
            record, pixels, bad = self._source.find(int(index), self._decoder)
            for one in bad:
                self._bad.count(one)
            pictures.append(torch.from_numpy(pixels.copy()).permute(2, 0, 1).to(self._loading.device))
            labels.append(record.label)
        return pictures, labels


def draw_view(pixels: Tensor, view: View, side: int) -> Tensor:
    """A view of uint8 [RGB, rows, columns], as uint8 [side, side, RGB] on the same device."""
    box = pixels[:, view.top : view.top + view.height, view.left : view.left + view.width]
    box = (box.flip(2) if view.is_mirrored else box).unsqueeze(0).float()
    size = (view.rows, view.columns)
    resized = box if box.shape[2:] == size else functional.interpolate(box, size, mode="bilinear", antialias=True)
    black = (-view.right, view.right + side - view.columns, -view.down, view.down + side - view.rows)
    window = functional.pad(resized, black)  # less than nothing is cut away
    seen = window.squeeze(0).permute(1, 2, 0).round_().clamp_(0, 255).to(torch.uint8)
    seen = seen if view.jitter is None else jittered(seen, view.jitter)
    if view.hole is not None:
        view.hole.blacken(seen)
    return seen


def require_keepable(source: ImageSource) -> None:
    """An error where an epoch asks for more than whole images, shifted and mirrored."""
    asked = source.augmentation
    if asked.cropping is not Cropping.PADDED:
        raise ValueError(
            f"--decode once keeps whole images, but --crop is {asked.cropping} at {asked.side} pixels; "
            "use --crop padded or --decode cpu"
        )
    if asked.jitter:
        raise ValueError(f"--decode once changes no colours, but --jitter is {asked.jitter:g}; leave one out")


class KeptLoader:
    """The samples of an image source, as the loader that decodes them anew gives them."""

    def __init__(self, source: ImageSource, share: Share, loading: Loading, pool: Pool) -> None:
        require_keepable(source)
        self._source = source
        self._share = share
        self._loading = loading
        self._pool = pool

    def microbatch(self, number: int) -> tuple[Tensor, Tensor]:
        images, labels = self._kept
        indices, draw = self._share.numbering.indices(number), self._share.numbering.draw(number)
        rows = torch.from_numpy(indices).to(self._loading.device, non_blocking=True)
        pixels = images[rows] if draw is None else self._views(images, rows, indices, draw)
        return self._source.normalization.apply(pixels, self._loading.dtype), labels[rows]

    def close(self) -> None:
        self._pool.close()

    @cached_property
    def _kept(self) -> tuple[Tensor, Tensor]:
        """Every image, whole, and its label; bad ones are told of now."""
        images, labels = self._source.empty(len(self._source))
        batch = Batch(np.arange(len(self._source)), None, images, labels)
        self._pool.submit(batch, self._source.load)
        self._pool.wait(batch)
        bad_records = BadRecords(self._loading)
        for row in sorted(batch.bad):
            for bad in batch.bad[row]:
                bad_records.count(bad)
        return images.to(self._loading.device), torch.from_numpy(labels).to(self._loading.device)

    def _views(self, images: Tensor, rows: Tensor, indices: Indices, draw: Draw) -> Tensor:
        """What training sees of the samples in these rows."""
        augmentation = self._source.augmentation
        shifts = torch.from_numpy(augmentation.shifts(draw.seed, draw.epoch, indices))
        down, right, mirrored, top, left = shifts.to(images.device, non_blocking=True).unbind(1)
        seen = _windows(images, rows, down, right, mirrored.bool())
        return seen * ~_squares(top, left, augmentation.cutout, augmentation.side) if augmentation.cutout else seen


def _windows(images: Tensor, rows: Tensor, down: Tensor, right: Tensor, mirrored: Tensor) -> Tensor:
    """A window of each row's image, of the image's size; black where it reaches beyond."""
    side = images.shape[1]
    steps = torch.arange(side, device=images.device)
    lines, columns = down[:, None] + steps, right[:, None] + steps
    columns = torch.where(mirrored[:, None], side - 1 - columns, columns)
    seen = images[rows[:, None, None], lines.clamp(0, side - 1)[:, :, None], columns.clamp(0, side - 1)[:, None]]
    return seen * _squares(-down, -right, side, side)


def _squares(top: Tensor, left: Tensor, side: int, whole: int) -> Tensor:
    """Which pixels of `whole` x `whole` images lie in a square each, as [images, rows, columns, 1]."""
    steps = torch.arange(whole, device=top.device)
    in_rows, in_columns = ((steps >= first[:, None]) & (steps < first[:, None] + side) for first in (top, left))
    return (in_rows[:, :, None] & in_columns[:, None])[..., None]
