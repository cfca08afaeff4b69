"""Data sets made to do harm: what they contain is read, is a bad record, or is refused in one line."""

from __future__ import annotations

import json
import os
import struct
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from stagewright.cli.main import main
from stagewright.config.sources import SourceOptions
from stagewright.data.convert import convert
from stagewright.data.datasets import Kind, open_records
from stagewright.data.decode import Decoder
from stagewright.data.formats.index import load_index, save_index
from stagewright.data.formats.records import BadRecordError, DataError, Records
from stagewright.data.formats.tensors import TensorSource
from stagewright.data.sources import ImageSource, with_transforms
from stagewright.errors import UserError
from tests.commands import prints
from tests.limits import cpu_time, more_memory
from tests.pictures import encoded, frame, jpeg, make_folder, make_ofrecord, make_tar, message, samples_of, write_parts

GIB = 2**30
SECRET = b"-----BEGIN PRIVATE KEY-----"
HANGS = pytest.mark.timeout(120)  # what waits for a pipe waits for ever


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_folder(tmp_path / "data", {f"{label}/{number}.jpg": jpeg(number) for label in "ab" for number in range(3)})
    (tmp_path / "secret.jpg").write_bytes(SECRET)
    return tmp_path / "data"


def forge(root: Path, **changes: object) -> None:
    """Replace arrays of the saved index of a data set, as one that a download brings along may have been made."""
    (path,) = root.glob(".stagewright-*.index")
    index = load_index(path, root)
    assert index is not None
    save_index(path, replace(index, **changes))


def named(*names: str) -> dict[str, object]:
    encoded_names = [os.fsencode(name) for name in names]
    ends = np.cumsum([len(name) for name in encoded_names]).astype(np.int64)
    return {"names": np.frombuffer(b"".join(encoded_names), np.uint8), "name_end": ends}


def contents(records: Records) -> list[tuple[bytes, int]]:
    return [(record.data, record.label) for record in map(records.get, range(len(records)))]


def bad_records(records: Records) -> dict[int, str]:
    found = {}
    for index in range(len(records)):
        try:
            Decoder().decode(records.get(index).data)
        except BadRecordError as error:
            found[index] = str(error)
    return found


@pytest.mark.parametrize("name", ["a/../../secret.jpg", "../secret.jpg", "a/1.jpg\0", ""])
def test_names_in_an_index_do_not_lead_out_of_the_data_set(name: str, folder: Path, tmp_path: Path) -> None:
    honest = contents(open_records(f"folder:{folder}"))
    forge(folder, **named("a/0.jpg", "a/1.jpg", name, "b/0.jpg", "b/1.jpg", "b/2.jpg"))
    records = open_records(f"folder:{folder}")
    assert contents(records) == honest
    convert(records, Kind.OFRECORD, tmp_path / "out", per_part=100)
    assert SECRET not in (tmp_path / "out/part-00000").read_bytes()


def test_a_name_may_contain_two_dots(tmp_path: Path) -> None:
    text = make_folder(tmp_path / "data", {"a/..jpg": jpeg(0), "a/x..jpg": jpeg(1), "b/...png": b"", "b/y.": b""})
    honest, progress = contents(open_records(text)), list[int]()
    assert contents(open_records(text, progress=progress.append)) == honest and not progress


def test_a_flipped_bit_in_an_index_changes_no_label(folder: Path) -> None:
    text = f"folder:{folder}"
    honest, fingerprint = contents(open_records(text)), open_records(text).fingerprint
    (path,) = folder.glob(".stagewright-*.index")
    whole = path.read_bytes()
    header = 8 + int(struct.unpack("<Q", whole[:8])[0])
    for at in (*range(0, header - 8, 20), *range(header, len(whole))):  # 8: it ends with spaces
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        assert load_index(path, folder) is None, at
    records = open_records(text)
    assert contents(records) == honest and records.fingerprint == fingerprint


