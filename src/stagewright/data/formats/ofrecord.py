"""OFRecord parts: frames of a length and one protobuf message each, read and written without a protobuf library."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from stagewright.data.formats.index import MOST_CLASSES, Index, IndexBuilder, Progress
from stagewright.data.formats.records import DataError
from stagewright.files import MOST_RECORD_BYTES

IMAGE, LABEL = b"encoded", b"class/label"
_LENGTH = struct.Struct("<q")
_PART = re.compile(r"part-(\d+)")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BYTES_LIST, _INT32_LIST, _INT64_LIST = 1, 4, 5
_MOST_VARINT_BYTES = 10
_MOST_FIELDS = 2**16  # in one message, or in one list of it


class OFRecordError(DataError):
    """A part is truncated or damaged."""


class _Malformed(Exception):
    """A message that is not valid protobuf; `scan_part` turns it into an error that names part and record."""


def list_parts(root: Path) -> list[str]:
    """The names of the parts in a folder, in order; their numbers must count from 0."""
    numbered: dict[int, str] = {}
    for path in sorted(root.iterdir()):
        if match := _PART.fullmatch(path.name):
            number = int(match[1])
            if number in numbered:
                raise DataError(f"{root}: {numbered[number]} and {path.name} are both part {number}; remove one")
            numbered[number] = path.name
    missing = next((number for number in range(len(numbered)) if number not in numbered), None)
    if missing is not None:
        last = numbered[max(numbered)]
        raise DataError(f"{root}: {len(numbered)} parts up to {last}, but part {missing} is missing; copy it here")
    return [numbered[number] for number in range(len(numbered))]


def scan_parts(root: Path, parts: list[str], class_names: tuple[str, ...], progress: Progress) -> Index:
    """The index of a folder of parts: where each image is, and its label."""
    if not parts:
        raise DataError(f"{root} contains no OFRecord parts; they are named part-00000, part-00001 and so on")
    builder = IndexBuilder(root, progress)
    builder.add_parts(parts, scan_part)
    return builder.build(class_names)


def scan_part(file: BinaryIO, size: int, path: str) -> Iterator[tuple[int, int, int]]:
    """Offset, length and label of each image of a part; length 0 without an image, label -1 without a label.

    A message above the largest record is not read: its own length stands for that of its image, so that reading the
    record says how large it is.
    """
    position = record = 0
    while position < size:
        header = file.read(_LENGTH.size)
        if len(header) < _LENGTH.size:
            raise OFRecordError(
                f"{path}: record {record} at byte {position} is truncated: its length takes {_LENGTH.size} bytes but "
                f"{len(header)} are left; copy the part again"
            )
        (length,) = _LENGTH.unpack(header)
        first = position + _LENGTH.size
        if not 0 < length <= size - first:
            raise OFRecordError(
                f"{path}: record {record} at byte {position} claims {length} bytes but {size - first} are left; "
                "the part is truncated or damaged, copy it again"
            )
        if length > MOST_RECORD_BYTES:
            file.seek(length, os.SEEK_CUR)
            yield first, length, -1
        else:
            message = file.read(length)
            try:
                if len(message) < length:
                    raise _Malformed(f"{len(message)} of {length} bytes could be read")
                where, image_length, label = _image_and_label(message)
            except _Malformed as error:
                raise OFRecordError(
                    f"{path}: record {record} at byte {position} is not an OFRecord message ({error}); "
                    "the part is truncated or damaged, copy it again"
                ) from None
            yield first + where, image_length, label
        position = first + length
        record += 1


def _image_and_label(message: bytes) -> tuple[int, int, int]:
    """Offset and length of the image in a message, and the label."""
    image, label = (0, 0), -1
    for number, kind, first, last in _fields(message, 0, len(message)):
        if number != 1 or kind != _BYTES:
            continue
        key, value = _entry(message, first, last)
        if key == IMAGE:
            image = _bytes_value(message, *value)
        elif key == LABEL:
            label = _integer_value(message, *value)
    return image[0], image[1] - image[0], label


def _entry(message: bytes, first: int, last: int) -> tuple[bytes, tuple[int, int]]:
    """The key of a map entry, and the extent of its value."""
    key, value = b"", (0, 0)
    for number, kind, begin, end in _fields(message, first, last):
        if kind == _BYTES and number == 1:
            key = message[begin:end]
        elif kind == _BYTES and number == 2:
            value = begin, end
    return key, value


def _bytes_value(message: bytes, first: int, last: int) -> tuple[int, int]:
    """The extent of the first value of a feature's list of bytes; empty if the feature is another kind of list."""
    for number, kind, begin, end in _fields(message, first, last):
        if number == _BYTES_LIST and kind == _BYTES:
            for inner, inner_kind, start, stop in _fields(message, begin, end):
                if inner == 1 and inner_kind == _BYTES:
                    return start, stop
    return 0, 0


def _integer_value(message: bytes, first: int, last: int) -> int:
    """The first value of a feature's list of integers, packed or not; -1 if it can't be a class number."""
    for number, kind, begin, end in _fields(message, first, last):
        if number in (_INT32_LIST, _INT64_LIST) and kind == _BYTES:
            for inner, inner_kind, start, stop in _fields(message, begin, end):
                if inner == 1 and inner_kind in (_VARINT, _BYTES) and stop > start:
                    value, after = _varint(message, start, stop)
                    if inner_kind == _VARINT and after != stop:
                        raise _Malformed("an unterminated number")
                    return value if value < MOST_CLASSES else -1
    return -1


def _fields(message: bytes, position: int, last: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, wire type and extent of each field of a message; no recursion, every extent within the message."""
    count = 0
    while position < last:
        count += 1
        if count > _MOST_FIELDS:
            raise _Malformed(f"more than {_MOST_FIELDS} fields")
        tag, position = _varint(message, position, last)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise _Malformed(f"field number 0 at byte {position}")
        if kind == _VARINT:
            _, end = _varint(message, position, last)
        elif kind == _BYTES:
            length, position = _varint(message, position, last)
            end = position + length
        elif kind in (_FIXED32, _FIXED64):
            end = position + (8 if kind == _FIXED64 else 4)
        else:
            raise _Malformed(f"wire type {kind} at byte {position}")
        if end > last:
            raise _Malformed(f"a field that ends at byte {end} of {last}")
        yield number, kind, position, end
        position = end


def _varint(message: bytes, position: int, last: int) -> tuple[int, int]:
    """A variable-length number, and the position after it."""
    value = shift = 0
    for at in range(position, min(last, position + _MOST_VARINT_BYTES)):
        byte = message[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    raise _Malformed(f"an unterminated number at byte {position}")


def encode_record(image: bytes, label: int) -> bytes:
    """One frame with the two features that training reads."""
    encoded = _field(_BYTES_LIST, _field(1, image))
    number = _field(_INT32_LIST, _field(1, _encode_varint(label)))
    message = b"".join(
        _field(1, _field(1, key) + _field(2, value)) for key, value in ((IMAGE, encoded), (LABEL, number))
    )
    return _LENGTH.pack(len(message)) + message


def _field(number: int, data: bytes) -> bytes:
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(len(data)) + data


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
