"""Encoded images with their labels, read by index.

`Records` is the interface that folders, tar shards and OFRecord parts share; `FileRecords` and `PartRecords` read them
through an index. A data set that can't be read raises `DataError`; one record that can't be used, `BadRecordError`.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np

from stagewright.data.formats.index import MOST_CLASSES, Index
from stagewright.errors import UserError, counted
from stagewright.files import MOST_RECORD_BYTES, open_regular, read_regular, too_large

_MOST_OPEN = 256  # parts
_SAMPLED = 64  # records whose bytes enter the fingerprint
_IMAGE = re.compile(
    rb"\xff\xd8|\x89PNG|RIFF.{4}WEBP|GIF8|BM.{4}\0{4}|II[*+]\0|MM\0[*+]|P[1-7]\s", re.DOTALL
)  # how a file of each format that is decoded begins


class DataError(UserError):
    """A data set can't be used at all."""


class BadRecordError(Exception):
    """One record can't be used; the others can."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that could not be used."""

    index: int
    reason: str  # begins with the record's name


@dataclass(frozen=True, slots=True)
class Record:
    """One encoded image as it is stored."""

    data: bytes
    label: int
    name: str
    mask: bytes = b""  # an encoded mask of the same size, in data for segmentation


class Records(Protocol):
    """Random access to encoded images."""

    classes: int  # one more than the largest label
    class_names: tuple[str, ...]  # in label order; empty if the data set has no names
    fingerprint: str  # changes when the records change

    def __len__(self) -> int: ...

    def get(self, index: int) -> Record:
        """The record at an index; raises `BadRecordError` if it can't be used."""
        ...


class FileRecords:
    """Records that are files below one folder.

    Links are followed, also out of the folder: many data sets are folders of links. But what a link leads to outside is
    used only if it begins as an image does, so that a data set can't have `data convert` copy other files of the user.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.classes = index.classes
        self.class_names = index.class_names
        self.fingerprint = index.fingerprint

    def __len__(self) -> int:
        return len(self.index)

    def name(self, index: int) -> str:
        """Where a record is stored, for messages."""
        return f"{self.index.root}/{self.index.name(index)}"

    def get(self, index: int) -> Record:
        name = self.name(index)
        data = read_file(name, "make it a readable image or remove it")
        if not _IMAGE.match(data) and not self._is_inside(name):
            raise BadRecordError(f"{name}: is a link out of the data set to something that is not an image; remove it")
        return Record(data, int(self.index.label[index]), name)

    def _is_inside(self, name: str) -> bool:
        root = os.path.realpath(self.index.root)
        return os.path.commonpath((root, os.path.realpath(name))) == root


def read_file(name: str, advice: str) -> bytes:
    """The bytes of a file of one record; what to do where it can't be read."""
    try:
        return read_regular(name)
    except OSError as error:
        raise BadRecordError(f"{name}: {error.strerror}; {advice}") from error


class PartRecords(FileRecords):
    """Records that are byte ranges of a few large files, of which a bounded number stays open; for any thread."""

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self._open: dict[int, int] = {}  # descriptors, by part

    def name(self, index: int) -> str:
        part = int(self.index.part[index])
        inside = self.index.name(index) or f"record {index - int(np.searchsorted(self.index.part, part))}"
        return f"{self._path(part)}: {inside}"

    def get(self, index: int) -> Record:
        name, length, label = self.name(index), int(self.index.length[index]), int(self.index.label[index])
        if length == 0:
            raise BadRecordError(f"{name} has no image")
        if length > MOST_RECORD_BYTES:
            raise BadRecordError(f"{name}: {too_large(length)}")
        if label < 0:
            raise BadRecordError(f"{name} has no class number from 0 to {MOST_CLASSES - 1}")
        try:
            data = self._read(int(self.index.part[index]), int(self.index.offset[index]), length)
        except OSError as error:
            raise BadRecordError(f"{name}: {error.strerror}") from error
        if len(data) != length:
            raise BadRecordError(
                f"{name}: {len(data)} of {length} bytes are left; the file has changed since it was indexed"
            )
        return Record(data, label, name)

    def _path(self, part: int) -> str:
        return f"{self.index.root}/{self.index.watched[part].path}"

    def _read(self, part: int, offset: int, length: int) -> bytes:
        descriptor = self._open.get(part)
        if descriptor is not None:
            return os.pread(descriptor, length, offset)
        descriptor = open_regular(self._path(part))
        is_kept = len(self._open) < _MOST_OPEN and self._open.setdefault(part, descriptor) == descriptor
        try:
            return os.pread(descriptor, length, offset)
        finally:
            if not is_kept:  # another thread was first, or there are too many
                os.close(descriptor)

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


def fingerprint(records: FileRecords) -> str:
    """A hash of every label, length and name and of the bytes of a few records; paths and times do not enter."""
    index, digest = records.index, blake2b(digest_size=16)
    for array in (index.label, index.length, index.names, index.name_end):
        digest.update(np.ascontiguousarray(array).data)
        digest.update(b"/")
    digest.update("\0".join(index.class_names).encode(errors="surrogateescape"))
    sampled = min(_SAMPLED, len(index))
    for number in range(sampled):
        with suppress(BadRecordError):
            record = records.get(spread_index(number, sampled, len(index)))
            digest.update(record.data + record.mask)
    return digest.hexdigest()


class Limited:
    """`limit` records of a data set, evenly spread over it so that classes keep their proportions."""

    def __init__(self, records: Records, limit: int) -> None:
        require_limit(limit, len(records))
        self.classes = records.classes
        self.class_names = records.class_names
        self.fingerprint = f"{records.fingerprint}/{limit}"
        self._records = records
        self._limit = limit

    def __len__(self) -> int:
        return self._limit

    def get(self, index: int) -> Record:
        return self._records.get(spread_index(index, self._limit, len(self._records)))


def spread_index(index: int, limit: int, samples: int) -> int:
    """The position among all samples of sample `index` of `limit` evenly spread ones."""
    return index * samples // limit


def require_limit(limit: int, samples: int) -> None:
    if not 0 < limit <= samples:
        raise DataError(f"--limit is {limit} but the data set has {counted(samples, 'record')}; give 1 to {samples}")
