"""`bench data` and `data bench`: how fast encoded images become samples, with Stagewright and in stock ways.

The stock ways are Pillow, simplejpeg with torch, torchvision and DALI, as far as they are installed. All sides decode
and crop the same images on one thread, in turns. The loader's speed and overhead and the time to load an index follow.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch.nn import functional

from stagewright.bench.result import Outcome, measured_row, new_outcome, ratio_of
from stagewright.data.augment import Augmentation, Cropping, View
from stagewright.data.convert import Shrink
from stagewright.data.decode import NORMALIZATIONS, Decoder, render
from stagewright.data.formats.index import IndexBuilder, load_index, save_index
from stagewright.data.formats.records import Record
from stagewright.data.loader import ImageLoader
from stagewright.data.order import Order, ReplicaSlice, TrainingSampler
from stagewright.data.pool import LoaderOptions, Pool
from stagewright.data.sources import ImageSource
from stagewright.errors import counted

StockPath = Callable[[bytes, View], object]
HEIGHT, WIDTH, SIDE = 375, 500, 224
_SHRUNK = 256  # the shorter side, for crops of 224
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


def measure(
    repeats: int | None, images: int | None = None, most_threads: int | None = None, indexed: int = _IMAGENET
) -> Outcome:
    """Time all sides in turns, then the loader and an index."""
    repeats = _REPEATS if repeats is None else repeats
    images = _IMAGES if images is None else images
    most_threads = _MOST_THREADS if most_threads is None else most_threads
    torch.set_num_threads(1)
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
    group = f"{WIDTH}x{HEIGHT} JPEG of {large.size} bytes to {SIDE}x{SIDE}, one thread"
    ours, *others = (measured_row(group, name, found) for name, found in speeds.items())
    loader = [
        measured_row(f"loader, {what}", f"{counted(count, 'thread')}", [images_in.loader_speed(count)])
        for what, images_in in _forms(large).items()
        for count in _numbers_of_threads(most_threads)
    ]
    longer = max(repeats // 4, 1), 8 * images  # so that starting a loader hardly counts
    beyond = "microseconds per image that the loader takes beyond decoding"
    return new_outcome(
        "data",
        "Decoding, random resized crop and flip, of Stagewright and in stock ways",
        repeats,
        rows=(ours, *others, *loader),
        ratios=tuple(ratio_of(ours, other) for other in others),
        figures={
            f"{beyond}, 32x32": 1e6 * small.overhead(*longer),
            f"{beyond}, {WIDTH}x{HEIGHT}": 1e6 * large.overhead(*longer),
            f"seconds to load an index of {indexed} records": _index_load(indexed),
        },
    )


def _numbers_of_threads(most: int) -> list[int]:
    """One, its doubles, and the most."""
    return sorted({most, *(2**power for power in range(most.bit_length()))})


def _forms(images: Images) -> dict[str, Images]:
    """The same images as they are, shrunk, and as raw pixels of that size: what `data convert` makes of them."""
    found = {f"JPEGs of {images.size:,} bytes": images}
    for shrink in (Shrink(_SHRUNK), Shrink(_SHRUNK, is_raw=True)):
        made = [shrink.applied(Record(data, 0, "")).data for data in images.jpegs]
        height, width, _ = Decoder().decode(made[0]).shape
        smaller = replace(images, jpegs=made, height=height, width=width)
        what = "raw pixels" if shrink.is_raw else "JPEGs"
        found[f"{what} of {smaller.size:,} bytes (--side {_SHRUNK}{' --raw' if shrink.is_raw else ''})"] = smaller
    return found


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

    @property
    def size(self) -> int:
        """Mean bytes of an encoded image."""
        return sum(map(len, self.jpegs)) // len(self.jpegs)

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