FORGERIES = {
    "label": {"label": np.array([0, 0, 0, 1, 1, 2**31 - 1], np.int32)},
    "negative label": {"label": np.array([0, 0, 0, 1, 1, -2], np.int32)},
    "length": {"length": np.full(6, 2**62, np.int64)},
    "negative length": {"length": np.full(6, -1, np.int64)},
    "offset": {"offset": np.full(6, 2**63 - 1, np.int64)},
    "negative offset": {"offset": np.full(6, -(2**63), np.int64)},
    "part": {"part": np.full(6, 9, np.int32)},
    "negative part": {"part": np.full(6, -1, np.int32)},
    "matrix": {"label": np.zeros((6, 1), np.int32)},
    "scalar": {"label": np.zeros((), np.int32)},
    "counts": {"part": np.zeros(3, np.int32)},
    "class names": {"class_names": (["x"], 3)},
    "other class names": {"class_names": ("x", "y", "z")},
    "fingerprint": {"fingerprint": "\x1b[2J"},
    "watched": {"watched": ()},
}


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_index_is_built_again(forgery: str, kind: Kind, tmp_path: Path) -> None:
    root = tmp_path / "data"
    make_folder(root, {f"{index // 3}/{index}.jpg": jpeg(index) for index in range(6)})
    if kind is Kind.TAR:
        root = make_tar(tmp_path / "tar/a.tar", samples_of(6)).parent
    elif kind is Kind.OFRECORD:
        root = make_ofrecord(tmp_path / "of", 6)
    honest = contents(open_records(f"{kind}:{root}"))
    forge(root, **FORGERIES[forgery])
    with more_memory(2 * GIB):
        assert contents(open_records(f"{kind}:{root}")) == honest


