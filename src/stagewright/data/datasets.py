"""Opens the images that `--data` names: lists their files, reads class names, and finds or builds their index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from stagewright.data.formats.folders import list_classes, scan_folder
from stagewright.data.formats.index import MOST_CLASSES, Index, Progress, cached_index
from stagewright.data.formats.ofrecord import list_parts, scan_parts
from stagewright.data.formats.records import DataError, FileRecords, Limited, PartRecords, Records, fingerprint
from stagewright.data.formats.tar import list_shards, scan_shards
from stagewright.data.segmentation import PairRecords, list_pairs, scan_pairs
from stagewright.files import read_regular

CLASS_NAMES = "classes.txt"  # beside the data: one name per line, in label order


class Kind(StrEnum):
    """How images with a class each are stored."""

    FOLDER = "folder"
    TAR = "tar"
    OFRECORD = "ofrecord"


@dataclass(frozen=True, slots=True)
class _Listing:
    """How images of one kind are listed and read."""

    find: Callable[[str], tuple[Path, list[str]]]  # their folder, and its parts, or folders of files
    scan: Callable[[Path, list[str], tuple[str, ...], Progress], Index]
    records: type[FileRecords]
    key: Callable[[str], tuple[str, ...]] = lambda where: ("",)  # what else is in the name of the index


def _below(kind: str, listed: Callable[[Path], list[str]]) -> Callable[[str], tuple[Path, list[str]]]:
    """What is listed in a folder."""

    def find(where: str) -> tuple[Path, list[str]]:
        if not Path(where).is_dir():
            raise DataError(f"data {kind}:{where}: no such folder")
        return Path(where), listed(Path(where))

    return find


_LISTINGS = {
    "folder": _Listing(_below("folder", list_classes), scan_folder, FileRecords),
    "tar": _Listing(list_shards, scan_shards, PartRecords, lambda where: (where,)),
    "ofrecord": _Listing(_below("ofrecord", list_parts), scan_parts, PartRecords),
    "segmentation": _Listing(_below("segmentation", list_pairs), scan_pairs, PairRecords, lambda where: ()),
}


def open_records(
    text: str, class_names: str | None = None, limit: int | None = None, progress: Progress = lambda found: None
) -> Records:
    """The records that `folder:DIR`, `tar:GLOB` or `ofrecord:DIR` names, read through their index."""
    return open_listed(*parse_data(text), class_names, limit, progress)


def open_listed(
    kind: str,
    where: str,
    class_names: str | None = None,
    limit: int | None = None,
    progress: Progress = lambda found: None,
) -> Records:
    """The records of one kind of images, read through their index."""
    listing = _LISTINGS[kind]
    try:
        records = listing.records(_open_index(kind, where, class_names, progress))
    except OSError as error:
        raise DataError(f"data {kind}:{where}: {error.strerror} ({error.filename})") from error
    if not len(records):
        raise DataError(f"data {kind}:{where} contains no records; check the path")
    return limited(records, limit)


def limited(records: Records, limit: int | None) -> Records:
    """`limit` of the records; all of them without one."""
    return records if limit is None else Limited(records, limit)


def parse_data(text: str) -> tuple[str, str]:
    """`folder:DIR` as kind and path; the kind of a bare path follows from its files."""
    kind, _, where = text.partition(":")
    if where and kind in set(Kind):
        return kind, where
    path = Path(text)
    if path.suffix == ".tar" or (path.is_dir() and any(path.glob("*.tar"))):
        return Kind.TAR, text
    if path.is_dir():
        return (Kind.OFRECORD if any(path.glob("part-*")) else Kind.FOLDER), text
    raise DataError(f"data '{text}' is not one of folder:DIR, tar:GLOB, ofrecord:DIR")


def _open_index(kind: str, where: str, class_names: str | None, progress: Progress) -> Index:
    """The saved index, if it still lists all files of the data set; otherwise a new one."""
    listing = _LISTINGS[kind]
    root, found = listing.find(where)
    names = read_class_names(root, class_names)
    is_of_parts = listing.records is PartRecords

    def is_current(index: Index) -> bool:
        """Whether nothing was added beside what is watched, and every number and name is one of this data."""
        known = names or tuple(found) if kind == Kind.FOLDER else names
        return (
            [entry.path for entry in index.watched if is_of_parts or "/" not in entry.path] == found
            and index.class_names == known
            and (kind != Kind.FOLDER or bool(((index.label >= 0) & (index.label < len(known))).all()))
            and (index.has_only_ranges_of_parts if is_of_parts else index.has_only_names_below)
        )

    def build() -> Index:
        index = listing.scan(root, found, names, progress)
        return replace(index, fingerprint=fingerprint(listing.records(index)))

    return cached_index(root, "\0".join((kind, *listing.key(where), *names)), is_current, build)


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
