"""A folder's classes are its subfolders in sorted order, or those of a file of names."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.data.datasets import open_records
from stagewright.data.records import BadRecord, DataError
from tests.pictures import jpeg


def make_folder(root: Path, files: dict[str, bytes]) -> str:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return f"folder:{root}"


def contents(text: str, class_names: Path | None = None) -> list[tuple[str, int]]:
    records = open_records(text, None if class_names is None else str(class_names))
    return [(Path(record.name).name, record.label) for record in map(records.get, range(len(records)))]


def test_classes_and_files_are_sorted_at_any_depth(tmp_path: Path) -> None:
    images = ("b/2.jpg", "b/10.JPEG", "a/deep/er/x.png", "a/z.jpg", "c/only.webp")
    others = ("a/notes.txt", "top.jpg", ".git/x.jpg")
    text = make_folder(tmp_path, {name: jpeg(1) for name in (*images, *others)})
    (tmp_path / "bb").mkdir()  # a class that has no images keeps its number
    assert contents(text) == [("z.jpg", 0), ("x.png", 0), ("10.JPEG", 1), ("2.jpg", 1), ("only.webp", 3)]
    records = open_records(text)
    assert records.class_names == ("a", "b", "bb", "c") and records.classes == 4
    assert records.get(1).data == jpeg(1) and records.name(1) == f"{tmp_path}/a/deep/er/x.png"


def test_a_file_of_names_numbers_the_classes(tmp_path: Path) -> None:
    text = make_folder(tmp_path / "data", {"cat/1.jpg": b"1", "dog/1.jpg": b"2"})
    given = tmp_path / "names.txt"
    given.write_text("dog\nemu\n\ncat\n")
    assert contents(text, given) == [("1.jpg", 2), ("1.jpg", 0)]
    (tmp_path / "data/classes.txt").write_text("emu\ndog\ncat\n")
    assert contents(text) == [("1.jpg", 2), ("1.jpg", 1)]  # one beside the data counts without being named


@pytest.mark.parametrize(
    ("names", "words"),
    [("dog\n", "folder cat is none of the 1 class names"), ("dog\ncat\ndog\n", "'dog' is there 2 times")],
)
def test_names_that_do_not_fit_are_told(names: str, words: str, tmp_path: Path) -> None:
    text = make_folder(tmp_path / "data", {"cat/1.jpg": b"1", "dog/1.jpg": b"2"})
    (tmp_path / "names.txt").write_text(names)
    with pytest.raises(DataError, match=words):
        open_records(text, str(tmp_path / "names.txt"))
    with pytest.raises(DataError, match="No such file"):
        open_records(text, str(tmp_path / "nowhere.txt"))


def test_folders_without_classes_or_images_say_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="one subfolder of images for each class"):
        open_records(f"folder:{tmp_path}")
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match="1 class folders hold no images"):
        open_records(f"folder:{tmp_path}")


def test_an_unreadable_file_is_a_bad_record(tmp_path: Path) -> None:
    text = make_folder(tmp_path, {"a/1.jpg": b"1", "a/2.jpg": b"2", "a/4.jpg": b"4"})
    (tmp_path / "a/3.jpg").symlink_to(tmp_path / "nowhere")  # unreadable for everyone, root included
    records = open_records(text)
    (tmp_path / "a/1.jpg").unlink()
    for index, name in ((0, "1.jpg"), (2, "3.jpg")):
        with pytest.raises(BadRecord, match=f"a/{name}: No such file"):
            records.get(index)
    assert records.get(3).data == b"4"


def test_a_limit_takes_records_from_all_over(tmp_path: Path) -> None:
    text = make_folder(tmp_path, {f"{label}/{number}.jpg": b"." for label in range(5) for number in range(10)})
    limited = open_records(text, limit=10)
    assert [limited.get(index).label for index in range(10)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert limited.classes == 5 and limited.fingerprint != open_records(text).fingerprint
    for wrong in (0, 51, -1):
        with pytest.raises(DataError, match=f"--limit is {wrong} but the data set has 50 records"):
            open_records(text, limit=wrong)
