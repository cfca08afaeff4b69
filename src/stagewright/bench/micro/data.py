"""`bench data` and `data bench`: how fast encoded images become samples, with Stagewright and in stock ways.

The stock ways are Pillow, simplejpeg with torch, torchvision and DALI, as far as they are installed. All sides decode
and crop the same images on one thread, in turns. The loader's speed and overhead and the time to load an index follow.
"""

from __future__ import annotations

import io
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from stagewright.bench.statistics import Interval, median_ratio
from stagewright.data.augment import Augmentation, Cropping, View
from stagewright.data.decode import NORMALIZATIONS, Decoder, render
from stagewright.data.index import IndexBuilder, load_index, save_index
from stagewright.data.loader import ImageLoader
from stagewright.data.order import Order, ReplicaSlice, TrainingSampler
from stagewright.data.pool import LoaderOptions, Pool
from stagewright.data.records import Record
from stagewright.data.sources import ImageSource
from stagewright.hardware.environment import read_environment

StockPath = Callable[[bytes, View], object]
HEIGHT, WIDTH, SIDE = 375, 500, 224
_DISTINCT = 16
_QUALITY = 94
_IMAGENET = 1_281_167
_MICROBATCH = 16
_REPEATS, _IMAGES, _MOST_THREADS = 30, 64, 2  # unless options say otherwise
_BATCHES = 48


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

    def __init__(self, jpegs: Sequence[bytes], samples: int) -> None:
        self.classes = 1000
        self.class_names: tuple[str, ...] = ()
        self.fingerprint = f"memory/{samples}"
        self._jpegs = jpegs
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def get(self, index: int) -> Record:
        return Record(self._jpegs[index % len(self._jpegs)], index % self.classes, self.name(index))

    def name(self, index: int) -> str:
        return f"record {index}"


@dataclass(frozen=True, slots=True)
class Side:
    """One way to decode and crop, and its images per second, one value per repeat."""

    name: str
    speeds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that `bench data` measures."""

    sides: tuple[Side, ...]  # ours first
    loader: dict[int, float]  # images per second by number of threads
    overhead: dict[str, float]  # seconds per image that the loader takes beyond decoding and cropping, by image size
    index_load: float  # seconds to load an index of ImageNet's size
    jpeg_bytes: int

    def ratio(self, side: Side) -> Interval:
        return median_ratio(self.sides[0].speeds, side.speeds)

    def describe(self) -> dict[str, Any]:
        """The measurements as one JSON object."""
        return {
            "sides": [
                {"name": side.name, "median": median(side.speeds), "speeds": side.speeds}
                | {"ratio": (ratio := self.ratio(side)).value, "interval": [ratio.low, ratio.high]}
                for side in self.sides
            ],
            "loader": self.loader,
            "overhead_microseconds": {size: seconds * 1e6 for size, seconds in self.overhead.items()},
            "index_load_seconds": self.index_load,
            "jpeg_bytes": self.jpeg_bytes,
            "machine": read_environment().words(),
            "date": time.strftime("%Y-%m-%d"),
        }


def run(*, repeats: int | None, images: int | None = None, most_threads: int | None = None, as_json: bool) -> None:
    """Measure and print a table, or one JSON object; `bench data` and `data bench` are this with other options."""
    repeats = _REPEATS if repeats is None else repeats
    images = _IMAGES if images is None else images
    most_threads = _MOST_THREADS if most_threads is None else most_threads
    for flag, value, least in (("repeats", repeats, 1), ("images", images, _MICROBATCH), ("threads", most_threads, 1)):
        if value < least:
            raise ValueError(f"--{flag} is {value}; give at least {least}")
    torch.set_num_threads(1)
    outcome = measure(repeats, images, most_threads)
    if as_json:
        print(json.dumps(outcome.describe()))
    else:
        _show(outcome, f"stagewright data bench --repeats {repeats} --images {images} --threads {most_threads}")


def measure(repeats: int, images: int, most_threads: int, indexed: int = _IMAGENET) -> Outcome:
    large = Images(make_jpegs(), Augmentation(SIDE, Cropping.RESIZED), HEIGHT, WIDTH)
    small = Images(make_jpegs(32, 32), Augmentation(32, Cropping.PADDED), 32, 32)
    views = large.views(0, range(images))
    paths: dict[str, StockPath] = {"stagewright": stagewright_path(SIDE)} | stock_paths(SIDE)
    speeds: dict[str, list[float]] = {name: [] for name in paths}
    turns = deque(paths)
    for _ in range(repeats):
        for name in turns:
            speeds[name].append(_speed(paths[name], large.jpegs, views))
        turns.rotate(1)  # no side always follows the same other side
    sides = tuple(Side(name, tuple(found)) for name, found in speeds.items())
    longer = max(repeats // 4, 1), 8 * images  # so that starting a loader hardly counts
    overhead = {"32x32": small.overhead(*longer), f"{WIDTH}x{HEIGHT}": large.overhead(*longer)}
    threads = {count: large.loader_speed(count) for count in range(1, most_threads + 1)}
    return Outcome(sides, threads, overhead, _index_load(indexed), sum(map(len, large.jpegs)) // len(large.jpegs))


def stagewright_path(side: int) -> StockPath:
    """Stagewright's own way from a JPEG to a crop."""
    decoder, target = Decoder(), torch.zeros(side, side, 3, dtype=torch.uint8)

    def path(data: bytes, view: View) -> object:
        render(decoder.decode(data), view, target)
        return target

    return path


