"""Stock ways from a JPEG to a crop of one size: Pillow, simplejpeg with torch, torchvision, DALI; those installed."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch.nn import functional

from stagewright.data.augment import View

StockPath = Callable[[bytes, View], object]


def stock_paths(side: int) -> dict[str, StockPath]:
    """Every stock way that works here, by name."""
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
