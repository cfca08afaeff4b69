"""How fast whole loaders are: Stagewright's by threads and by processes, and torchvision's as people write it.

All load the same encoded images from memory, in the three forms that `data convert` makes: as they are, shrunk and raw.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from stagewright.bench.pictures import InMemory
from stagewright.bench.result import Ratio, Row, measured_row, ratio_of
from stagewright.data.augment import Augmentation, View
from stagewright.data.convert import Shrink
from stagewright.data.decode import NORMALIZATIONS, Decoder, is_jpeg, render
from stagewright.data.formats.records import Record
from stagewright.data.loader import ImageLoader
from stagewright.data.order import Order, ReplicaSlice, TrainingSampler
from stagewright.data.pool import LoaderOptions, Pool
from stagewright.data.processes import ProcessPool
from stagewright.data.sources import ImageSource
from stagewright.errors import UserError, counted
from stagewright.model.libraries import import_library

SHRUNK = 256  # the shorter side, for crops of 224
_SMALL_BATCH, _BATCH = 16, 64
_SAMPLES = 1000 * _BATCH  # of an epoch, more than any turn loads
_SECONDS = 1.0  # of a measurement
_TURNS = 3
_PREFETCHED = 2  # batches of each of torch's workers, by default
NextBatch = Callable[[], object]
Transform = Callable[[bytes], Tensor]


@dataclass(frozen=True, slots=True)
class Images:
    """Encoded images of one size, and how they are augmented."""

    encoded: Sequence[bytes]
    augmentation: Augmentation
    height: int
    width: int

    @property
    def size(self) -> int:
        """Mean bytes of an encoded image."""
        return sum(map(len, self.encoded)) // len(self.encoded)

    def views(self, epoch: int, indices: Iterable[int]) -> list[View]:
        return [self.augmentation.training_view(0, epoch, int(index), self.height, self.width) for index in indices]

    def loader(self, pool: Pool | ProcessPool, batch: int, images: int, stop: int) -> ImageLoader:
        source = ImageSource(InMemory(self.encoded, images), self.augmentation, NORMALIZATIONS["imagenet"])
        share = ReplicaSlice(TrainingSampler(Order(images, batch), 1), 1, stop)
        return ImageLoader(source, share, LoaderOptions(), pool)

    def overhead(self, repeats: int, images: int) -> float:
        """Processor seconds per image of the loader, minus those of decoding and cropping in a plain loop.

        The loop writes to as much memory as the loader, since that much does not stay in the caches.
        """
        size = _SMALL_BATCH
        buffers = torch.zeros((LoaderOptions().ahead + 1) * size, *2 * (self.augmentation.side,), 3, dtype=torch.uint8)
        order, batches, differences = Order(images, size), images // size, []
        for epoch in range(repeats):
            numbers = range(epoch * batches, (epoch + 1) * batches)
            loader = self.loader(Pool(1), size, images, numbers.stop)
            began = time.process_time()
            for number in numbers:
                loader.pixels(number)
            loader.close()
            through_loader = time.process_time() - began
            indices = [int(index) for number in numbers for index in order.microbatch(number, 1)]
            views, decoder = self.views(epoch, indices), Decoder()
            began = time.process_time()
            for number, (index, view) in enumerate(zip(indices, views, strict=True)):
                render(decoder.decode(self.encoded[index % len(self.encoded)]), view, buffers[number % len(buffers)])
            differences.append((through_loader - (time.process_time() - began)) / len(indices))
        return median(differences)


def forms(images: Images) -> dict[str, Images]:
    """The same images as they are, shrunk, and as raw pixels of that size: what `data convert` makes of them."""
    found = {f"JPEGs of {images.size:,} bytes": images}
    for shrink in (Shrink(SHRUNK), Shrink(SHRUNK, is_raw=True)):
        made = [shrink.applied(Record(data, 0, "")).data for data in images.encoded]
        height, width, _ = Decoder().decode(made[0]).shape
        smaller = replace(images, encoded=made, height=height, width=width)
        what = "raw pixels" if shrink.is_raw else "JPEGs"
        found[f"{what} of {smaller.size:,} bytes (--side {SHRUNK}{' --raw' if shrink.is_raw else ''})"] = smaller
    return found


def compare_loaders(
    images: Images, most: int, turns: int = _TURNS, seconds: float = _SECONDS
) -> tuple[list[Row], list[Ratio]]:
    """Images per second of each form by up to `most` threads and processes; with the most, beside torchvision's loader.

    Wall-clock time, of loaders that have started and whose batches are not used.
    """
    rows: list[Row] = []
    ratios: list[Ratio] = []
    for what, form in forms(images).items():
        group = f"loader, {what}"
        for count in _counts(most):
            rows.append(measured_row(group, counted(count, "thread"), [_alone(form, Pool(count), seconds)]))
        for count in _counts(most)[:-1]:
            rows.append(measured_row(group, _processes(count), [_alone(form, ProcessPool(count), seconds)]))
        rates = _in_turns(form, most, turns, seconds)
        ours, *theirs = (measured_row(group, name, found) for name, found in rates.items())
        rows += [ours, *theirs]
        ratios += [ratio_of(ours, other) for other in theirs]
    return rows, ratios


def _counts(most: int) -> list[int]:
    """One, four, sixteen and so on, and the most."""
    return sorted({most, *(4**power for power in range(most.bit_length()) if 4**power <= most)})


def _processes(count: int) -> str:
    return counted(count, "process", "es")


def _alone(images: Images, pool: Pool | ProcessPool, seconds: float) -> float:
    loader, numbers = images.loader(pool, _BATCH, _SAMPLES, 10**9), iter(range(10**9))
    try:
        return _rate(lambda: loader.pixels(next(numbers)), LoaderOptions().ahead + 1, seconds)
    finally:
        loader.close()


def _in_turns(images: Images, workers: int, turns: int, seconds: float) -> dict[str, list[float]]:
    """The rates of this loader and, where it can be imported, torchvision's, with as many processes.

    Each turn starts its own: what others have begun to load ahead would go on beside it.
    """
    sides: dict[str, Callable[[], float]] = {_processes(workers): lambda: _alone(images, ProcessPool(workers), seconds)}
    if (transform := torchvision_transform(images)) is not None:
        sides[f"{transform[0]}, {_processes(workers)}"] = partial(_torchvision, images, transform[1], workers, seconds)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(turns):
        for name in sorted(sides, reverse=number % 2 == 1):
            rates[name].append(sides[name]())
    return rates


def _torchvision(images: Images, transform: Transform, workers: int, seconds: float) -> float:
    dataset = _Transformed(InMemory(images.encoded, _SAMPLES), transform)
    batches = iter(DataLoader(dataset, _BATCH, shuffle=True, num_workers=workers))
    return _rate(partial(next, batches), _PREFETCHED * workers, seconds)


def _rate(next_batch: NextBatch, prepared: int, seconds: float) -> float:
    """Images per second, after the batches that were prepared before."""
    for _ in range(prepared):
        next_batch()
    began, passed, count = time.perf_counter(), 0.0, 0
    while not count or passed < seconds:
        next_batch()
        count, passed = count + _BATCH, time.perf_counter() - began
    return count / passed


class _Transformed(Dataset[tuple[Tensor, int]]):
    """A dataset as users write them."""

    def __init__(self, records: InMemory, transform: Transform) -> None:
        self._records = records
        self._transform = transform

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        record = self._records.get(index)
        return self._transform(record.data), record.label


def torchvision_transform(images: Images) -> tuple[str, Transform] | None:
    """torchvision's way from bytes to a random crop, by its own decoder where that works, with its name."""
    try:
        io_of, v2 = import_library("torchvision.io"), import_library("torchvision.transforms.v2")
    except (UserError, ImportError, OSError, RuntimeError):  # not installed, or not built for this machine
        return None
    change = [v2.RandomResizedCrop(images.augmentation.side, antialias=True), v2.RandomHorizontalFlip()]
    of_tensors, of_pictures = v2.Compose(change), v2.Compose([*change, v2.PILToTensor()])

    def by_torchvision(data: bytes) -> Tensor:
        pixels = io_of.decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode="RGB")
        cropped: Tensor = of_tensors(pixels)
        return cropped

    def by_pillow(data: bytes) -> Tensor:
        cropped: Tensor = of_pictures(Image.open(io.BytesIO(data)).convert("RGB"))
        return cropped

    if is_jpeg(images.encoded[0]):
        try:
            by_torchvision(images.encoded[0])
            return "torchvision", by_torchvision
        except (AttributeError, RuntimeError):  # its decoder was built for another torch
            pass
    return "torchvision with Pillow", by_pillow
