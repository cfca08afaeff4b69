"""OFRecord parts are read as the format says, and a part that is damaged is named with record and byte."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from stagewright.data.datasets import open_records
from stagewright.data.formats.ofrecord import OFRecordError, encode_record
from stagewright.data.formats.records import BadRecordError, DataError
from tests.pictures import (
    block,
    bytes_feature,
    feature,
    frame,
    int_feature,
    jpeg,
    make_ofrecord,
    message,
    varint,
    write_parts,
)
from tests.shared import shared_file


@pytest.mark.parametrize("width", [5, 1, 0])
def test_parts_are_in_numerical_order_padded_or_not(width: int, tmp_path: Path) -> None:
    parts = [[message(bytes([number]) * 9, number)] for number in range(12)]
    records = open_records(f"ofrecord:{write_parts(tmp_path, parts, width)}")
    assert [records.get(index).label for index in range(12)] == list(range(12))
    assert records.get(11).data == b"\x0b" * 9 and records.classes == 12
    assert records.name(11).endswith(f"part-{11:0{width}}: record 0")


def test_reads_a_message_with_all_of_imagenets_fields(tmp_path: Path) -> None:
    image = jpeg(1)
    full = (
        bytes_feature("data_id", b"7")
        + bytes_feature("colorspace", b"RGB")
        + int_feature("height", 40)
        + feature("object/bbox/xmin", 2, block(1, struct.pack("<2f", 0.5, 0.25)))
        + int_feature("object/bbox/label", 3, 999, 12)
        + bytes_feature("encoded", image)
        + feature("nothing", 3, b"")
        + int_feature("class/label", 417)
        + bytes_feature("class/text", "größe".encode())
    )
    record = open_records(f"ofrecord:{write_parts(tmp_path, [[full]])}").get(0)
    assert (record.data, record.label) == (image, 417)


@pytest.mark.parametrize("kind", [4, 5], ids=["int32", "int64"])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("label", [0, 127, 128, 21840])
def test_reads_labels_of_every_encoding(kind: int, is_packed: bool, label: int, tmp_path: Path) -> None:
    text = int_feature("class/label", label, 5, kind=kind, is_packed=is_packed) + bytes_feature("encoded", b"xyz")
    record = open_records(f"ofrecord:{write_parts(tmp_path, [[text]])}").get(0)
    assert (record.data, record.label) == (b"xyz", label)


def test_skips_unknown_fields_and_takes_the_last_of_a_repeated_key(tmp_path: Path) -> None:
    numbers = bytes([9 * 8]) + varint(300) + bytes([10 * 8 + 1]) + bytes(8) + bytes([11 * 8 + 5]) + bytes(4)
    odd = numbers + block(12, b"?")
    text = odd + message(b"old", 1) + odd + message(b"new", 2)
    record = open_records(f"ofrecord:{write_parts(tmp_path, [[text]])}").get(0)
    assert (record.data, record.label) == (b"new", 2)  # of two entries of a map with one key the last counts


def test_a_written_record_has_the_expected_bytes() -> None:
    for image, label in ((b"", 0), (b"abc", 127), (b"\0" * 300, 1000), (jpeg(3), 70_000)):
        assert encode_record(image, label) == frame(message(image, label))


GOOD = message(b"image", 3)


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("cut in the message", frame(GOOD) + frame(GOOD)[:-4], ["record 1", "byte 52", "44 bytes", "40 are left"]),
        ("cut in the length", frame(GOOD) + b"\x25\0\0", ["record 1", "byte 52", "8 bytes", "3 are left"]),
        ("length too long", struct.pack("<q", 99) + GOOD, ["record 0", "byte 0", "99 bytes", "44 are left"]),
        (
            "length too short",
            struct.pack("<q", 30) + GOOD + frame(GOOD),
            ["record 0", "byte 0", "not an OFRecord message"],
        ),
        ("length negative", frame(GOOD) + struct.pack("<q", -5) + GOOD, ["record 1", "byte 52", "-5 bytes"]),
        ("length zero", struct.pack("<q", 0) + frame(GOOD), ["record 0", "0 bytes"]),
        ("huge", struct.pack("<q", 2**62) + GOOD, ["record 0", str(2**62)]),
        ("wrong bytes", frame(b"\xff" * 40), ["record 0", "not an OFRecord message"]),
        ("group", frame(bytes([1 * 8 + 3]) + GOOD), ["wire type 3"]),
        ("endless number", frame(b"\x08" + b"\x80" * 12), ["unterminated number"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_part_names_path_record_and_byte(name: str, part: bytes, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "part-0").write_bytes(frame(GOOD))
    (tmp_path / "part-1").write_bytes(part)
    with pytest.raises(OFRecordError) as caught:
        open_records(f"ofrecord:{tmp_path}")
    text = str(caught.value)
    assert all(word in text for word in [str(tmp_path / "part-1"), *words]), text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (bytes_feature("encoded", b"image"), "no class"),
        (bytes_feature("encoded", b"image") + int_feature("class/label", -1), "no class"),
        (bytes_feature("encoded", b"image") + bytes_feature("class/label", b"3"), "no class"),
        (bytes_feature("encoded", b"image") + int_feature("class/label"), "no class"),
        (int_feature("class/label", 3), "no image"),
        (feature("encoded", 4, block(1, varint(3))) + int_feature("class/label", 3), "no image"),
    ],
    ids=["label missing", "label negative", "label as bytes", "label empty", "image missing", "image as numbers"],
)
def test_a_record_without_image_or_label_is_bad_and_the_others_are_not(text: bytes, words: str, tmp_path: Path) -> None:
    records = open_records(f"ofrecord:{write_parts(tmp_path, [[GOOD, text, GOOD]])}")
    assert len(records) == 3 and records.get(0).label == records.get(2).label == 3
    with pytest.raises(BadRecordError, match=f"part-00000: record 1 has {words}"):
        records.get(1)


def test_parts_must_count_from_zero_without_gaps_or_duplicates(tmp_path: Path) -> None:
    write_parts(tmp_path, [[GOOD]] * 4)
    (tmp_path / "part-00002").rename(tmp_path / "away")
    with pytest.raises(DataError, match="3 parts up to part-00003, but part 2 is missing"):
        open_records(f"ofrecord:{tmp_path}")
    (tmp_path / "part-3").write_bytes(b"")
    with pytest.raises(DataError, match="part-00003 and part-3 are both part 3"):
        open_records(f"ofrecord:{tmp_path}")


def test_an_empty_part_is_allowed_and_an_empty_folder_is_not(tmp_path: Path) -> None:
    records = open_records(f"ofrecord:{write_parts(tmp_path / 'a', [[GOOD], [], [GOOD, GOOD]])}")
    assert len(records) == 3 and records.name(2).endswith("part-00002: record 1")
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match="no OFRecord parts"):
        open_records(f"ofrecord:{tmp_path / 'b'}")
    with pytest.raises(DataError, match=r"data ofrecord:.*: no such folder"):
        open_records(f"ofrecord:{tmp_path / 'c'}")


def test_a_part_that_shrinks_after_opening_gives_bad_records(tmp_path: Path) -> None:
    records = open_records(f"ofrecord:{make_ofrecord(tmp_path, 4, parts=1)}")
    (tmp_path / "part-00000").write_bytes(b"")
    with pytest.raises(BadRecordError, match=r"0 of .* bytes are left"):
        records.get(0)


def test_cifar10_has_its_published_counts() -> None:
    root = shared_file("data/cifar10")
    for name, samples in (("train", 50_000), ("test", 10_000)):
        records = open_records(f"ofrecord:{root / name}")
        assert (len(records), records.classes) == (samples, 10)
        assert records.get(samples - 1).data.startswith(b"\xff\xd8")
