"""Tar shards in WebDataset's naming: `key.jpg` beside `key.cls` or `key.json`; read and written here.

`members` reads headers itself, not by `tarfile`: a million small members take 7 s instead of 20 s and no memory instead
of 470 MiB, and a damaged header is an error, where `tarfile` silently ends the list of members.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from stagewright.data.formats.index import MOST_CLASSES, Index, IndexBuilder, Progress
from stagewright.data.formats.records import DataError

IMAGES = frozenset({"jpg", "jpeg", "png", "ppm", "webp", "bmp", "gif"})
_BLOCK = 512
_WILD = frozenset("*?[")
_MOST_CLASS_BYTES = 2**20  # in a .cls or .json member, or in a long name
_LABEL_KEYS = ("cls", "label", "class")
_FILE_TYPES = (b"0", b"\0", b"7")
_LONG_NAME, _PAX, _PAX_GLOBAL, _SPARSE = b"L", b"x", b"g", b"S"
END = bytes(2 * _BLOCK)


class TarError(DataError):
    """A shard is truncated or damaged."""


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a shard."""

    name: str
    offset: int
    size: int


@dataclass(slots=True)
class _Sample:
    """What a shard contains under one key."""

    offset: int = 0
    size: int = 0
    label: int = -1
    kinds: set[str] = field(default_factory=set)


def list_shards(pattern: str) -> tuple[Path, list[str]]:
    """The folder of the shards that a pattern matches, and their paths below it, sorted."""
    fixed = Path(pattern)
    if fixed.is_file():
        return fixed.parent, [fixed.name]
    if fixed.is_dir():
        pattern = str(fixed / "*.tar")
    while _WILD & set(str(fixed)):
        fixed = fixed.parent
    inner = str(Path(pattern).relative_to(fixed))
    try:
        matches = list(fixed.glob(inner)) if inner != "." else []
    except ValueError as error:
        raise DataError(f"tar pattern '{pattern}': {error}") from error
    found = sorted(str(path.relative_to(fixed)) for path in matches if path.is_file())
    if not found:
        raise DataError(f"no tar shards at {pattern}; give a folder, a file or a pattern such as 'train-*.tar'")
    return fixed, found


def scan_shards(root: Path, shards: list[str], class_names: tuple[str, ...], progress: Progress) -> Index:
    """The index of some shards: where each image is, its label and its key."""
    builder = IndexBuilder(root, progress)
    numbers = {name: number for number, name in enumerate(class_names)}
    builder.add_parts(shards, partial(scan_shard, classes=numbers))
    return builder.build(class_names)


def scan_shard(file: BinaryIO, size: int, path: str, classes: Mapping[str, int]) -> Iterator[tuple[int, int, int, str]]:
    """Offset, length, label and key of each image of a shard, in order of appearance."""
    samples: dict[str, _Sample] = {}
    for member in members(file, size, path):
        key, kind = _key_and_kind(member.name)
        if not key or (kind not in IMAGES and kind not in ("cls", "json")):
            continue
        sample = samples.setdefault(key, _Sample())
        if kind in sample.kinds or (kind in IMAGES and sample.kinds & IMAGES):
            raise TarError(f"{path}: {key} has a second .{kind} at byte {member.offset}; give every sample its own key")
        sample.kinds.add(kind)
        if kind in IMAGES:
            sample.offset, sample.size = member.offset, member.size
        elif sample.label < 0:
            sample.label = _parse_class(_read(file, member, path), kind, classes)
    for key, sample in samples.items():
        if sample.kinds & IMAGES:
            yield sample.offset, sample.size, sample.label, key


def _key_and_kind(name: str) -> tuple[str, str]:
    """`train/0001.jpg` is key `train/0001` of kind jpg; the key ends at the first dot of the file name."""
    folder, slash, last = name.removeprefix("./").rpartition("/")
    stem, _, kind = last.partition(".")
    return (f"{folder}{slash}{stem}" if stem else ""), kind.lower()


def _parse_class(text: bytes, kind: str, classes: Mapping[str, int]) -> int:
    """The class number in a .cls or .json member, or of the class it names; -1 if there is none."""
    try:
        value = json.loads(text) if kind == "json" else text.decode().strip()
        if isinstance(value, dict):
            value = next((value[name] for name in _LABEL_KEYS if name in value), None)
        if isinstance(value, str):
            value = classes[value] if value in classes else int(value) if value.isascii() and value.isdigit() else -1
    except (ValueError, RecursionError):  # also of int(), about thousands of digits
        return -1
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_CLASSES else -1


