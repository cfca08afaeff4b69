"""Pixels are those Pillow finds, whatever the bytes are called; what is damaged is a bad record and nothing else."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from stagewright.data.decode import NORMALIZATIONS, Decoder, encode_raw
from stagewright.data.formats.records import BadRecordError
from tests.pictures import encoded, jpeg, pillow, pixels


@pytest.mark.parametrize(
    "data",
    [
        jpeg(1),
        jpeg(2, quality=95, subsampling=0),
        jpeg(3, 33, 31, progressive=True),
        jpeg(4, mode="L"),
        jpeg(5, mode="CMYK"),
        encoded(Image.fromarray(pixels(6)), "PNG"),
        encoded(Image.fromarray(pixels(7)).convert("P"), "PNG"),
        encoded(Image.fromarray(pixels(8)).convert("RGBA"), "PNG"),
        encoded(Image.fromarray(pixels(9)).convert("L"), "PNG"),
        encoded(Image.fromarray(pixels(10)), "WEBP", lossless=True),
        encoded(Image.fromarray(pixels(11)), "BMP"),
        encoded(Image.fromarray(pixels(12)), "PPM"),
        b"P6 # a comment\n" + encode_raw(pixels(13)).removeprefix(b"P6\n"),
    ],
    ids=[
        *("JPEG", "full colour", "progressive", "grey", "CMYK", "PNG", "palette", "alpha", "grey PNG"),
        *("WebP", "BMP", "PPM", "another PPM"),
    ],
)
def test_pixels_equal_pillows(data: bytes) -> None:
    found = Decoder().decode(data)
    assert found.shape == pillow(data).shape and found.dtype == np.uint8
    assert np.abs(found.astype(int) - pillow(data)).max() <= 1


def test_normalized_pixels_are_rounded_once() -> None:
    images = torch.arange(2 * 4 * 4 * 3, dtype=torch.uint8).view(2, 4, 4, 3)
    wanted = NORMALIZATIONS["imagenet"].apply(images, torch.float32)
    found = NORMALIZATIONS["imagenet"].apply(images, torch.bfloat16, channels_last=True)
    assert found.dtype is torch.bfloat16 and torch.equal(found, wanted.to(torch.bfloat16))
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_cmyk_becomes_rgb_as_pillow_converts_it() -> None:
    data = jpeg(5, mode="CMYK")
    assert np.array_equal(Decoder().decode(data), pillow(data))


def test_exif_rotation_is_ignored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned = jpeg(1, 40, 48, exif=exif.tobytes())
    assert turned != jpeg(1, 40, 48)
    assert np.array_equal(Decoder().decode(turned), Decoder().decode(jpeg(1, 40, 48)))


def test_one_decoder_decodes_images_of_all_sizes() -> None:
    decoder = Decoder()
    for seed, (height, width) in enumerate([(8, 8), (90, 70), (16, 30), (90, 71)]):
        data = jpeg(seed, height, width)
        assert np.abs(decoder.decode(data).astype(int) - pillow(data)).max() <= 1


@pytest.mark.parametrize("cut", [2, 20, 300, -200, -2])
def test_a_truncated_jpeg_is_bad(cut: int) -> None:
    with pytest.raises(BadRecordError, match="not a complete JPEG"):
        Decoder().decode(jpeg(1, 60, 60)[:cut])


@pytest.mark.parametrize("data", [b"", b"text, not an image", b"\x89PNG\r\n\x1a\n", bytes(5000), b"\xff\xd8"])
def test_bytes_that_are_no_image_are_bad(data: bytes) -> None:
    with pytest.raises(BadRecordError):
        Decoder().decode(data)


@pytest.mark.parametrize("data", [encode_raw(pixels(1))[:-1], encode_raw(pixels(1)) + b"1", b"P6\n0 5\n255\n"])
def test_raw_pixels_of_another_number_are_bad(data: bytes) -> None:
    with pytest.raises(BadRecordError, match=r"bytes of|claims"):
        Decoder().decode(data)


def test_a_truncated_png_is_bad() -> None:
    with pytest.raises(BadRecordError):
        Decoder().decode(encoded(Image.fromarray(pixels(1)), "PNG")[:-400])


def test_a_header_that_claims_a_huge_image_is_bad() -> None:
    data = bytearray(jpeg(1))
    size = data.index(b"\xff\xc0") + 5
    data[size : size + 4] = struct.pack(">2H", 65_000, 65_000)
    with pytest.raises(BadRecordError, match="65000x65000 pixels"):
        Decoder().decode(bytes(data))
    header = struct.pack(">2I5B", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    with pytest.raises(BadRecordError):
        Decoder().decode(png)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_bit_flips_give_pixels_or_a_bad_record(kind: str) -> None:
    """Many flips leave an image that decodes; the rest are bad records, never another error."""
    generator, decoder = np.random.default_rng(0), Decoder()
    whole = encoded(Image.fromarray(pixels(1)), kind)
    bad = 0
    for _ in range(400):
        data = bytearray(whole)
        for position in generator.integers(0, len(data), 3):
            data[position] ^= 1 << int(generator.integers(8))
        try:
            assert decoder.decode(bytes(data)).shape[2] == 3
        except BadRecordError:
            bad += 1
    assert 0 < bad < 400
