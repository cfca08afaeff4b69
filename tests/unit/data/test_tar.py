"""Tar shards are read as the standard library's tarfile reads them, samples as WebDataset names them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from stagewright.data.datasets import open_records
from stagewright.data.formats.records import BadRecordError, DataError
from stagewright.data.formats.tar import TarError, members
from tests.pictures import jpeg, make_tar, samples_of


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_finds_the_members_that_tarfile_finds(kind: int, tmp_path: Path) -> None:
    names = ["a.jpg", "folder/b.jpg", "x" * 90 + "/" + "y" * 60 + ".jpg", "empty.cls"]
    if kind != tarfile.USTAR_FORMAT:
        names += ["z" * 300 + ".jpg", "größe/ü.jpg", "folder/" * 40 + "deep.cls"]
    path = make_tar(tmp_path / "a.tar", [(name, bytes([i]) * (i * 511)) for i, name in enumerate(names)], kind)
    with tarfile.open(path, "a", format=kind) as archive:  # what is no file is passed over
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "a.jpg"
        archive.addfile(link)
    with tarfile.open(path) as archive:
        expected = [(info.name, info.offset_data, info.size) for info in archive.getmembers() if info.isreg()]
    with path.open("rb") as file:
        found = [(m.name, m.offset, m.size) for m in members(file, path.stat().st_size, str(path))]
    assert found == expected and len(found) == len(names)


def test_samples_of_several_shards_are_in_order(tmp_path: Path) -> None:
    members = samples_of(10)
    make_tar(tmp_path / "train-1.tar", members[10:])
    make_tar(tmp_path / "train-0.tar", members[:10])
    make_tar(tmp_path / "val-0.tar", members[:2])
    records = open_records(f"tar:{tmp_path}/train-*.tar")
    assert [records.get(index).label for index in range(10)] == [index % 4 for index in range(10)]
    assert [records.get(index).data for index in range(10)] == [jpeg(index) for index in range(10)]
    assert records.name(7) == f"{tmp_path}/train-1.tar: 0007"
    assert len(open_records(f"tar:{tmp_path}")) == 11 and len(open_records(f"tar:{tmp_path}/val-0.tar")) == 1


@pytest.mark.parametrize(
    ("name", "text", "label"),
    [
        ("a.cls", b"12", 12),
        ("a.cls", b" 7\n", 7),
        ("a.json", b'{"cls": 3, "caption": "a cat"}', 3),
        ("a.json", b'{"class": "5"}', 5),
        ("a.json", b"9", 9),
        ("a.cls", b"cat", 1),
        ("a.json", b'{"label": "dog"}', 2),
    ],
)
def test_reads_classes_by_number_from_json_and_by_name(name: str, text: bytes, label: int, tmp_path: Path) -> None:
    make_tar(tmp_path / "a.tar", [("a.jpg", b"image"), (name, text)])
    (tmp_path / "names.txt").write_text("bird\ncat\ndog\n")
    assert open_records(f"tar:{tmp_path}/a.tar", str(tmp_path / "names.txt")).get(0).label == label


@pytest.mark.parametrize(
    "member",
    [
        ("other.txt", b"1"),
        ("b.cls", b""),
        ("b.cls", b"-1"),
        ("b.cls", b"cat"),
        ("b.cls", b"1.5"),
        ("b.cls", b"\xff\xfe"),
        ("b.cls", b"9" * 40),
        ("b.cls", b"9" * 5000),
        ("b.json", b"{"),
        ("b.json", b'{"label": null}'),
        ("b.json", b'{"label": true}'),
        ("b.json", b"[" * 100_000),
    ],
    ids=lambda member: f"{member[0]} {member[1][:12]!r}",
)
def test_a_sample_with_a_missing_class_is_bad_and_named(member: tuple[str, bytes], tmp_path: Path) -> None:
    others = [("a.jpg", b"one"), ("a.cls", b"0"), ("b.jpg", b"two"), ("c.cls", b"1")]
    path = make_tar(tmp_path / "s.tar", [*others, member])
    records = open_records(f"tar:{path}")
    assert len(records) == 2 and records.get(0).data == b"one"  # a class without image is no sample
    with pytest.raises(BadRecordError, match=r"s\.tar: b has no class"):
        records.get(1)


def test_a_key_may_have_only_one_image(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "s.tar", [("a.jpg", b"one"), ("a.cls", b"0"), ("a.png", b"two")])
    with pytest.raises(TarError, match=r"a has a second \.png"):
        open_records(f"tar:{path}")


def test_an_error_names_the_path_and_byte_of_the_damage(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "s.tar", samples_of(3))
    whole, second = path.read_bytes(), _second_header(path.read_bytes())
    cases = {
        f"no tar header at byte {second}": whole[: second + 3] + b"\1" + whole[second + 4 :],
        "the member at byte 0 claims .* bytes but 100 are left": whole[: 512 + 100],
        f"10 of 512 bytes of the header at byte {second}": whole[: second + 10],
        "no tar header at byte 0": b"text" * 300,
    }
    for words, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(TarError, match=words):
            open_records(f"tar:{path}")


def _second_header(whole: bytes) -> int:
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        return archive.getmembers()[1].offset


@pytest.mark.parametrize(
    "content", [b"0 path=x\n", b"00 a=\n", b"2 =\n", b"99 path=x\n", b"x", b"-5 a=b\n", b"12 size=9-9\n"]
)
def test_rejects_an_extended_header_with_a_wrong_length(content: bytes, tmp_path: Path) -> None:
    info = tarfile.TarInfo("header")
    info.type, info.size = tarfile.XHDTYPE, len(content)
    header = info.tobuf(tarfile.USTAR_FORMAT) + content.ljust(512, b"\0")
    path = make_tar(tmp_path / "s.tar", samples_of(1))
    path.write_bytes(header + path.read_bytes())
    with pytest.raises(TarError, match=r"at byte 0|before byte 1024"):
        open_records(f"tar:{path}")


def test_rejects_a_pattern_that_matches_nothing(tmp_path: Path) -> None:
    for place in ("none-*.tar", "none.tar", "."):
        with pytest.raises(DataError, match="no tar shards at"):
            open_records(f"tar:{tmp_path}/{place}")
