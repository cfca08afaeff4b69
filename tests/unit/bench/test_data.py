"""`data bench`: what it measures, never how fast."""

from __future__ import annotations

import json

import pytest

from stagewright.bench import data
from stagewright.bench.data import Images, make_jpegs
from stagewright.data.augment import Augmentation, Cropping
from tests.commands import prints


def test_decoding_and_loaders_of_every_form_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    small = Images(make_jpegs(48, 64)[:2], Augmentation(32, Cropping.RESIZED), 48, 64)
    monkeypatch.setattr(data, "photographs", lambda: small)
    monkeypatch.setattr(data, "batch_rate", lambda next_batch, prepared, seconds: float(next_batch() is not None))
    monkeypatch.chdir(str(tmp_path))
    found = json.loads(prints(capsys, "data", "bench", "--repeats", "1", "--images", "16", "--threads", "1", "--json"))
    assert [row["name"] for row in found["rows"]] == ["one thread", *["1 thread", "1 process"] * 3]
    assert len({row["group"] for row in found["rows"]}) == 4
    assert all(row["rate"]["value"] > 0 for row in found["rows"])
