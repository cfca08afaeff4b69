"""Small data sets made without the code under test: encoded by Pillow, packed by tarfile, OFRecord built by hand."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stagewright.data.formats.records import BadRecordError, Record

REPOSITORY = Path(__file__).parent.parent


def pixels(seed: int, height: int = 40, width: int = 48) -> NDArray[np.uint8]:
    """A smooth image, which JPEG hardly changes."""
    generator = np.random.default_rng(seed)
    small = Image.fromarray(generator.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    return np.array(small.resize((width, height), Image.Resampling.BICUBIC))


def jpeg(seed: int, height: int = 40, width: int = 48, mode: str = "RGB", **options: object) -> bytes:
    return encoded(Image.fromarray(pixels(seed, height, width)).convert(mode), "JPEG", **options)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pillow(data: bytes) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


# OFRecord by hand: https://protobuf.dev's wire format in ten lines.


def varint(value: int) -> bytes:
    value %= 2**64  # negative numbers are written as their 64-bit complement
    groups = [value >> shift & 127 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([group | 128 for group in groups[:-1]] + groups[-1:])


def block(field: int, data: bytes) -> bytes:
    return bytes([field * 8 + 2]) + varint(len(data)) + data


def feature(key: str, kind: int, values: bytes) -> bytes:
    return block(1, block(1, key.encode()) + block(2, block(kind, values)))


def int_feature(key: str, *values: int, kind: int = 4, is_packed: bool = True) -> bytes:
    if is_packed:
        return feature(key, kind, block(1, b"".join(varint(value) for value in values)))
    return feature(key, kind, b"".join(bytes([8]) + varint(value) for value in values))


def bytes_feature(key: str, *values: bytes) -> bytes:
    return feature(key, 1, b"".join(block(1, value) for value in values))


def message(image: bytes, label: int) -> bytes:
    return bytes_feature("encoded", image) + int_feature("class/label", label)


def frame(data: bytes) -> bytes:
    return struct.pack("<q", len(data)) + data


def write_parts(root: Path, parts: Sequence[Sequence[bytes]], width: int = 5) -> Path:
    """A folder of OFRecord parts, from messages."""
    root.mkdir(parents=True, exist_ok=True)
    for number, messages in enumerate(parts):
        (root / f"part-{number:0{width}}").write_bytes(b"".join(map(frame, messages)))
    return root


def make_ofrecord(root: Path, samples: int, classes: int = 4, parts: int = 3, side: int = 40) -> Path:
    """Samples 0, 1, 2 ... in order, cut into parts; sample i has class i mod classes."""
    messages = [message(jpeg(index, side, side + 8), index % classes) for index in range(samples)]
    size = -(-samples // parts)
    return write_parts(root, [messages[first : first + size] for first in range(0, samples, size)])


def make_folder(root: Path, files: dict[str, bytes]) -> str:
    """A folder of these files, as `--data` names it."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return f"folder:{root}"


def make_tar(path: Path, members: Sequence[tuple[str, bytes]], kind: int = tarfile.USTAR_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def samples_of(count: int) -> list[tuple[str, bytes]]:
    """WebDataset members: every third class as JSON."""
    found = []
    for index in range(count):
        found.append((f"{index:04}.jpg", jpeg(index)))
        text = ("json", json.dumps({"label": index % 4})) if index % 3 == 0 else ("cls", f"{index % 4}\n")
        found.append((f"{index:04}.{text[0]}", text[1].encode()))
    return found


class Faulty:
    """Records of which some are bad; counts what is read."""

    def __init__(self, samples: int, bad: Iterable[int] = ()) -> None:
        self._samples = samples
        self._bad = set(bad)
        self._data = jpeg(1, 24, 24)
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self._samples

    def get(self, index: int) -> Record:
        self.reads.append(index)
        if index in self._bad:
            raise BadRecordError(f"{self.name(index)} is bad")
        return Record(b"" if index in getattr(self, "empty", ()) else self._data, index % 10, self.name(index))

    def name(self, index: int) -> str:
        return f"record {index}"

    classes, class_names, fingerprint = 10, (), "faulty"


def wait_until_idle(records: Faulty, least: int) -> None:
    """Wait until so many records have been read, and then no other one for a while."""
    done = threading.Event()
    before = -1
    while len(records.reads) < least or before != len(records.reads):
        before = len(records.reads)
        done.wait(0.15)


def threads_called(prefix: str) -> int:
    """How many live threads have a name with this prefix."""
    return sum(thread.name.startswith(prefix) for thread in threading.enumerate())
