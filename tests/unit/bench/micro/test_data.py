"""`bench data`: all sides decode the same image, and the outcome has every measurement."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stagewright.bench.micro.data import HEIGHT, SIDE, WIDTH, make_jpegs, measure, stagewright_path, stock_paths
from stagewright.cli.main import main
from stagewright.data.augment import Augmentation, Cropping
from tests.marks import nightly


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


@nightly
def test_the_outcome_has_speeds_ratios_overhead_and_index() -> None:
    outcome = measure(repeats=2, images=16, most_threads=1, indexed=1000)
    assert [row.name for row in outcome.rows][:3] == ["stagewright", "Pillow", "simplejpeg + torch"]
    assert all(row.rate is not None and row.rate.value > 0 for row in outcome.rows)
    assert [(ratio.ours, ratio.theirs) for ratio in outcome.ratios][:1] == [("stagewright", "Pillow")]
    assert outcome.rows[-1].label == "1 thread" and len(outcome.figures) == 3
    assert outcome.figures["seconds to load an index of 1000 records"] > 0


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["data", "bench", "--images", "3"], "--images is 3; give at least 16"),
        (["data", "bench", "--repeats", "0"], "--repeats is 0"),
        (["bench", "data", "--repeats", "0"], "--repeats is 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_both_commands_refuse_the_same_numbers(
    command: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 2 and words in capsys.readouterr().err and not list(tmp_path.glob("runs/*"))