def _speed(path: StockPath, jpegs: Sequence[bytes], views: Sequence[View]) -> float:
    path(jpegs[0], views[0])
    began = time.process_time()
    for number, view in enumerate(views):
        path(jpegs[number % len(jpegs)], view)
    return len(views) / (time.process_time() - began)


@dataclass(frozen=True, slots=True)
class Images:
    """JPEGs of one size, and how they are augmented."""

    jpegs: Sequence[bytes]
    augmentation: Augmentation
    height: int
    width: int

    def views(self, epoch: int, indices: Iterable[int]) -> list[View]:
        return [self.augmentation.training_view(0, epoch, int(index), self.height, self.width) for index in indices]

    def loader(self, threads: int, images: int, stop: int) -> ImageLoader:
        source = ImageSource(InMemory(self.jpegs, images), self.augmentation, NORMALIZATIONS["imagenet"])
        share = ReplicaSlice(TrainingSampler(Order(images, _MICROBATCH), 1), 1, stop)
        return ImageLoader(source, share, LoaderOptions(threads=threads), Pool(threads))

    def loader_speed(self, threads: int) -> float:
        """Images per second of wall-clock time, of a loader whose batches are not used."""
        loader = self.loader(threads, _BATCHES * _MICROBATCH, _BATCHES)
        began = time.perf_counter()
        for number in range(_BATCHES):
            loader.pixels(number)
        seconds = time.perf_counter() - began
        loader.close()
        return _BATCHES * _MICROBATCH / seconds

    def overhead(self, repeats: int, images: int) -> float:
        """Processor seconds per image of the loader, minus those of decoding and cropping in a plain loop.

        The loop writes to as much memory as the loader, since that much does not stay in the caches.
        """
        buffers = torch.zeros(
            (LoaderOptions().ahead + 1) * _MICROBATCH, *2 * (self.augmentation.side,), 3, dtype=torch.uint8
        )
        order, batches, differences = Order(images, _MICROBATCH), images // _MICROBATCH, []
        for epoch in range(repeats):
            numbers = range(epoch * batches, (epoch + 1) * batches)
            loader = self.loader(1, images, numbers.stop)
            began = time.process_time()
            for number in numbers:
                loader.pixels(number)
            loader.close()
            through_loader = time.process_time() - began
            indices = [int(index) for number in numbers for index in order.microbatch(number, 1)]
            views, decoder = self.views(epoch, indices), Decoder()
            began = time.process_time()
            for number, (index, view) in enumerate(zip(indices, views, strict=True)):
                render(decoder.decode(self.jpegs[index % len(self.jpegs)]), view, buffers[number % len(buffers)])
            differences.append((through_loader - (time.process_time() - began)) / len(indices))
        return median(differences)


def _index_load(records: int) -> float:
    """Seconds to load an index with names from a file that was just written."""
    builder = IndexBuilder()
    for number in range(records):
        builder.add(0, number, 110_000, number % 1000, f"n{number % 1000:08}/n{number % 1000:08}_{number}.JPEG")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        save_index(path, builder.build(Path(folder), (), ()))
        began = time.perf_counter()
        index = load_index(path, Path(folder))
        seconds = time.perf_counter() - began
    assert index is not None and len(index) == records
    return seconds


