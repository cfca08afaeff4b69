"""`data bench`: how fast encoded images become samples here: decoded by one thread, and by whole loaders.

Loaders read from memory, in the three forms that `data convert` makes: as they are, shrunk and raw.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import simplejpeg
import torch

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
HEIGHT, WIDTH = 375, 500  # of a photograph
_DISTINCT = 16
_QUALITY = 94
Way = Callable[[bytes, View], object]  # from an encoded image to a crop


def measure(repeats: int | None, images: int | None, most_threads: int | None) -> Outcome:
    """Time decoding by one thread, and whole loaders."""
    repeats, photos, path = repeats or REPEATS, photographs(), our_path(SIDE)
    torch.set_num_threads(1)
    views = photos.views(0, range(images or IMAGES))
    rates = [path_rate(path, photos.encoded, views) for _ in range(repeats)]
    rows = [measured_row(photos.title, "one thread", rates)]
    for what, form in forms(photos).items():
        rows += loader_rows(f"loader, {what}", form, most_threads or MOST_THREADS)
    title = "Decoding, random resized crop and flip, and whole loaders"
    return new_outcome("data", title, repeats, rows=tuple(rows))


def make_jpegs(height: int = HEIGHT, width: int = WIDTH) -> list[bytes]:
    """Images of waves under noise, with the size and about the bytes of an ImageNet photograph."""
    generator = np.random.default_rng(0)
    rows, columns = np.mgrid[0:height, 0:width]
    jpegs = []
    for _ in range(_DISTINCT):
        picture = 128 + generator.normal(0, 14, (height, width, 3))
        for across, down, phase in generator.uniform(0, 0.15, (6, 3)):
            picture += 20 * np.sin(across * columns + down * rows + 40 * phase)[..., None]
        jpegs.append(simplejpeg.encode_jpeg(picture.clip(0, 255).astype(np.uint8), _QUALITY, "RGB", "420"))
    return jpegs


class InMemory:
    """Records in memory, so that the disk is not measured."""

    def __init__(self, encoded: Sequence[bytes], samples: int) -> None:
        self.classes = 1000
        self.class_names: tuple[str, ...] = ()
        self.fingerprint = f"memory/{samples}"
        self._encoded = encoded
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def get(self, index: int) -> Record:
        return Record(self._encoded[index % len(self._encoded)], index % self.classes, self.name(index))

    def name(self, index: int) -> str:
        return f"record {index}"


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
