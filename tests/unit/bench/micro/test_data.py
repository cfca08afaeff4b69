"""`bench data`: all sides decode the same image, and the outcome has every measurement."""

from __future__ import annotations

import numpy as np

from stagewright.bench.micro.data import HEIGHT, SIDE, WIDTH, make_jpegs, measure, stagewright_path, stock_paths
from stagewright.data.augment import Augmentation, Cropping


def as_array(picture: object) -> np.ndarray:
    """Whatever a side returns, as [rows, columns, RGB]."""
    found = np.asarray(picture[0].as_array() if isinstance(picture, tuple) else picture).squeeze()
    return (found.transpose(1, 2, 0) if found.shape[0] == 3 else found).astype(int)


def test_every_side_makes_the_same_image() -> None:
    jpegs = make_jpegs()[:3]
    assert all(90_000 < len(data) < 130_000 for data in jpegs)
    augmentation, ours = Augmentation(SIDE, Cropping.RESIZED), stagewright_path(SIDE)
    paths = stock_paths(SIDE)
    assert {"Pillow", "simplejpeg + torch"} <= set(paths)
    views = [augmentation.training_view(0, 0, index, HEIGHT, WIDTH) for index in range(8)]
    assert {view.is_mirrored for view in views} == {True, False}
    for index, view in enumerate(views):
        expected = as_array(ours(jpegs[index % 3], view))
        for name, path in paths.items():
            difference = np.abs(as_array(path(jpegs[index % 3], view)) - expected)
            assert difference.mean() < (1 if "DALI" not in name else 6), name


def test_the_outcome_has_speeds_ratios_overhead_and_index() -> None:
    outcome = measure(repeats=2, images=16, most_threads=1, indexed=1000).describe()
    assert [side["name"] for side in outcome["sides"]][:3] == ["stagewright", "Pillow", "simplejpeg + torch"]
    assert outcome["sides"][0]["ratio"] == 1 and all(side["median"] > 0 for side in outcome["sides"])
    assert list(outcome["loader"]) == [1] and outcome["index_load_seconds"] > 0
    assert set(outcome["overhead_microseconds"]) == {"32x32", "500x375"}
