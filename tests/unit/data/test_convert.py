"""Whatever format a data set takes, its records stay the same."""

from __future__ import annotations

import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stagewright.data.convert import Shrink, convert
from stagewright.data.datasets import Kind, open_records
from stagewright.data.decode import Decoder
from stagewright.data.formats.records import DataError, Records
from tests.marks import nightly
from tests.pictures import (
    bytes_feature,
    encoded,
    frame,
    jpeg,
    make_folder,
    make_ofrecord,
    message,
    pixels,
    write_parts,
)
from tests.shared import shared_file


def contents(records: Records) -> list[tuple[bytes, int]]:
    return [(record.data, record.label) for record in map(records.get, range(len(records)))]


def test_converting_through_every_format_and_back_changes_nothing(tmp_path: Path) -> None:
    """Labels with gaps, up to two digits, so that folders must be made for classes without records."""
    labels = [0, 11, 3, 3, 10, 0, 9]
    messages = [message(jpeg(index), label) for index, label in enumerate(labels)]
    first = open_records(f"ofrecord:{write_parts(tmp_path / 'first', [messages[:3], messages[3:]])}")
    convert(first, Kind.TAR, tmp_path / "tar", per_part=3)
    shards = open_records(f"tar:{tmp_path / 'tar'}")
    assert contents(shards) == contents(first) and shards.classes == 12
    assert sorted(path.name for path in (tmp_path / "tar").glob("*.tar")) == [f"shard-0000{i}.tar" for i in range(3)]
    convert(shards, Kind.FOLDER, tmp_path / "folder", per_part=3)
    folder = open_records(f"folder:{tmp_path / 'folder'}")
    assert Counter(contents(folder)) == Counter(contents(first)) and folder.classes == 12
    convert(folder, Kind.OFRECORD, tmp_path / "last", per_part=2)
    last = open_records(f"ofrecord:{tmp_path / 'last'}")
    assert contents(last) == contents(folder) and len(list((tmp_path / "last").glob("part-*"))) == 4
    convert(last, Kind.FOLDER, tmp_path / "again", per_part=2)
    assert contents(open_records(f"folder:{tmp_path / 'again'}")) == contents(folder)


@pytest.mark.parametrize(("is_raw", "threads"), [(False, 1), (True, 3)])
def test_images_become_cheaper_to_decode_and_stay_what_they_are(is_raw: bool, threads: int, tmp_path: Path) -> None:
    """Three are larger than asked for, one in each direction; the last is not and keeps its pixels."""
    sizes = [(60, 40), (40, 60), (44, 44), (32, 20)]
    messages = [message(jpeg(index, *size), index) for index, size in enumerate(sizes)]
    source = open_records(f"ofrecord:{write_parts(tmp_path / 'source', [[*messages, message(b'none', 4)]])}")
    done = convert(source, Kind.TAR, tmp_path / "tar", 100, shrink=Shrink(32, is_raw, threads))
    made = open_records(f"tar:{tmp_path / 'tar'}")
    images = [Decoder().decode(data) for data, _ in contents(made)]
    assert [image.shape[:2] for image in images] == [(48, 32), (32, 48), (32, 32), (32, 20)]
    assert [label for _, label in contents(made)] == [0, 1, 2, 3] and len(done.left_out) == 1
    for image, (data, _) in zip(images, contents(source)[:4], strict=True):
        wanted = np.asarray(
            Image.fromarray(Decoder().decode(data)).resize(image.shape[1::-1], Image.Resampling.BILINEAR)
        )
        assert np.abs(image.astype(int) - wanted).mean() < (1 if is_raw else 8)
    assert np.array_equal(images[3], Decoder().decode(contents(source)[3][0]))
    assert done.bytes_written == sum(len(data) for data, _ in contents(made))
    with tarfile.open(tmp_path / "tar/shard-00000.tar") as archive:
        assert archive.getnames()[0] == ("00000000.ppm" if is_raw else "00000000.jpg")