def _show(outcome: Outcome, command: str) -> None:
    console = Console(highlight=False)
    table = Table(width=80)
    table.add_column("one thread")
    for heading in ("images/s", "ours / this", "95 % interval"):
        table.add_column(heading, justify="right")
    for side in outcome.sides:
        ratio = outcome.ratio(side)
        table.add_row(
            side.name, f"{median(side.speeds):.0f}", f"{ratio.value:.2f}", f"{ratio.low:.2f} - {ratio.high:.2f}"
        )
    console.print(f"{WIDTH}x{HEIGHT} JPEG of {outcome.jpeg_bytes} bytes to {SIDE}x{SIDE}, random resized crop and flip")
    console.print(table)
    for threads, speed in outcome.loader.items():
        plural = "" if threads == 1 else "s"
        console.print(f"loader, {threads} thread{plural}: {speed:.0f} images/s, {speed / threads:.0f} per thread")
    for size, seconds in outcome.overhead.items():
        console.print(f"loader beyond decoding, {size}: {seconds * 1e6:.0f} microseconds per image")
    console.print(f"index of {_IMAGENET} records: loaded in {outcome.index_load:.3f} s")
    console.print(", ".join([*read_environment().words().values(), time.strftime("%Y-%m-%d")]))
    console.print(f"repeat with: {command}", soft_wrap=True)


def stock_paths(side: int) -> dict[str, StockPath]:
    """Every stock way from a JPEG to a crop that works here, by name."""
    found: dict[str, StockPath] = {"Pillow": _pillow(side), "simplejpeg + torch": _simplejpeg(side)}
    optional: Mapping[str, Callable[[int], StockPath]] = {"torchvision": _torchvision, "DALI (CPU)": _dali}
    for name, make in optional.items():
        try:
            found[name] = make(side)
        except (ImportError, OSError, RuntimeError):  # not installed, or not built for this machine
            continue
    return found


def _pillow(side: int) -> StockPath:
    def path(data: bytes, view: View) -> object:
        box = (view.left, view.top, view.left + view.width, view.top + view.height)
        image = Image.open(io.BytesIO(data)).convert("RGB").crop(box).resize((side, side), Image.Resampling.BILINEAR)
        if view.is_mirrored:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(image)

    return path


def _simplejpeg(side: int) -> StockPath:
    def path(data: bytes, view: View) -> object:
        pixels = torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1).unsqueeze(0)
        box = pixels[:, :, view.top : view.top + view.height, view.left : view.left + view.width]
        crop = functional.interpolate(box, size=(side, side), mode="bilinear", antialias=True)
        return crop.flip(3) if view.is_mirrored else crop

    return path


def _torchvision(side: int) -> StockPath:
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2 import functional as transforms

    def path(data: bytes, view: View) -> object:
        pixels = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
        crop = transforms.resized_crop(pixels, view.top, view.left, view.height, view.width, [side, side])
        return transforms.horizontal_flip(crop) if view.is_mirrored else crop

    path(_probe_jpeg(), View(0, 0, 8, 8, side, side))
    return path


def _dali(side: int) -> StockPath:
    from nvidia.dali import fn, pipeline_def, types

    held: dict[str, Any] = {}

    @pipeline_def(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        encoded = fn.external_source(source=lambda: [held["data"]], dtype=types.UINT8, ndim=1)
        start = fn.external_source(source=lambda: [held["start"]], dtype=types.INT32, ndim=1)
        shape = fn.external_source(source=lambda: [held["shape"]], dtype=types.INT32, ndim=1)
        mirrored = fn.external_source(source=lambda: [held["mirrored"]], dtype=types.INT32, ndim=0)
        crop = fn.decoders.image_slice(encoded, start=start, shape=shape, axis_names="HW", device="cpu")
        return fn.flip(fn.resize(crop, size=(side, side), antialias=True), horizontal=mirrored)

    built = pipeline()
    built.build()

    def path(data: bytes, view: View) -> object:
        held["data"] = np.frombuffer(data, np.uint8)
        held["start"] = np.array([view.top, view.left], np.int32)
        held["shape"] = np.array([view.height, view.width], np.int32)
        held["mirrored"] = np.array(int(view.is_mirrored), np.int32)
        return built.run()

    path(_probe_jpeg(), View(0, 0, 8, 8, side, side))
    return path


def _probe_jpeg() -> bytes:
    jpeg: bytes = simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))
    return jpeg
