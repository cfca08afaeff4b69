"""`data bench`: how fast encoded images become samples here: decoded by one thread, and by whole loaders.

Loaders read from memory, in the three forms that `data convert` makes: as they are, shrunk and raw.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from stagewright.bench.pictures import HEIGHT, WIDTH, InMemory, make_jpegs
from stagewright.bench.result import Outcome, Row, measured_row, new_outcome
from stagewright.data.augment import Augmentation, Cropping, View
from stagewright.data.convert import Shrink
from stagewright.data.decode import NORMALIZATIONS, Decoder, render
from stagewright.data.formats.records import Record
from stagewright.data.loader import ImageLoader
from stagewright.data.order import Order, ReplicaSlice, TrainingSampler
from stagewright.data.pool import LoaderOptions, Pool
from stagewright.data.processes import ProcessPool
from stagewright.data.sources import ImageSource
from stagewright.errors import counted

SIDE, SHRUNK = 224, 256  # of a crop, and the shorter side of shrunk images
BATCH = 64
SAMPLES = 1000 * BATCH  # of an epoch, more than any turn loads
SECONDS = 1.0  # of a measurement
REPEATS, IMAGES, MOST_THREADS = 15, 64, 2  # unless options say otherwise
_SMALL_BATCH = 16
Way = Callable[[bytes, View], object]  # from an encoded image to a crop


def measure(repeats: int | None, images: int | None, most_threads: int | None) -> Outcome:
    """Time decoding and whole loaders, and what a loader costs beside."""
    repeats = REPEATS if repeats is None else repeats
    images = IMAGES if images is None else images
    torch.set_num_threads(1)
    large = photographs()
    path, views = our_path(SIDE), large.views(0, range(images))
    decoded = measured_row(large.title, "one thread", [path_rate(path, large.encoded, views) for _ in range(repeats)])
    rows = [decoded]
    for what, form in forms(large).items():
        rows += loader_rows(f"loader, {what}", form, MOST_THREADS if most_threads is None else most_threads)
    figures = overheads(large, max(repeats // 4, 1), 8 * images)  # longer, so that starting a loader hardly counts
    title = "Decoding, random resized crop and flip, and whole loaders"
    return new_outcome("data", title, repeats, rows=tuple(rows), figures=figures)


def photographs() -> Images:
    return Images(make_jpegs(), Augmentation(SIDE, Cropping.RESIZED), HEIGHT, WIDTH)


@dataclass(frozen=True, slots=True)
class Images:
    """Encoded images of one size, and how they are augmented."""

    encoded: Sequence[bytes]
    augmentation: Augmentation
    height: int
    width: int

    @property
    def title(self) -> str:
        side = self.augmentation.side
        return f"{self.width}x{self.height} JPEG of {self.size} bytes to {side}x{side}, one thread"

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


def overheads(large: Images, repeats: int, images: int) -> dict[str, float]:
    """What the loader takes beyond decoding, for small images and large ones."""
    small = Images(make_jpegs(32, 32), Augmentation(32, Cropping.PADDED), 32, 32)
    beyond = "microseconds per image that the loader takes beyond decoding"
    sizes = {"32x32": small, f"{WIDTH}x{HEIGHT}": large}
    return {f"{beyond}, {size}": 1e6 * one.overhead(repeats, images) for size, one in sizes.items()}


def our_path(side: int) -> Way:
    """Stagewright's own way from a JPEG to a crop."""
    decoder, target = Decoder(), torch.zeros(side, side, 3, dtype=torch.uint8)

    def path(data: bytes, view: View) -> object:
        render(decoder.decode(data), view, target)
        return target

    return path


def path_rate(path: Way, jpegs: Sequence[bytes], views: Sequence[View]) -> float:
    """Images per processor second of one way."""
    path(jpegs[0], views[0])
    began = time.process_time()
    for number, view in enumerate(views):
        path(jpegs[number % len(jpegs)], view)
    return len(views) / (time.process_time() - began)


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


def loader_rows(group: str, images: Images, most: int, seconds: float = SECONDS) -> list[Row]:
    """Images per second by up to so many threads and processes, of loaders whose batches are not used."""
    counts = sorted({most, *(4**power for power in range(most.bit_length()) if 4**power <= most)})
    pools: dict[str, Callable[[], Pool | ProcessPool]] = {}
    pools |= {counted(count, "thread"): partial(Pool, count) for count in counts}
    pools |= {counted(count, "process", "es"): partial(ProcessPool, count) for count in counts}
    return [measured_row(group, name, [loader_rate(images, make(), seconds)]) for name, make in pools.items()]


def loader_rate(images: Images, pool: Pool | ProcessPool, seconds: float = SECONDS) -> float:
    loader, numbers = images.loader(pool, BATCH, SAMPLES, 10**9), iter(range(10**9))
    try:
        return batch_rate(lambda: loader.pixels(next(numbers)), LoaderOptions().ahead + 1, seconds)
    finally:
        loader.close()


def batch_rate(next_batch: Callable[[], object], prepared: int, seconds: float) -> float:
    """Images per second, after the batches that were prepared before."""
    for _ in range(prepared):
        next_batch()
    began, passed, count = time.perf_counter(), 0.0, 0
    while not count or passed < seconds:
        next_batch()
        count, passed = count + BATCH, time.perf_counter() - began
    return count / passed
