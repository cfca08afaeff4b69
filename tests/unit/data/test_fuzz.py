"""Mutated parts and shards: the readers return records or raise their own error, nothing else."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from stagewright.data.ofrecord import OFRecordError, scan_part
from stagewright.data.tar import TarError, scan_shard
from tests.pictures import bytes_feature, frame, int_feature, make_tar, message

CASES = int(os.environ.get("STAGEWRIGHT_FUZZ", "50000"))  # per reader; `make soak` sets many more
_INTERESTING = (b"\0", b"\xff", b"\x7f", b"\x80", b"\0" * 8, b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x80" * 11, b"0777")


def mutated(whole: bytes, generator: random.Random) -> bytes:
    """A few changes of a kind that breaks parsers: flips, ranges removed, doubled or moved, special values."""
    data = bytearray(whole)
    for _ in range(generator.choice((1, 1, 2, 4, 8))):
        at = generator.randrange(len(data) + 1)
        match generator.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << generator.randrange(8)
            case 1 if data:
                data[at % len(data)] = generator.randrange(256)
            case 2:
                del data[at : at + generator.randrange(1, 40)]
            case 3:
                data[at:at] = data[at : at + generator.randrange(1, 40)]
            case 4:
                value = generator.choice(_INTERESTING)
                data[at : at + len(value)] = value
            case _:
                del data[at:]
    return bytes(data)


def with_checksums(data: bytes) -> bytes:
    """Headers with correct checksums, so that the reader gets past them."""
    blocks = bytearray(data)
    for first in range(0, len(blocks) - 511, 512):
        header = blocks[first : first + 512]
        if header[257:262] == b"ustar":
            total = sum(header[:148]) + 256 + sum(header[156:])
            blocks[first + 148 : first + 156] = b"%06o\0 " % total
    return bytes(blocks)


def scan_ofrecord(data: bytes) -> int:
    found = list(scan_part(io.BytesIO(data), len(data), "part-0"))
    assert all(0 <= offset <= offset + length <= len(data) and label >= -1 for offset, length, label in found)
    return len(found)


def scan_tar(data: bytes) -> int:
    found = list(scan_shard(io.BytesIO(data), len(data), "shard.tar", {"cat": 1}))
    assert all(0 <= s.offset <= s.offset + s.size <= len(data) and s.label >= -1 for _, s in found)
    return len(found)


def seeds_ofrecord() -> list[bytes]:
    rich = bytes_feature("class/text", b"a cat") + int_feature("height", 500) + message(b"\xff\xd8 image", 4)
    unpacked = bytes_feature("encoded", b"x") + int_feature("class/label", 300, kind=5, is_packed=False)
    return [frame(message(b"a", 1)) * 3, frame(rich) + frame(unpacked), frame(unpacked) * 2 + frame(rich)]


def seeds_tar(folder: Path) -> list[bytes]:
    members = [("a.jpg", b"image"), ("a.cls", b"1"), ("b.jpg", b"x" * 700), ("b.json", b'{"label": 3}')]
    long = [("d" * 150 + ".jpg", b"y"), ("ü.jpg", b"z"), ("ü.cls", b"2")]
    return [
        make_tar(folder / f"{kind}.tar", members if kind == 0 else members + long, kind).read_bytes()[: 512 * 24]
        for kind in (0, 1, 2)
    ]


def fuzz(scan: Callable[[bytes], int], seeds: list[bytes], error: type[Exception], repair: bool) -> tuple[int, int]:
    """How many mutated inputs were read to the end and how many rejected; other exceptions pass through."""
    generator = random.Random(0)
    whole = rejected = 0
    for number in range(CASES):
        data = mutated(seeds[number % len(seeds)], generator)
        if repair and number % 4:
            data = with_checksums(data)
        try:
            scan(data)
            whole += 1
        except error as caught:
            assert "part-0" in str(caught) or "shard.tar" in str(caught)
            rejected += 1
    return whole, rejected


@pytest.mark.timeout(1800 + CASES // 100)
def test_mutated_ofrecord_parts_are_read_or_rejected() -> None:
    seeds = seeds_ofrecord()
    assert [scan_ofrecord(seed) for seed in seeds] == [3, 2, 3]
    whole, rejected = fuzz(scan_ofrecord, seeds, OFRecordError, repair=False)
    assert whole + rejected == CASES and min(whole, rejected) > CASES // 50


@pytest.mark.timeout(1800 + CASES // 100)
def test_mutated_tar_shards_are_read_or_rejected(tmp_path: Path) -> None:
    seeds = seeds_tar(tmp_path)
    assert [scan_tar(seed) for seed in seeds] == [2, 4, 4]
    whole, rejected = fuzz(scan_tar, seeds, TarError, repair=True)
    assert whole + rejected == CASES and min(whole, rejected) > CASES // 50
