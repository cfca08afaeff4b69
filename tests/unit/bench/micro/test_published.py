"""`bench published --rows`: predictions, errors by class of evidence, and rows that nobody can read."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from stagewright.bench.micro.published import as_json, predict_file, show_rows
from stagewright.cli.bench import Request, run_bench
from stagewright.errors import UserError

ROWS = """
row = [
  { hardware = "rtx-3090", gpus = 1, software = "PyTorch", model = "resnet50", precision = "fp16", batch_per_gpu = 64, images_per_second = 800, source = "a" },
  { hardware = "rtx-3090", gpus = 4, software = "PyTorch", model = "resnet50", precision = "fp16", batch_per_gpu = 64, images_per_second = 1500, source = "a" },
  { hardware = "gtx-1080ti", gpus = 1, software = "PyTorch", model = "vgg16", precision = "fp32", batch_per_gpu = 32, images_per_second = 140, source = "b" },
  { hardware = "an abacus", gpus = 1, software = "PyTorch", model = "vgg16", precision = "fp32", batch_per_gpu = 32, images_per_second = 1, source = "b" },
]
"""  # noqa: E501


def test_rows_of_a_file_have_a_prediction_an_interval_and_a_class(tmp_path: Path) -> None:
    (tmp_path / "rows.toml").write_text(ROWS)
    found = as_json(*predict_file(str(tmp_path / "rows.toml")))
    assert [row["class"] for row in found["rows"]] == ["fitted card", "unknown host", "data sheet"]
    keys = {"source", "software", "hardware", "model", "gpus", "predicted", "measured", "low", "high", "class"}
    for row in found["rows"]:
        assert set(row) == keys and row["low"] < row["predicted"] < row["high"]
    (skipped,) = found["skipped"]
    assert skipped["hardware"] == "an abacus" and "abacus" in skipped["why"]


def test_a_given_row_tells_its_host(tmp_path: Path) -> None:
    (tmp_path / "rows.toml").write_text(ROWS)
    path = str(tmp_path / "rows.toml")
    alone, told = (as_json(*predict_file(path, given))["rows"][1] for given in (None, path))
    assert told["class"] == "fitted card"
    assert abs(told["predicted"] / 1500 - 1) < abs(alone["predicted"] / 1500 - 1)


def test_shows_errors_by_class(tmp_path: Path) -> None:
    (tmp_path / "rows.toml").write_text(ROWS)
    text = io.StringIO()
    show_rows(Console(file=text, width=250), *predict_file(str(tmp_path / "rows.toml")))
    shown = text.getvalue()
    assert "all: 3 rows" in shown and "unknown host: 1 rows" in shown and "skipped: 1 x an abacus" in shown


def test_the_command_prints_exactly_the_rows_and_what_was_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.toml").write_text(ROWS)
    run_bench(Request("published", rows=str(tmp_path / "rows.toml"), as_json=True))
    assert set(json.loads(capsys.readouterr().out)) == {"rows", "skipped"}
    with pytest.raises(UserError, match="does not use --rows"):
        run_bench(Request("planner", rows="x.toml"))
    with pytest.raises(UserError, match=r"--given x\.toml"):
        run_bench(Request("published", given="x.toml"))
