"""From an encoded image to the input of a model: decode the bytes, render a view of the pixels, normalize the batch.

JPEGs are decoded by libjpeg-turbo, raw pixels (a binary PPM) are only copied, everything else is for Pillow. Rendering
runs on the CPU and writes straight into the batch; normalization runs on the device of the batch.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from stagewright.data.augment import Jitter, View
from stagewright.data.formats.records import BadRecordError, Record, Records
from stagewright.errors import UserError, first_line
from stagewright.torch_internals import resize_into

Pixels = NDArray[np.uint8]  # rows, columns, RGB
MOST_PIXELS = 100_000_000  # a larger image is treated as a damaged header or an attack
_MOST_SCANNED = 100 * MOST_PIXELS  # over all scans: a dozen bytes can ask for one more pass over the image
_JPEG, _SCAN = b"\xff\xd8", b"\xff\xda"
_SCAN_BYTES = 10  # of the shortest header of a scan
_RAW = re.compile(rb"P6\n(\d{1,9}) (\d{1,9})\n255\n")  # as `encode_raw` writes it; other PPMs are for Pillow
_CHANNELS = 3
_GREY = (0.299, 0.587, 0.114)  # luma weights of red, green and blue
_FORMATS = ("JPEG", "PNG", "PPM", "WEBP", "BMP", "GIF", "TIFF")


class Decoder:
    """Decodes one image at a time; the next call overwrites the pixels, so each thread needs its own decoder."""

    def __init__(self) -> None:
        self._scratch = np.empty(0, np.uint8)

    def decode(self, data: bytes) -> Pixels:
        """The pixels as stored; an EXIF rotation is ignored, as stock loaders ignore it."""
        if not is_jpeg(data):
            return self._decode_raw(data, raw) if (raw := _RAW.match(data)) else _decode_other(data)
        try:
            height, width, colours = jpeg_header(data)
            if colours in ("CMYK", "YCCK"):
                return _decode_other(data)
            pixels: Pixels = simplejpeg.decode_jpeg(data, buffer=self._room(height * width * _CHANNELS))
            return pixels
        except (MemoryError, ValueError) as error:
            raise BadRecordError(f"not a complete JPEG ({first_line(error)})") from error

    def _decode_raw(self, data: bytes, header: re.Match[bytes]) -> Pixels:
        width, height = map(int, header.groups())
        _require_size(height, width)
        size, held = height * width * _CHANNELS, len(data) - header.end()
        if held != size:
            raise BadRecordError(f"not a whole image: {held} bytes of {height}x{width} pixels, which have {size}")
        pixels = self._room(size)[:size]
        pixels[:] = np.frombuffer(data, np.uint8, offset=header.end())
        return pixels.reshape(height, width, _CHANNELS)

    def _room(self, size: int) -> NDArray[np.uint8]:
        """The buffer for pixels, with at least that many bytes."""
        if self._scratch.size < size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch


def jpeg_header(data: bytes) -> tuple[int, int, str]:
    """Height, width and colour space of a JPEG; raises `BadRecordError` if it is not one that should be decoded."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError as error:
        raise BadRecordError(f"not a complete JPEG ({first_line(error)})") from error
    _require_size(height, width)
    could_be_too_many = len(data) // _SCAN_BYTES * height * width > _MOST_SCANNED  # to count takes a tenth of decoding
    if could_be_too_many and data.count(_SCAN) * height * width > _MOST_SCANNED:
        scans = f"{data.count(_SCAN)} scans of {height}x{width}"
        raise BadRecordError(f"claims {scans} pixels; at most {_MOST_SCANNED} are decoded in all")
    return height, width, colours


def decode_record(records: Records, index: int, decoder: Decoder) -> tuple[Record, Pixels]:
    """A record and its pixels; the error of a bad one begins with its name."""
    record = records.get(index)
    try:
        return record, decoder.decode(record.data)
    except BadRecordError as error:
        raise BadRecordError(f"{record.name}: {error}") from error


def encode_raw(pixels: Pixels) -> bytes:
    """Pixels as a binary PPM."""
    height, width, _ = pixels.shape
    return b"P6\n%d %d\n255\n" % (width, height) + pixels.tobytes()


def encode_jpeg(pixels: Pixels, quality: int) -> bytes:
    """Pixels as a JPEG with half the colour resolution, as photographs have it."""
    encoded: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality, "RGB", "420")
    return encoded


def shrunk(image: Pixels, side: int) -> Pixels:
    """An image whose shorter side is `side`, antialiased; one that is not larger stays as it is."""
    height, width, _ = image.shape
    shorter = min(height, width)
    if shorter <= side:
        return image
    target = np.empty((round(height * side / shorter), round(width * side / shorter), _CHANNELS), np.uint8)
    _resize(*(torch.from_numpy(_planes(pixels)) for pixels in (image, target)))
    return target


def is_jpeg(data: bytes) -> bool:
    return data[:2] == _JPEG


def _decode_other(data: bytes) -> Pixels:
    if not data:
        raise BadRecordError("is empty")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _require_size(image.height, image.width)
            return np.array(image.convert("RGB"))
    except BadRecordError:
        raise
    except Exception as error:  # Pillow's plugins raise whatever their parsers raise
        reason = str(error).partition(" <")[0] or type(error).__name__
        raise BadRecordError(f"not a readable image ({reason})") from error