def test_tarfile_reads_the_shards_and_parts_have_the_expected_bytes(tmp_path: Path) -> None:
    source = open_records(f"ofrecord:{make_ofrecord(tmp_path / 'source', 5)}")
    convert(source, Kind.TAR, tmp_path / "tar", per_part=100)
    with tarfile.open(tmp_path / "tar/shard-00000.tar") as archive:
        files = {info.name: archive.extractfile(info) for info in archive.getmembers()}
        found = {name: file.read() for name, file in files.items() if file is not None}
    images, classes = ({f"{i:08}.{kind}": i for i in range(5)} for kind in ("jpg", "cls"))
    assert found == {name: jpeg(i, 40, 48) for name, i in images.items()} | {
        name: b"%d" % (i % 4) for name, i in classes.items()
    }
    convert(source, Kind.OFRECORD, tmp_path / "parts", per_part=100)
    expected = b"".join(frame(message(jpeg(i, 40, 48), i % 4)) for i in range(5))
    assert (tmp_path / "parts/part-00000").read_bytes() == expected


def test_class_names_are_kept_with_labels_that_are_not_sorted(tmp_path: Path) -> None:
    text = make_folder(tmp_path / "source", {"cat/1.jpg": jpeg(1), "dog/1.jpg": jpeg(2)})
    (tmp_path / "source/classes.txt").write_text("dog\ncat\n")
    source = open_records(text)
    assert [label for _, label in contents(source)] == [1, 0]
    for kind in Kind:
        convert(source, kind, tmp_path / kind, per_part=10)
        found = open_records(f"{kind}:{tmp_path / kind}")
        assert found.class_names == ("dog", "cat")
        assert Counter(contents(found)) == Counter(contents(source))


def test_file_suffixes_match_the_image_format(tmp_path: Path) -> None:
    png = encoded(Image.fromarray(pixels(1)), "PNG")
    source = open_records(make_folder(tmp_path / "source", {"a/1.jpg": png, "a/2.jpeg": jpeg(1)}))
    convert(source, Kind.FOLDER, tmp_path / "folder", per_part=10)
    assert sorted(path.name for path in (tmp_path / "folder/a").iterdir()) == ["00000000.png", "00000001.jpg"]


def test_unreadable_records_are_left_out_and_named(tmp_path: Path) -> None:
    parts = [[message(b"one", 1), bytes_feature("encoded", b"no label"), message(b"two", 2)]]
    source = open_records(f"ofrecord:{write_parts(tmp_path / 'source', parts)}")
    done = convert(source, Kind.TAR, tmp_path / "tar", per_part=10)
    assert (done.records, len(done.left_out)) == (2, 1) and "record 1 has no class" in done.left_out[0]
    assert contents(open_records(f"tar:{tmp_path / 'tar'}")) == [(b"one", 1), (b"two", 2)]


def test_refuses_a_target_that_is_not_empty_or_not_writable(tmp_path: Path) -> None:
    source = open_records(f"ofrecord:{make_ofrecord(tmp_path / 'source', 2)}")
    with pytest.raises(DataError, match=r"source is not empty, .* part-00000"):
        convert(source, Kind.TAR, tmp_path / "source", per_part=10)
    with pytest.raises(DataError, match="can't write to /proc/nothing"):
        convert(source, Kind.TAR, Path("/proc/nothing"), per_part=10)


@nightly
def test_converting_cifar10_and_back_changes_nothing(tmp_path: Path) -> None:
    first = open_records(f"ofrecord:{shared_file('data/cifar10')}/test")
    convert(first, Kind.TAR, tmp_path / "tar", per_part=4000)
    convert(open_records(f"tar:{tmp_path}/tar/*.tar"), Kind.FOLDER, tmp_path / "folder", per_part=1)
    convert(open_records(f"folder:{tmp_path}/folder"), Kind.OFRECORD, tmp_path / "last", per_part=5000)
    last = open_records(f"ofrecord:{tmp_path}/last")
    assert len(last) == 10_000 and Counter(contents(last)) == Counter(contents(first))
