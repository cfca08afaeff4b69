"""JPEGs decoded on the GPU, by torchcodec where it is installed: the same order, crops and labels as on the CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from stagewright.data.augment import View
from stagewright.data.decode import Decoder
from stagewright.data.images import Bad, Draw, ImageSource
from stagewright.data.loading import BadRecords, Decode, Loading
from stagewright.data.numbering import Share
from stagewright.data.order import Indices
from stagewright.data.records import BadRecord, DataError, Record
from stagewright.data.render import jittered

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


@dataclass(frozen=True, slots=True)
class _Read:
    """One sample before it is decoded, and the bad records before it."""

    index: int  # which chose its view
    record: Record
    bad: tuple[Bad, ...]


class DeviceLoader:
    """Threads read records ahead; the device decodes a microbatch at once, then crops, resizes and normalises it."""

    def __init__(self, source: ImageSource, share: Share, loading: Loading, decode: DecodeBatch) -> None:
        self._source = source
        self._share = share
        self._loading = loading
        self._bad = BadRecords(loading)
        self._decode = decode
        self._threads = ThreadPoolExecutor(loading.threads, "reader")
        self._decoder = Decoder()
        self._window: deque[tuple[int, Future[list[_Read]]]] = deque()

    def microbatch(self, number: int) -> tuple[Tensor, Tensor]:
        """One microbatch on the device; the threads go on reading those after it."""
        if self._window and self._window[0][0] != number:
            self._window.clear()
        self._fill(number)
        reads = self._window.popleft()[1].result()
        draw = self._share.numbering.draw(number)
        images, labels = [], []
        for read, pixels in zip(reads, self._pixels([read.record for read in reads]), strict=True):
            sample = read
            if pixels is None:  # it was read but can't be decoded: the next record takes its place
                sample, pixels = self._replace(read)
            for bad in sample.bad:
                self._bad.count(bad)
            images.append(draw_view(pixels, self._view(draw, read.index, pixels), self._source.augmentation.side))
            labels.append(sample.record.label)
        inputs = self._source.normalization.apply(torch.stack(images), self._loading.dtype)
        return inputs, torch.tensor(labels, device=self._loading.device)

    def close(self) -> None:
        """Nothing is left to end: what was read ahead is dropped."""
        self._window.clear()

    def _fill(self, number: int) -> None:
        first = self._window[-1][0] + self._share.step if self._window else number
        for following in range(first, max(self._share.stop, number + 1), self._share.step):
            if len(self._window) > self._loading.ahead:
                break
            self._window.append((following, self._threads.submit(self._read, self._share.numbering.indices(following))))

    def _read(self, indices: Indices) -> list[_Read]:
        return [self._read_good(int(index), 0, ()) for index in indices]

    def _read_good(self, index: int, skipped: int, bad: tuple[Bad, ...]) -> _Read:
        """The record at an index, or the next one that can be read."""
        records = self._source.records
        for step in range(skipped, len(records)):
            candidate = (index + step) % len(records)
            try:
                return _Read(index, records.get(candidate), bad)
            except BadRecord as error:
                bad = (*bad, Bad(candidate, str(error)))
        raise DataError(f"none of the {len(records)} records can be used; the first: {bad[0].reason}")

    def _pixels(self, records: Sequence[Record]) -> list[Tensor | None]:
        """Each record decoded, [RGB, rows, columns]; nothing where it can't be."""
        try:
            if all(record.data[:2] == _JPEG for record in records):
                return list(self._decode([record.data for record in records]))
        except (RuntimeError, ValueError):  # one of them is bad: find out which, and spare the others
            pass
        return [self._decode_one(record) for record in records]

    def _decode_one(self, record: Record) -> Tensor | None:
        try:
            pixels = torch.from_numpy(self._decoder.decode(record.data).copy())
        except BadRecord:
            return None
        return pixels.permute(2, 0, 1).to(self._loading.device)

    def _replace(self, read: _Read) -> tuple[_Read, Tensor]:
        """The next sample that can be read and decoded."""
        while True:
            try:
                self._decoder.decode(read.record.data)
            except BadRecord as error:
                reason = f"{read.record.name}: {error}"
            index = (read.index + len(read.bad)) % len(self._source.records)
            read = self._read_good(read.index, len(read.bad) + 1, (*read.bad, Bad(index, reason)))
            if (pixels := self._decode_one(read.record)) is not None:
                return read, pixels

    def _view(self, draw: Draw | None, index: int, pixels: Tensor) -> View:
        height, width = pixels.shape[1:]
        if draw is None:
            return self._source.augmentation.evaluation(height, width)
        return self._source.augmentation.training(draw.seed, draw.epoch, index, height, width)


def draw_view(pixels: Tensor, view: View, side: int) -> Tensor:
    """A view of uint8 [RGB, rows, columns], as uint8 [side, side, RGB] on the same device."""
    box = pixels[:, view.top : view.top + view.height, view.left : view.left + view.width]
    box = (box.flip(2) if view.is_mirrored else box).unsqueeze(0).float()
    size = (view.rows, view.columns)
    resized = box if box.shape[2:] == size else functional.interpolate(box, size, mode="bilinear", antialias=True)
    black = (-view.right, view.right + side - view.columns, -view.down, view.down + side - view.rows)
    window = functional.pad(resized, black)  # less than nothing is cut away
    seen = window.squeeze(0).permute(1, 2, 0).round_().clamp_(0, 255).to(torch.uint8)
    return seen if view.jitter is None else jittered(seen, view.jitter)
