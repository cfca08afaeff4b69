"""`bench published --rows`: predictions, errors by class of evidence, and rows that nobody can read."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.calibration.published import published_runs
from benchmarks.calibration.reading import Reading, read_row
from benchmarks.calibration.report import as_json, predict_file, show_rows
from benchmarks.calibration.rows import read_rows
from benchmarks.outcome import new_outcome
from stagewright.bench.folder import append_rows
from stagewright.bench.result import measured_row
from stagewright.cluster.catalog import shipped
from stagewright.errors import UserError

pytestmark = pytest.mark.xdist_group("published")  # the models of all known rows are traced once
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
    main(["published", "--rows", str(tmp_path / "rows.toml"), "--json"])
    assert set(json.loads(capsys.readouterr().out)) == {"rows", "skipped"}
    for words, why in ((["planner", "--rows", "x.toml"], "--rows"), (["published", "--given", "x.toml"], "--given x.")):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2 and why in capsys.readouterr().err


def test_every_published_figure_is_shown(tmp_path: Path) -> None:
    main(["published", "--runs", str(tmp_path), "--json"])
    (folder,) = tmp_path.iterdir()
    text = (folder / "report.md").read_text()
    for model in ("vgg16", "alexnet", "resnet50"):
        assert f"## {model}: predicted and published" in text
    runs = [run for run in published_runs() if run.cluster in ("titan-v-8", "titan-v-16") and run.precision == "fp32"]
    rows = [line for line in text.splitlines() if line.startswith(("| OneFlow", "| PipeDream"))]
    assert len(runs) == 17
    for run in runs:
        for epoch in run.epoch_seconds:
            assert any(run.system in row and f"{epoch:,.1f}" in row for row in rows), str(run)
        for memory in run.memory_mib:
            assert any(run.system in row and f"{memory:,.0f}" in row for row in rows), str(run)


def test_a_row_that_a_bench_appends_is_read_back_and_predicted(tmp_path: Path) -> None:
    about = {"model": "resnet50", "precision": "bf16", "batch": 256, "device": "cuda", "microbatches": 8}
    measured = measured_row("one", "dp", [2000.0, 2100.0], mode="dp", placement="0:0-7", **about)
    staged = measured_row("one", "stale", [3000.0], mode="stale", placement="0:0-6.0:7", **about)
    outcome = new_outcome("gpu", "made", 2, rows=(measured, staged))
    outcome = replace(outcome, machine={"torch": "2.11", "GPU 0": "NVIDIA H200, 140.4 GiB, 700 W, PCIe 5.0 x16"})
    path = str(tmp_path / "mine.toml")
    assert append_rows(outcome, path) == 1 and append_rows(outcome, path) == 1  # rows of plain data parallel
    (reading, _) = (read_row(row, shipped()) for row in read_rows(path))
    assert isinstance(reading, Reading) and reading.software == "stagewright"
    found = as_json(*predict_file(path))
    assert [(row["hardware"], row["gpus"], row["measured"]) for row in found["rows"]] == [("h200", 8, 2050.0)] * 2
    assert not found["skipped"] and all(row["predicted"] > 0 for row in found["rows"])


def test_a_bench_without_data_parallel_has_no_rows(tmp_path: Path) -> None:
    outcome = new_outcome("gpu", "made", 1, rows=())
    with pytest.raises(UserError, match="--row"):
        append_rows(outcome, str(tmp_path / "mine.toml"))
