"""Opens the data set that `--data` names: lists its files, reads its class names, and finds or builds its index.

Folders of images are scanned here: one subfolder per class, numbered in sorted order, with files at any depth below.
Tar shards and OFRecord parts are scanned by `tar` and `ofrecord`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path

from stagewright.data.formats.index import (
    MOST_CLASSES,
    Index,
    IndexBuilder,
    Progress,
    Watched,
    cached_index,
    fingerprint,
)
from stagewright.data.formats.ofrecord import list_parts, scan_parts
from stagewright.data.formats.records import (
    BadRecordError,
    DataError,
    FileRecords,
    Limited,
    PartRecords,
    Records,
    require_limit,
)
from stagewright.data.formats.tar import list_shards, scan_shards
from stagewright.errors import counted
from stagewright.files import read_regular

_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_MOST_VISITS = 32  # of one folder below one class: links may lead to each other in more ways than can be walked
CLASS_NAMES = "classes.txt"  # beside the data: one name per line, in label order


class Kind(StrEnum):
    """How images are stored."""

    FOLDER = "folder"
    TAR = "tar"
    OFRECORD = "ofrecord"


def open_records(
    text: str, class_names: str | None = None, limit: int | None = None, progress: Progress = lambda found: None
) -> Records:
    """The records that `folder:DIR`, `tar:GLOB` or `ofrecord:DIR` names, read through their index."""
    kind, where = parse_data(text)
    try:
        index = _open_index(kind, where, class_names, progress)
    except OSError as error:
        raise DataError(f"data {kind}:{where}: {error.strerror} ({error.filename})") from error
    records = _records(kind, index)
    if not len(records):
        raise DataError(f"data {text} contains no records; check the path")
    return limited(records, limit)


def limited(records: Records, limit: int | None) -> Records:
    """`limit` of the records; all of them without one."""
    if limit is None:
        return records
    require_limit(limit, len(records))
    return Limited(records, limit)


def parse_data(text: str) -> tuple[Kind, str]:
    """`folder:DIR` as kind and path; the kind of a bare path follows from its files."""
    kind, colon, where = text.partition(":")
    if colon and where and kind in set(Kind):
        return Kind(kind), where
    path = Path(text)
    if path.suffix == ".tar" or (path.is_dir() and any(path.glob("*.tar"))):
        return Kind.TAR, text
    if path.is_dir():
        return (Kind.OFRECORD if any(path.glob("part-*")) else Kind.FOLDER), text
    raise DataError(f"data '{text}' is not one of folder:DIR, tar:GLOB, ofrecord:DIR")


def names_images(text: str) -> bool:
    """Whether `--data` names encoded images."""
    return text.partition(":")[0] in {*Kind, "segmentation", "table"}


def _open_index(kind: Kind, where: str, class_names: str | None, progress: Progress) -> Index:
    """The saved index, if it still lists all files of the data set; otherwise a new one."""
    if kind is Kind.TAR:
        root, shards = list_shards(where)
    else:
        root, shards = Path(where), []
        if not root.is_dir():
            raise DataError(f"data {kind}:{where}: no such folder")
    names = read_class_names(root, class_names)

    def is_current(index: Index) -> bool:
        paths = [entry.path for entry in index.watched]
        if kind is not Kind.FOLDER:
            listed = shards if kind is Kind.TAR else list_parts(root)
            return paths == listed and index.class_names == names and index.has_only_ranges_of_parts
        classes = list_classes(root)
        return (
            [path for path in paths if "/" not in path] == classes
            and index.class_names == (names or tuple(classes))
            and bool(((index.label >= 0) & (index.label < len(index.class_names))).all())
            and index.has_only_names_below
        )

    def build() -> Index:
        if kind is Kind.FOLDER:
            index = scan_folder(root, names, progress)
        elif kind is Kind.OFRECORD:
            index = scan_parts(root, names, progress)
        else:
            index = scan_shards(root, shards, names, progress)
        return replace(index, fingerprint=fingerprint(index, partial(bytes_of, _records(kind, index))))

    key = "\0".join((kind, where if kind is Kind.TAR else "", *names))
    return cached_index(root, key, is_current, build)


def read_class_names(root: Path, given: str | None) -> tuple[str, ...]:
    """One name per line, from the given file or the one beside the data; empty without either."""
    path = root / CLASS_NAMES if given is None else Path(given)
    if given is None and not path.is_file():
        return ()
    try:
        names = split_names(read_regular(path).decode())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"class names {path}: {reason}; give a text file with one name per line") from error
    if len(names) > MOST_CLASSES:
        raise DataError(f"class names {path}: {len(names)} names; a data set may have {MOST_CLASSES} classes")
    counts = Counter(names)
    if len(counts) != len(names):
        double = next(name for name in names if counts[name] > 1)
        raise DataError(f"class names {path}: '{double}' appears {counts[double]} times; list every class once")
    return names


def split_names(text: str) -> tuple[str, ...]:
    """The class names in a file: one per line, without empty lines."""
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _records(kind: Kind, index: Index) -> Records:
    return FileRecords(index) if kind is Kind.FOLDER else PartRecords(index)


def bytes_of(records: Records, number: int) -> bytes:
    """A record's bytes; none if it can't be read."""
    try:
        return records.get(number).data
    except BadRecordError:
        return b""


def list_classes(root: Path) -> list[str]:
    """The class folders of a data set, without hidden folders."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def scan_folder(root: Path, class_names: tuple[str, ...], progress: Progress) -> Index:
    """The index of a folder; the classes are its subfolders, or the names given, in that order."""
    found = list_classes(root)
    if not found:
        raise DataError(f"{root} has no subfolders; give a folder with one subfolder of images per class")
    names = class_names or tuple(found)
    labels = {name: number for number, name in enumerate(names)}
    if unknown := next((name for name in found if name not in labels), None):
        raise DataError(
            f"{root}: folder {unknown} is not one of {counted(len(names), 'class name')}; add it or remove the folder"
        )
    builder, watched = IndexBuilder(progress), list[Watched]()
    for name in found:
        for folder, files in walk_images(root, name):
            watched.append(folder)
            for file, size in files:
                builder.add(0, 0, size, labels[name], f"{folder.path}/{file}")
    index = builder.build(root, watched, names)
    if not len(index):
        raise DataError(f"{root}: no images in {counted(len(found), 'class folder')} ({', '.join(_SUFFIXES)})")
    return index


def walk_images(root: Path, name: str) -> Iterator[tuple[Watched, list[tuple[str, int]]]]:
    """A folder and all folders below it, sorted, each with its images and their sizes; links are followed."""
    waiting, visits = [name], Counter[tuple[int, int]]()
    while waiting:
        folder = waiting.pop()
        below, files = [], []
        try:
            status = (root / folder).stat()  # before it is listed: what is added meanwhile makes the index outdated
            with os.scandir(root / folder) as entries:
                for entry in entries:
                    if entry.is_dir():
                        below.append(f"{folder}/{entry.name}")
                    elif entry.name.lower().endswith(_SUFFIXES):
                        files.append((entry.name, _size(entry)))
        except OSError as error:
            raise DataError(f"{root / folder}: {error.strerror}; make it readable or remove it") from error
        identity = status.st_dev, status.st_ino
        visits[identity] += 1
        if visits[identity] > _MOST_VISITS:
            raise DataError(f"{root / folder}: links lead here {visits[identity]} times or more; remove all but one")
        yield Watched(folder, status.st_size, status.st_mtime_ns), sorted(files)
        waiting += sorted(below, reverse=True)


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:
        return 0  # a broken link: reading it will report it