def _require_size(height: int, width: int) -> None:
    if not 0 < height * width <= MOST_PIXELS:
        raise BadRecordError(f"claims {height}x{width} pixels; 1 to {MOST_PIXELS} are read")


@dataclass(frozen=True, slots=True)
class Normalization:
    """Mean and standard deviation per channel, on a scale of 0 to 255."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, images: Tensor, dtype: torch.dtype, *, channels_last: bool = False) -> Tensor:
        """uint8 [samples, side, side, RGB] to `dtype` [samples, RGB, side, side], in either memory layout."""
        wide = torch.promote_types(dtype, torch.float32)  # rounded once, at the end
        mean, std = (_per_channel(values, wide, images.device) for values in (self.mean, self.std))
        layout = torch.channels_last if channels_last else torch.contiguous_format
        shape = (len(images), _CHANNELS, *images.shape[1:3])
        numbers = torch.empty(shape, dtype=wide, device=images.device, memory_format=layout)
        return torch.sub(images.permute(0, 3, 1, 2), mean, out=numbers).div_(std).to(dtype)


@lru_cache(maxsize=16)
def _per_channel(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One number per channel of a batch; made once, as a GPU would finish all its work before each copy."""
    return torch.tensor(values, dtype=dtype, device=device).view(1, _CHANNELS, 1, 1)


NORMALIZATIONS: Mapping[str, Normalization] = {
    "imagenet": Normalization(
        tuple(255 * share for share in (0.485, 0.456, 0.406)), tuple(255 * share for share in (0.229, 0.224, 0.225))
    ),
    "published": Normalization((123.68, 116.779, 103.939), (58.393, 57.12, 57.375)),
}


def parse_normalization(text: str) -> Normalization:
    """A name, or `mean,mean,mean/std,std,std` on a scale of 0 to 255."""
    if text in NORMALIZATIONS:
        return NORMALIZATIONS[text]
    try:
        mean, std = (tuple(float(number) for number in half.split(",")) for half in text.split("/"))
    except ValueError:
        mean = std = ()
    if len(mean) != _CHANNELS or len(std) != _CHANNELS or not all(map(math.isfinite, mean + std)) or min(std) <= 0:
        raise UserError(
            f"--normalize must be {' or '.join(NORMALIZATIONS)}, or three means and three positive deviations such as "
            f"125,123,114/63,62,67, got '{text}'"
        )
    return Normalization(mean, std)


def render(image: Pixels, view: View, target: Tensor) -> None:
    """Fill `target`, uint8 [side, side, RGB], with a view of an image.

    Views of arrays are numpy's: each of torch's operations lets go of Python's lock, and threads then wait for it.
    """
    box = image[view.top : view.top + view.height, view.left : view.left + view.width]
    planes = torch.from_numpy(_planes(box))
    if view.is_mirrored:
        planes = planes.flip(3)  # several times faster in this memory layout
    side = len(target)
    if (view.rows, view.columns, view.down, view.right) == (side, side, 0, 0):
        _resize(planes, torch.from_numpy(_planes(target.numpy())))
    else:
        if (view.rows, view.columns) != (view.height, view.width):
            whole, planes = planes, torch.from_numpy(_planes(np.empty((view.rows, view.columns, _CHANNELS), np.uint8)))
            _resize(whole, planes)
        _copy_window(planes.squeeze(0).permute(1, 2, 0), view, target)
    if view.jitter is not None:
        target.copy_(jittered(target, view.jitter))
    if view.cutout is not None:
        view.cutout.apply(target)


def _resize(planes: Tensor, target: Tensor) -> None:
    """Antialiased bilinear, written straight into `target`; both as `_planes` has them."""
    if planes.shape == target.shape:
        target.copy_(planes)
    else:
        resize_into(planes, target)


def _planes(pixels: Pixels) -> Pixels:
    """[rows, columns, RGB] as the batch of one that torch's image operations expect, without a copy."""
    return pixels.transpose(2, 0, 1)[np.newaxis]


def _copy_window(resized: Tensor, view: View, target: Tensor) -> None:
    """Copy a square of the resized image; black outside the image."""
    side, (rows, columns) = len(target), resized.shape[:2]
    top, left = max(view.down, 0), max(view.right, 0)
    bottom, right = min(view.down + side, rows), min(view.right + side, columns)
    if (bottom - top, right - left) != (side, side):
        target.zero_()
    target[top - view.down : bottom - view.down, left - view.right : right - view.right] = resized[
        top:bottom, left:right
    ]


def jittered(pixels: Tensor, jitter: Jitter) -> Tensor:
    """Brightness, contrast around the mean grey, saturation around each pixel's grey; rounded once, at the end."""
    weights = torch.tensor(_GREY, device=pixels.device)
    colours = (pixels.float() * jitter.brightness).clamp_(0, 255)
    mean = (colours @ weights).mean()
    colours = (colours * jitter.contrast + mean * (1 - jitter.contrast)).clamp_(0, 255)
    grey = (colours @ weights).unsqueeze(2)
    colours = (colours * jitter.saturation + grey * (1 - jitter.saturation)).clamp_(0, 255)
    return colours.round_().to(torch.uint8)
