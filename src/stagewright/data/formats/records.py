"""Encoded images with their labels, read by index.

`Records` is the interface that folders, tar shards and OFRecord parts share; `FileRecords` and `PartRecords` read them
through an index. A data set that can't be read raises `DataError`; one record that can't be used, `BadRecordError`.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stagewright.data.formats.index import MOST_CLASSES, Index
from stagewright.errors import UserError, counted
from stagewright.files import MOST_RECORD_BYTES, open_regular, read_regular, too_large

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

    def name(self, index: int) -> str:
        """Where the record is stored, for messages."""
        ...


class _Indexed:
    """What follows from the index alone."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.classes = index.classes
        self.class_names = index.class_names
        self.fingerprint = index.fingerprint

    def __len__(self) -> int:
        return len(self.index)


class FileRecords(_Indexed):
    """Records that are files below one folder.

    Links are followed, also out of the folder: many data sets are folders of links. But what a link leads to outside is
    used only if it begins as an image does, so that a data set can't have `data convert` copy other files of the user.
    """

    def name(self, index: int) -> str:
        return f"{self.index.root}/{self.index.name(index)}"

    def get(self, index: int) -> Record:
        name = self.name(index)
        try:
            data = read_regular(name)
        except OSError as error:
            raise BadRecordError(f"{name}: {error.strerror}; make it a readable image or remove it") from error
        if not _IMAGE.match(data) and not self._is_inside(name):
            raise BadRecordError(f"{name}: is a link out of the data set to something that is not an image; remove it")
        return Record(data, int(self.index.label[index]), name)

    def _is_inside(self, name: str) -> bool:
        root = os.path.realpath(self.index.root)
        return os.path.commonpath((root, os.path.realpath(name))) == root


class PartRecords(_Indexed):
    """Records that are byte ranges of a few large files."""

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self._parts = _OpenParts([f"{index.root}/{part.path}" for part in index.watched])

    def name(self, index: int) -> str:
        part = int(self.index.part[index])
        inside = self.index.name(index) or f"record {index - int(np.searchsorted(self.index.part, part))}"
        return f"{self._parts.paths[part]}: {inside}"

    def get(self, index: int) -> Record:
        name, length, label = self.name(index), int(self.index.length[index]), int(self.index.label[index])
        if length == 0:
            raise BadRecordError(f"{name} has no image")
        if length > MOST_RECORD_BYTES:
            raise BadRecordError(f"{name}: {too_large(length)}")
        if label < 0:
            raise BadRecordError(f"{name} has no class number from 0 to {MOST_CLASSES - 1}")
        try:
            data = self._parts.read(int(self.index.part[index]), int(self.index.offset[index]), length)
        except OSError as error:
            raise BadRecordError(f"{name}: {error.strerror}") from error
        if len(data) != length:
            raise BadRecordError(
                f"{name}: {len(data)} of {length} bytes are left; the file has changed since it was indexed"
            )
        return Record(data, label, name)


class _OpenParts:
    """Reads byte ranges of files from any thread; keeps a bounded number of files open."""

    _MOST_OPEN = 256

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self._open: dict[int, int] = {}
        self._lock = threading.Lock()

    def read(self, part: int, offset: int, length: int) -> bytes:
        descriptor = self._open.get(part)
        if descriptor is not None:
            return os.pread(descriptor, length, offset)
        with self._lock:
            if part not in self._open and len(self._open) < self._MOST_OPEN:
                self._open[part] = open_regular(self.paths[part])
        if part in self._open:
            return os.pread(self._open[part], length, offset)
        descriptor = open_regular(self.paths[part])
        try:
            return os.pread(descriptor, length, offset)
        finally:
            os.close(descriptor)

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


class Limited:
    """`limit` records of a data set, evenly spread over it so that classes keep their proportions."""

    def __init__(self, records: Records, limit: int) -> None:
        self.classes = records.classes
        self.class_names = records.class_names
        self.fingerprint = f"{records.fingerprint}/{limit}"
        self._records = records
        self._limit = limit

    def __len__(self) -> int:
        return self._limit

    def _inner(self, index: int) -> int:
        return spread_index(index, self._limit, len(self._records))

    def get(self, index: int) -> Record:
        return self._records.get(self._inner(index))

    def name(self, index: int) -> str:
        return self._records.name(self._inner(index))


def spread_index(index: int, limit: int, samples: int) -> int:
    """The position among all samples of sample `index` of `limit` evenly spread ones."""
    return index * samples // limit


def require_limit(limit: int, samples: int) -> None:
    if not 0 < limit <= samples:
        raise DataError(f"--limit is {limit} but the data set has {counted(samples, 'record')}; give 1 to {samples}")
