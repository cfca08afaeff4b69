"""`inspect` counts what is there, names what is bad and draws what training sees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from stagewright.data.augment import Augmentation, Cropping
from stagewright.data.datasets import open_records
from stagewright.data.decode import NORMALIZATIONS, Decoder
from stagewright.data.order import AugmentSeed
from stagewright.data.sources import ImageSource
from stagewright.data.survey import draw_sheet, survey
from tests.pictures import bytes_feature, jpeg, message, write_parts


def make_data(root: Path) -> str:
    good = [message(jpeg(i, 40 + i, 60 - i), i % 3) for i in range(9)]
    cut = message(jpeg(1)[:200], 2)
    return f"ofrecord:{write_parts(root, [[*good[:5], cut], [bytes_feature('encoded', jpeg(1)), *good[5:]]])}"


def test_a_survey_counts_classes_sizes_and_bad_records(tmp_path: Path) -> None:
    records = open_records(make_data(tmp_path))
    found = survey(records, 0)
    sizes = [len(jpeg(i, 40 + i, 60 - i)) for i in range(9)]
    assert (found.records, found.looked_at, found.classes) == (11, 11, 3)
    assert found.per_class == (3, 3, 3)
    assert (found.heights.low, found.heights.median, found.heights.high) == (40, 44, 48)
    assert (found.widths.low, found.widths.high) == (52, 60)
    assert (found.encoded.low, found.encoded.high) == (min(sizes), max(sizes))
    assert [bad.index for bad in found.bad] == [5, 6]
    assert "part-00000: record 5: not a complete JPEG" in found.bad[0].reason
    assert "part-00001: record 0 has no class" in found.bad[1].reason


def test_a_partial_survey_is_evenly_spread(tmp_path: Path) -> None:
    parts = [[message(jpeg(1), index // 10) for index in range(100)]]
    records = open_records(f"ofrecord:{write_parts(tmp_path, parts)}")
    found = survey(records, 20)
    assert found.looked_at == 20 and found.per_class == (2,) * 10


def test_the_sheet_shows_augmented_samples(tmp_path: Path) -> None:
    records = open_records(make_data(tmp_path / "data"))
    source = ImageSource(records, Augmentation(96, Cropping.RESIZED), NORMALIZATIONS["imagenet"])
    assert draw_sheet(source, 3, tmp_path / "out/sheet.png") == 11
    sheet = np.asarray(Image.open(tmp_path / "out/sheet.png"))
    assert sheet.shape == (2 * (96 + 14), 8 * 96, 3)
    target, label = source.allocate(1)
    source.load(9, AugmentSeed(3, 0), target[0], label[0], Decoder())
    assert np.array_equal(sheet[110 : 110 + 96, 96:192], target[0].numpy())  # sample 9: second row, second column
    assert (sheet[96:110, :96] < 128).any() and (sheet[110:, 3 * 96 :] == 255).all()  # a caption; then nothing
