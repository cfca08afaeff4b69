"""`bench data`: all sides decode the same image, and the outcome has every measurement."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from benchmarks.micro.data import compare_loaders, measure, stock_paths, torchvision_transform
from stagewright.bench.data import HEIGHT, SIDE, WIDTH, Images, make_jpegs, our_path
from stagewright.data.augment import Augmentation, Cropping
from tests.marks import nightly


def as_array(picture: object) -> np.ndarray:
    """Whatever a side returns, as [rows, columns, RGB]."""
    found = np.asarray(picture[0].as_array() if isinstance(picture, tuple) else picture).squeeze()
    return (found.transpose(1, 2, 0) if found.shape[0] == 3 else found).astype(int)


def test_every_side_makes_the_same_image() -> None:
    jpegs = make_jpegs()[:3]
    assert all(90_000 < len(data) < 130_000 for data in jpegs)
    augmentation, ours = Augmentation(SIDE, Cropping.RESIZED), our_path(SIDE)
    paths = stock_paths(SIDE)
    assert {"Pillow", "simplejpeg + torch"} <= set(paths)
    views = [augmentation.training_view(0, 0, index, HEIGHT, WIDTH) for index in range(8)]
    assert {view.is_mirrored for view in views} == {True, False}
    for index, view in enumerate(views):
        expected = as_array(ours(jpegs[index % 3], view))
        for name, path in paths.items():
            difference = np.abs(as_array(path(jpegs[index % 3], view)) - expected)
            assert difference.mean() < (1 if "DALI" not in name else 6), name


@nightly
def test_the_outcome_has_speeds_ratios_overhead_and_index() -> None:
    outcome = measure(repeats=2, images=16, most_threads=1, indexed=1000)
    assert [row.name for row in outcome.rows][:3] == ["stagewright", "Pillow", "simplejpeg + torch"]
    assert all(row.rate is not None and row.rate.value > 0 for row in outcome.rows)
    assert [(ratio.ours, ratio.theirs) for ratio in outcome.ratios][:1] == [("stagewright", "Pillow")]
    assert {"1 thread", "1 process"} <= {row.label for row in outcome.rows} and len(outcome.figures) == 3
    assert outcome.figures["seconds to load an index of 1000 records"] > 0


def test_loaders_are_compared_by_threads_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.io", None)
    images = Images(make_jpegs(48, 64)[:2], Augmentation(32, Cropping.RESIZED), 48, 64)
    rows, ratios = compare_loaders(images, 2, turns=1, seconds=0.0)
    assert [row.label for row in rows] == ["1 thread", "2 threads", "1 process", "2 processes"] * 3 and not ratios
    assert len({row.group for row in rows}) == 3 and all(row.rate is not None and row.rate.value > 0 for row in rows)


@nightly
def test_torchvisions_loader_takes_turns_with_ours() -> None:
    images = Images(make_jpegs(48, 64)[:2], Augmentation(32, Cropping.RESIZED), 48, 64)
    found = torchvision_transform(images)
    if found is None:
        pytest.skip("torchvision can't be imported")
    name, transform = found
    assert transform(images.encoded[0]).shape == (3, 32, 32) and transform(images.encoded[0]).dtype == torch.uint8
    rows, ratios = compare_loaders(images, 1, turns=2, seconds=0.01)
    assert [len(row.repeats) for row in rows] == [1, 2, 2] * 3
    assert ratios[0].theirs == f"{name}, 1 process" and ratios[2].theirs == "torchvision with Pillow, 1 process"
