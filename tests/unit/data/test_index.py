"""An index is built once, saved beside the data or in a cache folder, and built again when the data changes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from stagewright.data.datasets import open_records
from stagewright.data.formats import ofrecord
from stagewright.data.formats.index import Index, IndexBuilder, load_index, save_index
from tests.pictures import frame, jpeg, make_folder, make_ofrecord, make_tar, message, samples_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def data_sets(root: Path) -> dict[str, str]:
    make_ofrecord(root / "of", 6)
    make_tar(root / "tar/a.tar", samples_of(6))
    folder = make_folder(root / "folder", {f"{index % 3}/{index}.jpg": jpeg(index) for index in range(6)})
    return {"ofrecord": f"ofrecord:{root / 'of'}", "tar": f"tar:{root / 'tar'}", "folder": folder}


def is_scanned(text: str) -> bool:
    """Whether opening a data set scans its files, rather than loading an index."""
    progress: list[int] = []
    open_records(text, progress=progress.append)
    return bool(progress)


@pytest.mark.parametrize("kind", ["ofrecord", "tar", "folder"])
def test_a_data_set_is_scanned_once_and_then_read_from_its_index(kind: str, tmp_path: Path, cache: Path) -> None:
    text = data_sets(tmp_path)[kind]
    assert is_scanned(text) and not is_scanned(text) and not is_scanned(text)
    assert not cache.exists() and len(list(tmp_path.glob("*/.stagewright-*.index"))) == 1
    fresh, again = open_records(text), open_records(text)
    assert [fresh.get(index) for index in range(6)] == [again.get(index) for index in range(6)]
    assert fresh.fingerprint == again.fingerprint and fresh.class_names == again.class_names


def test_the_index_of_a_read_only_folder_is_in_the_cache(tmp_path: Path, cache: Path) -> None:
    text = data_sets(tmp_path)["ofrecord"]
    (tmp_path / "of").chmod(0o555)
    assert is_scanned(text) and not is_scanned(text)
    assert len(list(cache.glob("*.index"))) == 1 and not list((tmp_path / "of").glob(".*"))
    (tmp_path / "of").chmod(0o755)


def test_opens_without_an_index_file_if_no_folder_is_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = data_sets(tmp_path)["ofrecord"]
    (tmp_path / "of").chmod(0o555)
    monkeypatch.setenv("STAGEWRIGHT_CACHE", "/proc/nothing")
    assert is_scanned(text) and is_scanned(text) and open_records(text).get(5).label == 1
    (tmp_path / "of").chmod(0o755)


def change_size(root: Path) -> None:
    with (root / "of/part-00000").open("ab") as file:
        file.write(frame(message(jpeg(9), 0)))


def change_time(root: Path) -> None:
    os.utime(root / "of/part-00001", ns=(1, 1))


def add_part(root: Path) -> None:
    (root / "of/part-00003").write_bytes(frame(message(jpeg(9), 0)))


def remove_part(root: Path) -> None:
    (root / "of/part-00002").unlink()


@pytest.mark.parametrize("change", [change_size, change_time, add_part, remove_part])
def test_scans_again_after_a_part_changes(change: object, tmp_path: Path) -> None:
    text = data_sets(tmp_path)["ofrecord"]
    before = open_records(text).fingerprint
    assert callable(change)
    change(tmp_path)
    assert is_scanned(text) and not is_scanned(text)
    # a new modification time alone does not change the data: a run can resume with a copy of it
    assert (open_records(text).fingerprint == before) == (change is change_time)


def test_scans_again_after_a_folder_or_shard_changes(tmp_path: Path) -> None:
    texts = data_sets(tmp_path)
    assert all(is_scanned(text) for text in texts.values())
    make_folder(tmp_path / "folder", {"2/new.jpg": b"new"})
    assert is_scanned(texts["folder"]) and not is_scanned(texts["folder"])
    make_folder(tmp_path / "folder", {"a-class/new.jpg": b"new"})
    assert is_scanned(texts["folder"]) and open_records(texts["folder"]).classes == 4
    make_tar(tmp_path / "tar/b.tar", [("z.jpg", b"new"), ("z.cls", b"0")])
    assert is_scanned(texts["tar"]) and len(open_records(texts["tar"])) == 7


def test_the_fingerprint_depends_on_the_bytes(tmp_path: Path) -> None:
    text = data_sets(tmp_path)["ofrecord"]
    before = open_records(text).fingerprint
    part = tmp_path / "of/part-00000"
    data = bytearray(part.read_bytes())
    data[-100] ^= 1
    part.write_bytes(data)
    assert open_records(text).fingerprint != before


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "arrays"])
def test_a_damaged_index_is_built_again(damage: str, tmp_path: Path) -> None:
    text = data_sets(tmp_path)["folder"]
    expected = open_records(text)
    (path,) = (tmp_path / "folder").glob(".stagewright-*.index")
    if damage == "arrays":
        index = load_index(path, tmp_path / "folder")
        assert index is not None
        save_index(path, _replaced(index, name_end=index.name_end + 5))
    else:
        whole = path.read_bytes()
        path.write_bytes({"cut": whole[:-9], "noise": os.urandom(500), "empty": b""}[damage])
    assert is_scanned(text) and not is_scanned(text)
    assert open_records(text).get(3) == expected.get(3)


def _replaced(index: Index, **changes: object) -> Index:
    from dataclasses import replace

    return replace(index, **changes)


def test_an_index_has_no_python_object_per_record(tmp_path: Path) -> None:
    builder = IndexBuilder(tmp_path)
    for number in range(10_000):
        builder.add(0, number, 5, number % 7, f"{number}.jpg")
    index = builder.build()
    save_index(tmp_path / "index", index)
    found = load_index(tmp_path / "index", tmp_path)
    assert found is not None and found.name(9_999) == "9999.jpg" and found.name(0) == "0.jpg"
    arrays = [getattr(found, name) for name in ("part", "offset", "length", "label", "names", "name_end")]
    assert all(isinstance(array, np.ndarray) and array.dtype != object for array in arrays)
    assert sum(array.nbytes for array in arrays) < 10_000 * 48
    assert sys.getsizeof(found.watched) < 100 and found.class_names == ()


def test_scanning_parts_does_not_load_them_into_memory(tmp_path: Path) -> None:
    """A length that claims the whole disk is refused before anything of that size is read."""
    (tmp_path / "part-0").write_bytes(b"\xff" * 7 + b"\x7f" + b"x" * 100)
    with pytest.raises(ofrecord.OFRecordError, match="9223372036854775807 bytes but 100 are left"):
        open_records(f"ofrecord:{tmp_path}")