def members(file: BinaryIO, size: int, path: str) -> Iterator[Member]:
    """The files of a shard: ustar headers, GNU's long names and pax records; other members are skipped."""
    position, long_name, records = 0, "", dict[str, str]()
    while position < size:
        header = _block(file, position, path)
        if header == bytes(_BLOCK):
            return  # two blocks of zeros end a shard; the first one suffices
        kind, first = header[156:157], position + _BLOCK
        length = _size(header, records.get("size"), position, path)
        if length > size - first:
            raise TarError(
                f"{path}: the member at byte {position} claims {length} bytes but {size - first} are left; "
                "the shard is truncated, copy it again"
            )
        if kind in (_LONG_NAME, _PAX):
            content = _read(file, Member("a long name", first, length), path)
            if kind == _LONG_NAME:
                long_name = _text(content)
            else:
                records = _pax_records(content, position, path)
        elif kind == _SPARSE or any(key.startswith("GNU.sparse.") for key in records):
            raise TarError(f"{path}: the member at byte {position} is stored with holes; write the shard without them")
        elif kind != _PAX_GLOBAL:
            if kind in _FILE_TYPES:
                yield Member(records.get("path") or long_name or _header_name(header), first, length)
            long_name, records = "", {}
        position = first + -(-length // _BLOCK) * _BLOCK


def _block(file: BinaryIO, position: int, path: str) -> bytes:
    file.seek(position)
    header = file.read(_BLOCK)
    if len(header) < _BLOCK:
        raise TarError(
            f"{path}: {len(header)} of {_BLOCK} bytes of the header at byte {position}; "
            "the shard is truncated, copy it again"
        )
    return header


def _size(header: bytes, extended: str | None, position: int, path: str) -> int:
    """The bytes of a member, by its header, whose checksum is checked, or by the extended one before it."""
    if _number(header[148:156]) != sum(header[:148]) + 8 * ord(" ") + sum(header[156:]):
        raise TarError(f"{path}: no tar header at byte {position}: its checksum is wrong; the shard is damaged")
    length = _number(header[124:136])
    if length is None or length < 0:
        raise TarError(f"{path}: the member at byte {position} has no size; the shard is damaged, copy it again")
    if extended is None:
        return length
    if not (extended.isascii() and extended.isdigit() and len(extended) < 19):
        raise TarError(f"{path}: the member before byte {position} has size '{extended[:20]}'; the shard is damaged")
    return int(extended)


def _number(text: bytes) -> int | None:
    """Octal digits, or GNU's binary form for large numbers."""
    if text[0] & 0x80:
        return int.from_bytes(text, "big", signed=False) - (0x80 << 8 * (len(text) - 1))
    digits = text.strip(b" \0")
    return int(digits, 8) if digits and all(digit in b"01234567" for digit in digits) else None


def _header_name(header: bytes) -> str:
    name, prefix = _text(header[:100]), _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(content: bytes) -> str:
    return content.partition(b"\0")[0].decode(errors="surrogateescape")


def _read(file: BinaryIO, member: Member, path: str) -> bytes:
    if member.size > _MOST_CLASS_BYTES:
        raise TarError(
            f"{path}: {member.name} at byte {member.offset} has {member.size} bytes; "
            f"classes and names take {_MOST_CLASS_BYTES} at most"
        )
    file.seek(member.offset)
    return file.read(member.size)


def _pax_records(content: bytes, position: int, path: str) -> dict[str, str]:
    """`LENGTH KEY=VALUE` lines, where LENGTH counts the whole line."""
    records: dict[str, str] = {}
    first = 0
    while first < len(content):
        digits, space, _ = content[first : first + 9].partition(b" ")
        length = int(digits) if space and digits.isdigit() and len(digits) < 8 else 0
        key, equals, value = content[first + len(digits) + 1 : first + max(length - 1, 0)].partition(b"=")
        if not equals or not len(digits) < length <= len(content) - first:
            raise TarError(f"{path}: the extended header at byte {position} is damaged; copy the shard again")
        records[_text(key)] = value.decode(errors="surrogateescape")
        first += length
    return records


def member_header(name: str, size: int) -> bytes:
    """The header of one member; depends on name and size alone, not on user or time."""
    info = tarfile.TarInfo(str(PurePosixPath(name)))
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def padded(data: bytes) -> bytes:
    """A member's content, padded to whole blocks."""
    return data + bytes(-len(data) % _BLOCK)
