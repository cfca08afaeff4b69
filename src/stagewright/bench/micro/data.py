"""`bench data` and `data bench`: how fast encoded images become samples, with Stagewright and in stock ways.

The stock ways are Pillow, simplejpeg with torch, torchvision and DALI, as far as they are installed. All sides decode
and crop the same images on one thread, in turns. Whole loaders (`loaders`), this one's overhead and the time to load an
index follow.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch.nn import functional

from stagewright.bench.micro.loaders import Images, compare_loaders
from stagewright.bench.pictures import HEIGHT, WIDTH, make_jpegs
from stagewright.bench.result import Outcome, measured_row, new_outcome, ratio_of
from stagewright.data.augment import Augmentation, Cropping, View
from stagewright.data.decode import Decoder, render
from stagewright.data.formats.index import IndexBuilder, load_index, save_index

StockPath = Callable[[bytes, View], object]
SIDE = 224
_IMAGENET = 1_281_167
_REPEATS, _IMAGES, _MOST_THREADS = 15, 64, 2  # unless options say otherwise


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
            speeds[name].append(_speed(paths[name], large.encoded, views))
        turns.rotate(1)  # no side always follows the same other side
    group = f"{WIDTH}x{HEIGHT} JPEG of {large.size} bytes to {SIDE}x{SIDE}, one thread"
    ours, *others = (measured_row(group, name, found) for name, found in speeds.items())
    loaders, beside_torchvision = compare_loaders(large, most_threads)
    longer = max(repeats // 4, 1), 8 * images  # so that starting a loader hardly counts
    beyond = "microseconds per image that the loader takes beyond decoding"
    return new_outcome(
        "data",
        "Decoding, random resized crop and flip, of Stagewright and in stock ways",
        repeats,
        rows=(ours, *others, *loaders),
        ratios=(*(ratio_of(ours, other) for other in others), *beside_torchvision),
        figures={
            f"{beyond}, 32x32": 1e6 * small.overhead(*longer),
            f"{beyond}, {WIDTH}x{HEIGHT}": 1e6 * large.overhead(*longer),
            f"seconds to load an index of {indexed} records": _index_load(indexed),
        },
    )


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
