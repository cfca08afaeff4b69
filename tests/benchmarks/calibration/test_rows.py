"""Measured rows: their file, its errors, and the split by source."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from benchmarks.calibration.rows import SPLITS, known_rows, read_rows, split_by_source
from stagewright.errors import UserError
from tests.shared import shared_file

ROW = """[[row]]
hardware = "rtx-3090"
gpus = 2
software = "PyTorch 2"
model = "resnet50"
precision = "fp16"
batch_per_gpu = 64
images_per_second = 2000
source = "here"
"""


@pytest.mark.parametrize("seed", range(SPLITS))
def test_no_source_is_both_fitted_and_evaluated(seed: int) -> None:
    fitted, evaluated = split_by_source(known_rows(), seed)
    assert not {row.source for row in fitted} & {row.source for row in evaluated}
    assert sorted(fitted + evaluated, key=str) == sorted(known_rows(), key=str)
    assert split_by_source(tuple(reversed(known_rows())), seed)[0] == list(reversed(fitted)), "order changes nothing"


def test_splits_differ() -> None:
    halves = {frozenset(row.source for row in split_by_source(known_rows(), seed)[0]) for seed in range(SPLITS)}
    assert len(halves) == SPLITS


def test_catalog_has_every_row_of_the_reference() -> None:
    reference = tomllib.loads(shared_file("reference/measured_rows.toml").read_text())["row"]
    ours = known_rows()
    assert len(ours) == len(reference)
    for row, entry in zip(ours, reference, strict=True):
        assert all(getattr(row, name) == value for name, value in entry.items())


def test_reads_a_file_of_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.toml").write_text(ROW)
    (row,) = read_rows(str(tmp_path / "rows.toml"))
    assert (row.gpus, row.nodes, row.images_per_second, row.host) == (2, 1, 2000, ("here", "rtx-3090"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("gpus = 2", 'gpus = "2"'), "gpus is '2'"),
        (("gpus = 2", "gpus = 3\nnodes = 2"), "3 gpus on 2 nodes"),
        (("batch_per_gpu = 64", "batch_per_gpu = 0"), "batch_per_gpu is 0"),
        (('model = "resnet50"\n', ""), "lacks model"),
        ((ROW, "a = 1"), "no [[row]]"),
        ((ROW, "a = "), "not TOML"),
    ],
)
def test_a_wrong_row_is_one_line(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    (tmp_path / "rows.toml").write_text(ROW.replace(*change))
    with pytest.raises(UserError) as error:
        read_rows(str(tmp_path / "rows.toml"))
    assert message in str(error.value) and "\n" not in str(error.value)