@HANGS
@pytest.mark.parametrize("place", ["pipe", "device", "folder", "deep", "large"])
def test_an_index_that_is_no_file_of_ours_is_passed_over(place: str, folder: Path) -> None:
    honest = contents(open_records(f"folder:{folder}"))
    (path,) = folder.glob(".stagewright-*.index")
    path.unlink()
    if place == "pipe":
        os.mkfifo(path)
    elif place == "device":
        path.symlink_to("/dev/zero")
    elif place == "folder":
        path.mkdir()
    elif place == "deep":
        header = json.dumps({"__metadata__": {"format": "2", "watched": "[" * 100_000}}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header)
    else:
        names = ("part", "offset", "length", "label", "name_end", "names")
        about = {"format": "2", "watched": "[]", "class_names": "[]", "fingerprint": "", "hash": ""}
        size = 30 * GIB
        arrays = {name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for name in names[:-1]}
        arrays["names"] = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
        header = json.dumps({"__metadata__": about, **arrays}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        os.truncate(path, 8 + len(header) + size)
    with more_memory(GIB):
        assert contents(open_records(f"folder:{folder}")) == honest


@HANGS
def test_what_is_no_image_file_is_a_bad_record_of_a_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(folder / "a/3-pipe.jpg")
    (folder / "a/4-device.jpg").symlink_to("/dev/zero")
    (folder / "a/5-large.jpg").write_bytes(b"\xff\xd8")
    os.truncate(folder / "a/5-large.jpg", 30 * GIB)
    (folder / "a/6-secret.jpg").symlink_to(tmp_path / "secret.jpg")
    (folder / "a/7-kernel.jpg").symlink_to("/proc/self/environ")
    with more_memory(2 * GIB):
        records = open_records(f"folder:{folder}")
        reasons = bad_records(records)
        found = json.loads(
            prints(capsys, "data", "inspect", f"folder:{folder}", "--json", "--sheet", f"{tmp_path}/s.png")
        )
        out = tmp_path / "out"
        converted = json.loads(prints(capsys, "data", "convert", f"folder:{folder}", f"folder:{out}", "--json"))
    assert list(reasons) == [3, 4, 5, 6, 7] == [bad["index"] for bad in found["bad"]]
    assert "pipe" in reasons[3] and "device" in reasons[4] and "268435456" in reasons[5] and "link" in reasons[6]
    assert found["per_class"] == [3, 3] and len(converted["left_out"]) == 5 and converted["records"] == 6
    assert not any(SECRET in path.read_bytes() for path in out.rglob("*.jpg"))


def test_links_to_images_elsewhere_are_followed(tmp_path: Path) -> None:
    make_folder(tmp_path / "pool", {"x/1.jpg": jpeg(1), "2.jpg": jpeg(2)})
    (tmp_path / "data/a").mkdir(parents=True)
    (tmp_path / "data/a/2.jpg").symlink_to(tmp_path / "pool/2.jpg")
    (tmp_path / "data/a/more").symlink_to(tmp_path / "pool/x")
    (tmp_path / "data/b").symlink_to(tmp_path / "pool/x")
    for _ in range(2):  # scanned, then from its index
        assert contents(open_records(f"folder:{tmp_path / 'data'}")) == [(jpeg(2), 0), (jpeg(1), 0), (jpeg(1), 1)]


def test_links_that_multiply_are_refused(tmp_path: Path) -> None:
    """Two links from each of thirty folders to the next: a billion ways, without a loop."""
    make_folder(tmp_path / "data", {f"a/{level:02}/{level}.jpg": b"" for level in range(30)})
    for level in range(29):
        for link in "xy":
            (tmp_path / f"data/a/{level:02}/{link}").symlink_to(tmp_path / f"data/a/{level + 1:02}")
    with cpu_time(60), pytest.raises(DataError, match=r"links lead here 33 times"):
        open_records(f"folder:{tmp_path / 'data'}")


def test_folders_may_be_nested_deeper_than_python_recurses(tmp_path: Path) -> None:
    text = make_folder(tmp_path / "data", {"a/1.jpg": jpeg(1)})
    below = [f"{tmp_path}/data/a{'/d' * depth}" for depth in range(1, 1010)]
    for path in below:
        Path(path).mkdir()
    assert contents(open_records(text)) == [(jpeg(1), 0)]
    for path in reversed(below):  # pytest's own cleaning recurses
        Path(path).rmdir()


@HANGS
@pytest.mark.parametrize("kind", [Kind.OFRECORD, Kind.TAR])
def test_a_record_of_30_gib_is_a_bad_record(kind: Kind, tmp_path: Path) -> None:
    size = 30 * GIB
    if kind is Kind.OFRECORD:
        part = write_parts(tmp_path / "data", [[message(jpeg(0), 1)]]) / "part-00000"
        header, last = struct.pack("<q", size), frame(message(jpeg(2), 3))
    else:
        part = tmp_path / "data/0.tar"
        part.parent.mkdir()
        part.write_bytes(member("0.jpg", jpeg(0)) + member("0.cls", b"1"))
        header = member("1.jpg", b"", size)
        last = member("1.cls", b"2") + member("2.jpg", jpeg(2)) + member("2.cls", b"3") + bytes(1024)
    with part.open("ab") as file:
        file.write(header)
        file.truncate(file.tell() + size)
        file.write(last)
    with more_memory(GIB):
        records = open_records(f"{kind}:{tmp_path / 'data'}")
        reasons = bad_records(records)
    assert list(reasons) == [1] and str(size) in reasons[1] and "268435456" in reasons[1]
    assert [records.get(index).label for index in (0, 2)] == [1, 3]


def member(name: str, data: bytes, size: int | None = None) -> bytes:
    """One member of a tar file, whose header may claim another size."""
    info = tarfile.TarInfo(name)
    info.size = len(data) if size is None else size
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


@HANGS
def test_a_part_that_is_a_pipe_is_refused_in_one_line(tmp_path: Path) -> None:
    make_ofrecord(tmp_path / "of", 6)
    (tmp_path / "of/part-00001").unlink()
    os.mkfifo(tmp_path / "of/part-00001")
    with pytest.raises(DataError, match=r"pipe.*part-00001"):
        open_records(f"ofrecord:{tmp_path / 'of'}")
    (tmp_path / "tar").mkdir()
    os.mkfifo(tmp_path / "tar/a.tar")
    with pytest.raises(DataError, match="no tar shards"):
        open_records(f"tar:{tmp_path / 'tar'}")


@HANGS
def test_a_part_replaced_by_a_pipe_after_indexing_gives_bad_records(tmp_path: Path) -> None:
    records = open_records(f"ofrecord:{make_ofrecord(tmp_path / 'of', 6)}")
    open_again = type(records)(records.index)  # type: ignore[attr-defined, call-arg]
    (tmp_path / "of/part-00001").unlink()
    os.mkfifo(tmp_path / "of/part-00001")
    assert [("pipe" in reason) for reason in bad_records(open_again).values()] == [True, True]


@pytest.mark.parametrize("kind", [Kind.OFRECORD, Kind.TAR])
def test_an_absurd_class_number_is_a_bad_record(kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if kind is Kind.OFRECORD:
        write_parts(
            tmp_path / "data", [[message(jpeg(0), 1), message(jpeg(1), 2**31 - 1), message(jpeg(2), 2**63 - 1)]]
        )
    else:
        classes = [("0.cls", b"1"), ("1.cls", b"2147483647"), ("2.cls", b"9" * 5000)]
        make_tar(tmp_path / "data/a.tar", classes + [(f"{index}.jpg", jpeg(index)) for index in range(3)])
    text = f"{kind}:{tmp_path / 'data'}"
    with more_memory(2 * GIB):
        shown = prints(capsys, "data", "inspect", text, "--sheet", f"{tmp_path}/s.png")
        found = json.loads(prints(capsys, "data", "inspect", text, "--json", "--sheet", f"{tmp_path}/s.png"))
        main(["data", "convert", text, f"folder:{tmp_path / 'out'}"])
    assert "bad records: 2" in shown and found["per_class"] == [0, 1]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0", "1"]


def test_more_classes_than_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    records = open_records(f"ofrecord:{write_parts(tmp_path / 'of', [[message(jpeg(0), 2**24 - 1)]])}")
    with more_memory(2 * GIB), pytest.raises(DataError, match=r"16777216 classes.*1048576"):
        convert(records, Kind.FOLDER, tmp_path / "out", per_part=10)


def test_a_sparse_member_is_refused_in_one_line(tmp_path: Path) -> None:
    """Its bytes are a map of the holes, then what is between them: not the image."""
    for number, options in enumerate(({"type": tarfile.GNUTYPE_SPARSE}, {"pax_headers": {"GNU.sparse.major": "1"}})):
        info = tarfile.TarInfo("0.jpg")
        for name, value in options.items():
            setattr(info, name, value)
        (tmp_path / f"{number}.tar").write_bytes(info.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
        with pytest.raises(DataError, match=rf"{number}.tar: the member at byte \d+ is stored with holes"):
            open_records(f"tar:{tmp_path / f'{number}.tar'}")


def test_an_extended_header_of_many_records_takes_linear_time(tmp_path: Path) -> None:
    content = b"5 a=\n" * (2**20 // 5)
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(content)
    header = info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)
    (tmp_path / "a.tar").write_bytes(header * 4 + member("0.jpg", jpeg(0)) + member("0.cls", b"1") + bytes(1024))
    with cpu_time(30):
        assert contents(open_records(f"tar:{tmp_path}")) == [(jpeg(0), 1)]


@pytest.mark.parametrize("pattern", ["a**", "[", "a/**b/*.tar", "a\0b/*.tar", "/*/\0"])
def test_a_pattern_that_can_not_be_one_is_refused_in_one_line(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        open_records(f"tar:{tmp_path}/{pattern}")


def test_a_message_of_a_million_fields_is_refused(tmp_path: Path) -> None:
    write_parts(tmp_path / "of", [[message(jpeg(0), 1), b"\x10\x00" * 10**6]])
    with pytest.raises(DataError, match=r"part-00000: record 1 .*65536 fields"):
        open_records(f"ofrecord:{tmp_path / 'of'}")


@HANGS
@pytest.mark.parametrize("place", ["pipe", "device", "large", "binary", "missing", "doubled"])
def test_class_names_that_are_no_text_file_are_refused_in_one_line(place: str, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "names"
    if place == "pipe":
        os.mkfifo(path)
    elif place == "device":
        path.symlink_to("/dev/zero")
    elif place == "large":
        path.touch()
        os.truncate(path, 30 * GIB)
    elif place == "binary":
        path.write_bytes(b"\xff\xfe\0\0")
    elif place == "doubled":  # in linear time
        path.write_text("".join(f"{number}\n" for number in range(200_000)) + "199999\n")
    with more_memory(2 * GIB), cpu_time(60), pytest.raises(DataError, match=f"class names {path}"):
        open_records(f"folder:{folder}", str(path))


def test_names_that_are_not_text_are_shown_as_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = os.fsdecode(b"a\xff\x1b[2J\n")
    root = tmp_path / "data"
    text = make_folder(root, {f"{odd}/{odd}.jpg": b"bad", f"{odd}/1.jpg": jpeg(1), "b/2.jpg": jpeg(2)})
    for command in (["index", text], ["inspect", text, "--sheet", str(tmp_path / "s.png")]):
        for _ in range(2):  # scanned, then from its index
            shown = prints(capsys, "data", *command)
            assert all(line.isprintable() for line in shown.splitlines()) and shown.isascii()
    assert (
        json.loads(prints(capsys, "data", "inspect", text, "--json", "--sheet", str(tmp_path / "s.png")))["classes"]
        == 2
    )
    with pytest.raises(SystemExit) as ended:
        main(["data", "convert", text, f"tar:{tmp_path / 'out'}"])
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and shown.count("\n") == 1 and "classes.txt" in shown and shown[:-1].isprintable()


@pytest.mark.parametrize("name", [" a", "a\n", "a\u2028b", "a\0b"])
def test_convert_writes_no_class_name_that_reads_back_differently(name: str, tmp_path: Path) -> None:
    root = write_parts(tmp_path / "of", [[message(jpeg(0), 0)]])
    records = open_records(f"ofrecord:{root}")
    records.class_names = (name,)
    with pytest.raises(DataError, match="class name"):
        convert(records, Kind.FOLDER, tmp_path / "out", per_part=10)


def image_source(data: bytes, root: Path) -> ImageSource:
    records = open_records(
        make_folder(root, {"a/0.png": data, "a/1.png": encoded(Image.new("RGB", (300, 300)), "PNG")})
    )
    return with_transforms(records, SourceOptions(224))


@pytest.mark.parametrize("size", [(65535, 1), (1, 5_000_000)])
def test_an_image_too_narrow_to_resize_is_a_bad_record(size: tuple[int, int], tmp_path: Path) -> None:
    source = image_source(encoded(Image.new("1", size), "PNG"), tmp_path / "data")
    with more_memory(2 * GIB):
        images = source.batch(np.array([0, 1]))["image"]
        _, _, bad = source.first_good(0, Decoder())
    assert torch.equal(images[0], images[1]) and [one.index for one in bad] == [0] and "100000000" in bad[0].reason


def test_a_jpeg_of_thousands_of_scans_is_a_bad_record() -> None:
    whole = encoded(Image.new("RGB", (4000, 4000)), "JPEG", progressive=True)
    first, end = whole.rfind(b"\xff\xda"), whole.rfind(b"\xff\xd9")
    assert Decoder().decode(whole).shape == (4000, 4000, 3)
    with cpu_time(60), pytest.raises(BadRecordError, match="20010 scans"):
        Decoder().decode(whole[:end] + whole[first : first + 12] * 20_000 + whole[end:])


def test_a_batch_above_the_memory_names_the_option(tmp_path: Path) -> None:
    source = image_source(b"", tmp_path / "data")
    with pytest.raises(DataError, match=r"1000000000 images of side 224 need .* GiB"):
        source.allocate(10**9)


@HANGS
def test_tensors_of_any_type_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    for kind in (torch.uint16, torch.uint32, torch.uint64):
        save_file({"images": torch.zeros(3, 2), "labels": torch.tensor([0, 1, 2]).to(kind)}, path)
        assert TensorSource(str(path)).classes == 3
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="tensors file"):
        TensorSource(str(path))
