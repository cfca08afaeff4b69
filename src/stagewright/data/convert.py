"""Converts a data set to a folder, tar shards or OFRecord parts: same labels, same order, and the same bytes.

Unless images are to be made cheaper to decode: shrunk, or as raw pixels (`Shrink`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from stagewright.data.datasets import CLASS_NAMES, Kind, split_names
from stagewright.data.decode import Decoder, encode_jpeg, encode_raw, shrunk
from stagewright.data.formats import ofrecord, tar
from stagewright.data.formats.records import BadRecordError, DataError, Record, Records
from stagewright.errors import is_text

_QUALITY = 92  # of shrunk JPEGs
_AHEAD = 4  # records that each thread shrinks before they are written
_MOST_FOLDERS = 2**20  # of classes
_SUFFIXES = (
    (b"\xff\xd8", "jpg"),
    (b"\x89PNG", "png"),
    (b"RIFF", "webp"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"P6", "ppm"),
)


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion wrote, and what it left out."""

    records: int
    classes: int
    left_out: tuple[str, ...]  # one reason per record, beginning with its name
    bytes_read: int = 0  # of the encoded images
    bytes_written: int = 0


@dataclass(frozen=True, slots=True)
class Shrink:
    """How to make images cheaper to decode."""

    side: int | None = None  # of the shorter side, of larger images; None: as it is
    is_raw: bool = False  # pixels instead of JPEGs
    threads: int = 1

    def applied(self, record: Record) -> Record:
        """A record with its image made so; a JPEG that is small enough keeps its bytes."""
        image = Decoder().decode(record.data)
        small = image if self.side is None else shrunk(image, self.side)
        if self.is_raw:
            return replace(record, data=encode_raw(small))
        return record if small is image else replace(record, data=encode_jpeg(small, _QUALITY))


def convert(
    records: Records,
    kind: Kind,
    root: Path,
    per_part: int,
    progress: Callable[[int], None] = lambda done: None,
    shrink: Shrink | None = None,
) -> Converted:
    """Write every readable record below `root`, which must be empty or not exist yet."""
    _make_empty(root)
    listed = _listed_names(records.class_names)
    folders = _class_folders(records) if kind is Kind.FOLDER else ()
    left_out, sizes = list[str](), [0, 0]

    def readable() -> Iterator[Record]:
        for index, (size, made) in enumerate(_made(records, shrink)):
            if isinstance(made, BadRecordError):
                left_out.append(str(made))
                continue
            sizes[0] += size
            sizes[1] += len(made.data)
            yield made
            progress(index + 1)

    try:
        if records.class_names:
            (root / CLASS_NAMES).write_bytes(listed)
        if kind is Kind.FOLDER:
            _write_folders(root, folders, readable())
        else:
            _write_parts(root, _OFRECORD if kind is Kind.OFRECORD else _TAR, per_part, enumerate(readable()))
    except OSError as error:
        raise DataError(f"can't write to {root}: {error.strerror}; free some space or choose another folder") from error
    return Converted(len(records) - len(left_out), records.classes, tuple(left_out), *sizes)


def _made(records: Records, shrink: Shrink | None) -> Iterator[tuple[int, Record | BadRecordError]]:
    """Every record in order, with the bytes that it had, or why it is bad; threads shrink some ahead."""

    def make(index: int) -> tuple[int, Record | BadRecordError]:
        try:
            record = records.get(index)
        except BadRecordError as error:
            return 0, error
        try:
            return len(record.data), record if shrink is None else shrink.applied(record)
        except BadRecordError as error:
            return 0, BadRecordError(f"{record.name}: {error}")

    if shrink is None or shrink.threads == 1:
        yield from map(make, range(len(records)))
        return
    with ThreadPoolExecutor(shrink.threads) as pool:
        ahead: deque[Future[tuple[int, Record | BadRecordError]]] = deque()
        for index in range(len(records)):
            ahead.append(pool.submit(make, index))
            if len(ahead) > _AHEAD * shrink.threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _make_empty(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        found = next(root.iterdir(), None)
    except OSError as error:
        raise DataError(f"can't write to {root}: {error.strerror}; choose another folder") from error
    if found is not None:
        raise DataError(f"{root} is not empty, it contains {found.name}; choose an empty or a new folder")


def _listed_names(names: tuple[str, ...]) -> bytes:
    """A file of these class names; an error if it would not give the same names when it is read."""
    if wrong := next((name for name in names if split_names(name) != (name,) or not is_text(name)), None):
        raise DataError(f"class name {wrong!a} can't be a line of {CLASS_NAMES}; rename the class")
    return "".join(f"{name}\n" for name in names).encode()


def _class_folders(records: Records) -> tuple[str, ...]:
    """A folder name per label: the class name, or a number padded so that folders sort by label."""
    if records.classes > _MOST_FOLDERS:
        raise DataError(
            f"{records.classes} classes can't be written as folders, {_MOST_FOLDERS} can; "
            "convert to tar:DIR or ofrecord:DIR"
        )
    width = len(str(max(records.classes - 1, 0)))
    known = records.class_names
    names = (*known, *(f"{label:0{width}}" for label in range(len(known), records.classes)))
    if wrong := next((name for name in names if "/" in name or "\0" in name or name.startswith(".")), None):
        raise DataError(f"class name '{wrong}' can't name a folder; give other names with --class-names")
    return names


def _write_folders(root: Path, names: tuple[str, ...], records: Iterator[Record]) -> None:
    """One file per record, in the folder of its class; a class without records still gets a folder."""
    for name in names:
        (root / name).mkdir()
    for number, record in enumerate(records):
        (root / names[record.label] / f"{number:08}.{suffix_of(record.data)}").write_bytes(record.data)


@dataclass(frozen=True, slots=True)
class _Format:
    """How parts are named, how a record is stored in one, and how a part ends."""

    name: str
    encode: Callable[[int, Record], bytes]
    end: bytes


def _encode_for_tar(number: int, record: Record) -> bytes:
    members = ((suffix_of(record.data), record.data), ("cls", str(record.label).encode()))
    return b"".join(
        tar.member_header(f"{number:08}.{suffix}", len(data)) + tar.padded(data) for suffix, data in members
    )


_OFRECORD = _Format("part-{:05}", lambda _, record: ofrecord.encode_record(record.data, record.label), b"")
_TAR = _Format("shard-{:05}.tar", _encode_for_tar, tar.END)


def _write_parts(root: Path, how: _Format, per_part: int, records: Iterator[tuple[int, Record]]) -> None:
    """Parts of `per_part` records; an unfinished part has a name that no reader accepts."""
    for part in itertools.count():
        if (first := next(records, None)) is None:
            return
        name = how.name.format(part)
        unfinished = root / f".{name}.unfinished"
        with unfinished.open("wb") as file:
            for number, record in itertools.chain([first], itertools.islice(records, per_part - 1)):
                file.write(how.encode(number, record))
            file.write(how.end)
        unfinished.rename(root / name)


def suffix_of(data: bytes) -> str:
    """The file suffix for these bytes, by their first bytes; readers don't depend on it."""
    return next((suffix for start, suffix in _SUFFIXES if data.startswith(start)), "jpg")
