"""`data`: how fast encoded images become samples, with Stagewright and in stock ways.

The stock ways are Pillow, simplejpeg with torch, torchvision and DALI, as far as they are installed. All sides decode
and crop the same images on one thread, in turns. Whole loaders, torchvision's among them, this one's overhead and the
time to load an index follow.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks.outcome import Outcome, Ratio, in_turns, new_outcome, ratio_of
from stagewright.bench import data
from stagewright.bench.data import (
    BATCH,
    HEIGHT,
    SAMPLES,
    WIDTH,
    Images,
    InMemory,
    batch_rate,
    forms,
    loader_rate,
    loader_rows,
    make_jpegs,
)
from stagewright.bench.result import Row, measured_row
from stagewright.data.augment import Augmentation, Cropping, View
from stagewright.data.decode import Decoder, is_jpeg, render
from stagewright.data.formats.index import IndexBuilder, load_index, save_index
from stagewright.data.order import Order
from stagewright.data.pool import LoaderOptions, Pool
from stagewright.data.processes import ProcessPool
from stagewright.errors import UserError, counted
from stagewright.model.networks.libraries import import_library

Transform = Callable[[bytes], Tensor]
_IMAGENET = 1_281_167
_TURNS = 3
_SMALL_BATCH = 16
_PREFETCHED = 2  # batches of each of torch's workers, by default


def measure(
    repeats: int | None, images: int | None = None, most_threads: int | None = None, indexed: int = _IMAGENET
) -> Outcome:
    """Time all sides in turns, then loaders and an index."""
    repeats, images = repeats or data.REPEATS, images or data.IMAGES
    torch.set_num_threads(1)
    large = data.photographs()
    views = large.views(0, range(images))
    paths: dict[str, data.Way] = {"stagewright": data.our_path(data.SIDE)} | stock_paths(data.SIDE)
    sides = {name: partial(data.path_rate, path, large.encoded, views) for name, path in paths.items()}
    speeds = in_turns(sides, repeats)
    ours, *others = (measured_row(large.title, name, found) for name, found in speeds.items())
    loaders, beside_torchvision = compare_loaders(large, most_threads or data.MOST_THREADS)
    longer = max(repeats // 4, 1), 8 * images  # so that starting a loader hardly counts
    return new_outcome(
        "data",
        "Decoding, random resized crop and flip, of Stagewright and in stock ways",
        repeats,
        rows=(ours, *others, *loaders),
        ratios=(*(ratio_of(ours, other) for other in others), *beside_torchvision),
        figures=_overheads(large, *longer) | {f"seconds to load an index of {indexed} records": _index_load(indexed)},
    )


def _overhead(images: Images, repeats: int, count: int) -> float:
    """Processor seconds per image of the loader, minus those of decoding and cropping in a plain loop.

    The loop writes to as much memory as the loader, since that much does not stay in the caches.
    """
    size = _SMALL_BATCH
    buffers = torch.zeros((LoaderOptions().ahead + 1) * size, *2 * (images.augmentation.side,), 3, dtype=torch.uint8)
    order, batches, differences = Order(count, size), count // size, []
    for epoch in range(repeats):
        numbers = range(epoch * batches, (epoch + 1) * batches)
        loader = images.loader(Pool(1), size, count, numbers.stop)
        began = time.process_time()
        for number in numbers:
            loader.pixels(number)
        loader.close()
        through_loader = time.process_time() - began
        indices = [int(index) for number in numbers for index in order.microbatch(number, 1)]
        views, decoder = images.views(epoch, indices), Decoder()
        began = time.process_time()
        for number, (index, view) in enumerate(zip(indices, views, strict=True)):
            render(decoder.decode(images.encoded[index % len(images.encoded)]), view, buffers[number % len(buffers)])
        differences.append((through_loader - (time.process_time() - began)) / len(indices))
    return median(differences)


def _overheads(large: Images, repeats: int, images: int) -> dict[str, float]:
    """What the loader takes beyond decoding, for small images and large ones."""
    small = Images(make_jpegs(32, 32), Augmentation(32, Cropping.PADDED), 32, 32)
    beyond = "microseconds per image that the loader takes beyond decoding"
    sizes = {"32x32": small, f"{WIDTH}x{HEIGHT}": large}
    return {f"{beyond}, {size}": 1e6 * _overhead(one, repeats, images) for size, one in sizes.items()}


def _index_load(records: int) -> float:
    """Seconds to load an index with names from a file that was just written."""
    builder = IndexBuilder(Path())
    for number in range(records):
        builder.add(0, number, 110_000, number % 1000, f"n{number % 1000:08}/n{number % 1000:08}_{number}.JPEG")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        save_index(path, builder.build())
        began = time.perf_counter()
        index = load_index(path, Path(folder))
        seconds = time.perf_counter() - began
    assert index is not None and len(index) == records
    return seconds


def stock_paths(side: int) -> dict[str, data.Way]:
    """Every stock way from a JPEG to a crop that works here, by name."""
    found: dict[str, data.Way] = {"Pillow": _pillow(side), "simplejpeg + torch": _simplejpeg(side)}
    optional: Mapping[str, Callable[[int], data.Way]] = {"torchvision": _torchvision, "DALI (CPU)": _dali}
    probe: bytes = simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))
    for name, make in optional.items():
        try:
            way = make(side)
            way(probe, View(0, 0, 8, 8, side, side))
            found[name] = way
        except (ImportError, OSError, RuntimeError):  # not installed, or not built for this machine
            continue
    return found


def _pillow(side: int) -> data.Way:
    def path(data: bytes, view: View) -> object:
        box = (view.left, view.top, view.left + view.width, view.top + view.height)
        image = Image.open(io.BytesIO(data)).convert("RGB").crop(box).resize((side, side), Image.Resampling.BILINEAR)
        if view.is_mirrored:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(image)

    return path


def _simplejpeg(side: int) -> data.Way:
    def path(data: bytes, view: View) -> object:
        pixels = torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1).unsqueeze(0)
        box = pixels[:, :, view.top : view.top + view.height, view.left : view.left + view.width]
        crop = functional.interpolate(box, size=(side, side), mode="bilinear", antialias=True)
        return crop.flip(3) if view.is_mirrored else crop

    return path


def _torchvision(side: int) -> data.Way:
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2 import functional as transforms

    def path(data: bytes, view: View) -> object:
        pixels = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
        crop = transforms.resized_crop(pixels, view.top, view.left, view.height, view.width, [side, side])
        return transforms.horizontal_flip(crop) if view.is_mirrored else crop

    return path


def _dali(side: int) -> data.Way:
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

    return path


def compare_loaders(
    images: Images, most: int, turns: int = _TURNS, seconds: float = data.SECONDS
) -> tuple[list[Row], list[Ratio]]:
    """Images per second of each form by up to `most` threads and processes; with the most, beside torchvision's loader.

    Wall-clock time, of loaders that have started and whose batches are not used.
    """
    rows: list[Row] = []
    ratios: list[Ratio] = []
    for what, form in forms(images).items():
        group, processes = f"loader, {what}", counted(most, "process", "es")
        rows += loader_rows(group, form, most, seconds)[:-1]
        # Each turn starts its own loader: what others have begun to load ahead would go on beside it.
        sides = {processes: partial(_loader_rate, form, most, seconds)}
        if (transform := torchvision_transform(form)) is not None:
            sides[f"{transform[0]}, {processes}"] = partial(_torchvision_rate, form, transform[1], most, seconds)
        ours, *theirs = (measured_row(group, name, found) for name, found in in_turns(sides, turns).items())
        rows += [ours, *theirs]
        ratios += [ratio_of(ours, other) for other in theirs]
    return rows, ratios


def _loader_rate(images: Images, workers: int, seconds: float) -> float:
    return loader_rate(images, ProcessPool(workers), seconds)


def _torchvision_rate(images: Images, transform: Transform, workers: int, seconds: float) -> float:
    dataset = _Transformed(InMemory(images.encoded, SAMPLES), transform)
    batches = iter(DataLoader(dataset, BATCH, shuffle=True, num_workers=workers))
    return batch_rate(partial(next, batches), _PREFETCHED * workers, seconds)


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

    def by_torchvision(data: bytes) -> Any:
        return of_tensors(io_of.decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode="RGB"))

    def by_pillow(data: bytes) -> Any:
        return of_pictures(Image.open(io.BytesIO(data)).convert("RGB"))

    if is_jpeg(images.encoded[0]):
        try:
            by_torchvision(images.encoded[0])
            return "torchvision", by_torchvision
        except (AttributeError, RuntimeError):  # its decoder was built for another torch
            pass
    return "torchvision with Pillow", by_pillow
