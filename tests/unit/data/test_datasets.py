"""The classes of a folder are its subfolders in sorted order, or those of a file of names; bad files are replaced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from stagewright.data.augment import Augmentation, Cropping
from stagewright.data.datasets import open_records
from stagewright.data.decode import Normalization
from stagewright.data.formats.records import BadRecord, BadRecordError, DataError
from stagewright.data.loader import make_loaders
from stagewright.data.order import EvaluationSampler, ReplicaSlice
from stagewright.data.pool import LoaderOptions
from stagewright.data.sources import ImageSource
from tests.pictures import encoded, jpeg, make_folder, pillow, pixels


def contents(text: str, class_names: Path | None = None) -> list[tuple[str, int]]:
    records = open_records(text, None if class_names is None else str(class_names))
    return [(Path(record.name).name, record.label) for record in map(records.get, range(len(records)))]


def test_classes_and_files_are_sorted_at_any_depth(tmp_path: Path) -> None:
    images = ("b/2.jpg", "b/10.JPEG", "a/deep/er/x.png", "a/z.jpg", "c/only.webp")
    others = ("a/notes.txt", "top.jpg", ".git/x.jpg")
    text = make_folder(tmp_path, {name: jpeg(1) for name in (*images, *others)})
    (tmp_path / "bb").mkdir()  # a class without images keeps its number
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
    assert contents(text) == [("1.jpg", 2), ("1.jpg", 1)]  # a file beside the data is used without an option


@pytest.mark.parametrize(
    ("names", "words"),
    [("dog\n", "folder cat .* 1 class name"), ("dog\ncat\ndog\n", "'dog' .* 2 times")],
)
def test_class_names_must_match_the_folders(names: str, words: str, tmp_path: Path) -> None:
    text = make_folder(tmp_path / "data", {"cat/1.jpg": b"1", "dog/1.jpg": b"2"})
    (tmp_path / "names.txt").write_text(names)
    with pytest.raises(DataError, match=words):
        open_records(text, str(tmp_path / "names.txt"))
    with pytest.raises(DataError, match="No such file"):
        open_records(text, str(tmp_path / "nowhere.txt"))


def test_a_folder_needs_classes_and_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"one subfolder .* per class"):
        open_records(f"folder:{tmp_path}")
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match="no images in 1 class folder"):
        open_records(f"folder:{tmp_path}")


def test_an_unreadable_file_is_a_bad_record(tmp_path: Path) -> None:
    text = make_folder(tmp_path, {"a/1.jpg": b"1", "a/2.jpg": b"2", "a/4.jpg": b"4"})
    (tmp_path / "a/3.jpg").symlink_to(tmp_path / "nowhere")  # unreadable for everyone, even root
    records = open_records(text)
    (tmp_path / "a/1.jpg").unlink()
    for index, name in ((0, "1.jpg"), (2, "3.jpg")):
        with pytest.raises(BadRecordError, match=f"a/{name}: No such file"):
            records.get(index)
    assert records.get(3).data == b"4"


def test_a_limit_takes_records_evenly_spread_over_the_data(tmp_path: Path) -> None:
    text = make_folder(tmp_path, {f"{label}/{number}.jpg": b"." for label in range(5) for number in range(10)})
    limited = open_records(text, limit=10)
    assert [limited.get(index).label for index in range(10)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert limited.classes == 5 and limited.fingerprint != open_records(text).fingerprint
    for wrong in (0, 51, -1):
        with pytest.raises(DataError, match=f"--limit is {wrong} but the data set has 50 records"):
            open_records(text, limit=wrong)


SIDE = 32


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return jpeg(4, SIDE, SIDE, exif=exif.tobytes())


FILES = {
    "0/a-good.jpg": jpeg(0, SIDE, SIDE),
    "0/b-truncated.jpg": jpeg(1, SIDE, SIDE)[:-60],
    "0/c-png-inside.jpg": encoded(Image.fromarray(pixels(2, SIDE, SIDE)), "PNG"),
    "1/d-cmyk.jpg": jpeg(3, SIDE, SIDE, mode="CMYK"),
    "1/e-rotated.jpg": rotated(),
    "1/f-zero-bytes.jpg": b"",
    "2/g-grey.jpg": jpeg(5, SIDE, SIDE, mode="L"),
    "2/h-text.jpg": b"this is no image",
}


def test_replaces_and_names_every_unreadable_file_of_a_folder(tmp_path: Path) -> None:
    text = make_folder(tmp_path, FILES)
    (tmp_path / "2/i-unreadable.jpg").symlink_to(tmp_path / "nowhere")
    plain = Normalization((0.0,) * 3, (1.0,) * 3)
    source = ImageSource(open_records(text), Augmentation(SIDE, Cropping.PADDED), plain)
    bad_records: list[BadRecord] = []
    part = ReplicaSlice(EvaluationSampler(9, 9), 1, 1)
    (loader,) = make_loaders(LoaderOptions(threads=2, max_bad=4, on_bad=bad_records.append), (source, part))
    images, labels = loader.microbatch(0).values()
    loader.close()
    names = sorted(FILES)
    shown = [0, 2, 2, 3, 4, 6, 6, 0, 0]  # the file that each of the nine samples shows
    assert labels.tolist() == [int(names[index][0]) for index in shown]
    for image, index in zip(images, shown, strict=True):
        expected = pillow(FILES[names[index]])
        assert np.abs(image.permute(1, 2, 0).numpy() - expected).max() <= 1
    assert [bad.index for bad in bad_records] == [1, 5, 7, 8]
    for bad, words in zip(bad_records, ("JPEG", "is empty", "not a readable image", "No such file"), strict=True):
        assert words in bad.reason and str(tmp_path) in bad.reason
    assert images.dtype == torch.float32
