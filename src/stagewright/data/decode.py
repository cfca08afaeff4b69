"""From encoded bytes to pixels: libjpeg-turbo for JPEG, Pillow for everything else."""

from __future__ import annotations

import io

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from stagewright.data.records import BadRecord, Record, Records

Pixels = NDArray[np.uint8]  # rows, columns, RGB

MOST_PIXELS = 100_000_000  # more is taken for a damaged header, or an attack
_JPEG = b"\xff\xd8"
_FORMATS = ("JPEG", "PNG", "PPM", "WEBP", "BMP", "GIF", "TIFF")


class Decoder:
    """Decodes one image at a time; what it returns is overwritten by the next, so each thread has its own."""

    def __init__(self) -> None:
        self._scratch = np.empty(0, np.uint8)

    def decode(self, data: bytes) -> Pixels:
        """The pixels as stored; a rotation that EXIF asks for is ignored, as stock loaders do."""
        if data[:2] != _JPEG:
            return _decode_other(data)
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
            _require_size(height, width)
            if colours in ("CMYK", "YCCK"):
                return _decode_other(data)
            if self._scratch.size < height * width * 3:
                self._scratch = np.empty(height * width * 3, np.uint8)
            pixels: Pixels = simplejpeg.decode_jpeg(data, buffer=self._scratch)
            return pixels
        except BadRecord:
            raise
        except ValueError as error:
            raise BadRecord(f"no whole JPEG ({error})") from error


def decode_at(records: Records, index: int, decoder: Decoder) -> tuple[Record, Pixels]:
    """A record and its pixels; a bad one is named."""
    record = records.get(index)
    try:
        return record, decoder.decode(record.data)
    except BadRecord as error:
        raise BadRecord(f"{record.name}: {error}") from error


def _decode_other(data: bytes) -> Pixels:
    if not data:
        raise BadRecord("is empty")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _require_size(image.height, image.width)
            return np.array(image.convert("RGB"))
    except BadRecord:
        raise
    except Exception as error:  # Pillow's plugins raise whatever their parsers do
        reason = str(error).partition(" <")[0] or type(error).__name__
        raise BadRecord(f"no image that can be read ({reason})") from error


def _require_size(height: int, width: int) -> None:
    if height * width > MOST_PIXELS:
        raise BadRecord(f"says it has {height}x{width} pixels; {MOST_PIXELS} are read at most")
