"""Images with numbers, listed in a CSV file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from stagewright.config.sources import SourceOptions
from stagewright.data.formats.records import DataError
from stagewright.data.loader import make_loaders
from stagewright.data.order import EvaluationSampler, ReplicaSlice
from stagewright.data.pool import Decode, LoaderOptions
from stagewright.data.sources import ImageSource, open_source
from stagewright.metrics import IMAGES


def open_rows(path: Path, text: str, limit: int | None = None) -> ImageSource:
    for number in range(6):
        if not (path.parent / f"{number}.png").exists():
            Image.new("RGB", (20, 20), (number, 0, 0)).save(path.parent / f"{number}.png")
    path.write_text(text)
    options = SourceOptions(16, "padded", normalize="0,0,0/1,1,1", limit=limit)
    source = open_source(f"table:{path}", options)
    assert isinstance(source, ImageSource)
    return source


def test_numbers_belong_to_their_images(tmp_path: Path) -> None:
    one = open_rows(tmp_path / "t.csv", "path,age\n" + "".join(f"{number}.png,{number}.5\n" for number in range(6)))
    fields = one.batch(np.array([4, 1]))
    assert fields["target"].tolist() == [4.5, 1.5] and fields["image"][:, 0, 8, 8].tolist() == [4, 1]
    assert (one.targets, one.classes, one.unit, len(one)) == (("target",), 0, IMAGES, 6)
    two = open_rows(tmp_path / "t.csv", 'x,"path",y\n-1e3,3.png,2\n\n4,5.png,6\n')
    assert two.batch(np.array([1, 0]))["target"].tolist() == [[4, 6], [-1000, 2]]
    assert two.fingerprint != open_rows(tmp_path / "t.csv", "x,path,y\n-1e3,3.png,2\n4,5.png,7\n").fingerprint


@pytest.mark.parametrize("decode", [Decode.CPU, Decode.ONCE])
def test_a_bad_image_takes_its_number_along_with_every_loader(decode: Decode, tmp_path: Path) -> None:
    (tmp_path / "2.png").write_bytes(b"no image")
    rows = "".join(f"{number}.png,{number}\n" for number in (0, 1, 2, 3, 4, 9))
    source = open_rows(tmp_path / "t.csv", f"path,n\n{rows}")
    options = LoaderOptions(torch.bfloat16, max_bad=2, decode=decode)
    (loader,) = make_loaders(options, (source, ReplicaSlice(EvaluationSampler(6, 6), 1, 1)))
    fields = loader.microbatch(0)
    assert fields["target"].tolist() == [0, 1, 3, 3, 4, 0] and fields["target"].dtype == torch.float32
    assert fields["image"][:, 0, 8, 8].tolist() == [0, 1, 3, 3, 4, 0] and fields["image"].dtype == torch.bfloat16
    loader.close()


def test_a_limit_is_spread_over_the_rows(tmp_path: Path) -> None:
    rows = "".join(f"{number}.png,{number}\n" for number in range(6))
    source = open_rows(tmp_path / "t.csv", f"path,n\n{rows}", limit=3)
    assert source.batch(np.arange(3))["target"].tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("", "got nothing"),
        ("path\n0.png\n", "got path"),
        ("file,n\n0.png,1\n", "got file, n"),
        ("path,path\n0.png,1\n", "got path, path"),
        ("path,n\n", "lists no images"),
        ("path,n\n0.png,1\n1.png,one\n", "row 3: n is 'one'"),
        ("path,n\n0.png,nan\n", "row 2: n is 'nan'"),
        ("path,n\n0.png,1e39\n", "row 2: n is '1e39'"),
        ("path,n\n0.png,1_0\n", "row 2: n is '1_0'"),
        ("path,n\n0.png,1,2\n", "row 2: 3 columns"),
        ("path,n\n../0.png,1\n", "row 2: '../0.png'"),
        ("path,n\n/etc/passwd,1\n", "row 2: '/etc/passwd'"),
        ('path,n\n"0.png,1\n', "row 2"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(text: str, piece: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_rows(tmp_path / "t.csv", text)
    assert piece in str(caught.value) and "t.csv" in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_table_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.csv", tmp_path):
        with pytest.raises(DataError, match=f"table {path}: "):
            open_source(f"table:{path}", SourceOptions(image=16))
