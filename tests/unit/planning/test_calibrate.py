"""The published runs: each predicted from the others, memory in bounds, the shipped figures are the fitted ones."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from stagewright.cluster.catalog import shipped
from stagewright.planning.calibrate import PARAMETERS, Calibration, calibrate, predict_run, published_runs
from tests.shared import shared_file


def test_leave_one_out_errors_are_within_their_bounds(calibration: Calibration) -> None:
    assert calibration.median <= 0.06 and calibration.worst <= 0.12
    assert sum(row.counts for row in calibration.rows) >= 24


def test_only_runs_that_are_alone_or_held_out_are_not_counted(calibration: Calibration) -> None:
    uncounted = [row.run for row in calibration.rows if row.error is not None and not row.counts]
    alone = [run.cluster for run in uncounted if not run.held_out]
    assert alone == ["rtx-2080ti-4"] and len(uncounted) == 4


def test_held_out_runs_do_not_change_the_fit() -> None:
    fitted = [run for run in published_runs() if run.system == "OneFlow 0.2" and run.devices in (1, 8)]
    (held_out,) = (run for run in published_runs() if run.held_out and run.software == "oneflow")
    without, with_it = calibrate(runs=fitted), calibrate(runs=[*fitted, held_out])
    assert with_it.figures == without.figures and with_it.median == without.median
    assert with_it.rows[:-1] == without.rows and not with_it.rows[-1].counts
    as_fitted = calibrate(runs=[*fitted, replace(held_out, held_out=False)])
    assert as_fitted.figures != without.figures


def test_the_documentation_states_the_errors_of_held_out_runs(calibration: Calibration) -> None:
    text = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    rows = [row for row in calibration.rows if row.run.held_out]
    assert len(rows) == 3
    for row in rows:
        assert row.left_out == row.predicted, "no figure has seen it"
        assert f"{row.error:+.1%}" in text


def test_memory_of_fitted_runs_is_within_fifteen_percent(calibration: Calibration) -> None:
    for row in calibration.rows:
        if row.run.held_out:
            continue
        full_card = row.run.software == "pipedream" and row.run.model == "vgg16"  # the allocator had filled it
        for predicted, measured in zip(row.memory, row.run.memory_mib, strict=False):
            assert full_card or abs(predicted / measured - 1) <= 0.15, str(row.run)


def test_shipped_figures_are_the_fitted_ones(calibration: Calibration) -> None:
    shipped_tables = tomllib.loads(resources.files("stagewright.cluster").joinpath("calibration.toml").read_text())
    for parameter in PARAMETERS:
        value = shipped_tables
        for key in parameter.path:
            value = value[key]
        assert value[0] == pytest.approx(calibration.figures[".".join(parameter.path)], rel=2e-3)


def test_predicts_which_models_gained_from_stages(calibration: Calibration) -> None:
    """In OneFlow VGG-16 gained about a half from stages, and AlexNet gained nothing."""
    rates = {
        (row.run.model, row.run.mode): row.predicted
        for row in calibration.rows
        if row.run.cluster == "titan-v-8" and row.run.data == "synthetic" and row.run.software == "oneflow"
    }
    assert rates["vgg16", "stale"] / rates["vgg16", "dp"] == pytest.approx(1.46, rel=0.08)
    assert rates["alexnet", "stale"] < 1.06 * rates["alexnet", "dp"]


def test_catalog_has_every_run_of_the_reference() -> None:
    reference = tomllib.loads(shared_file("reference/published.toml").read_text())
    ours = [run for run in published_runs() if run.system not in ("NGC PyTorch", "OneFlow 0.2")]
    assert len(ours) == len(reference["run"])
    for run, entry in zip(ours, reference["run"], strict=True):
        assert (run.model, run.cluster, run.mode, run.data) == (
            entry["model"],
            entry["cluster"],
            entry["mode"],
            entry["data"],
        )
        assert list(run.epoch_seconds) == entry.get("epoch_seconds", [])
        assert list(run.memory_mib) == entry.get("memory_mib", []) and run.shares == entry.get("weights")
        assert run.images_per_second == entry.get("images_per_second")


def test_shipped_catalog_predicts_every_run() -> None:
    for run in published_runs():
        prediction = predict_run(run, shipped())
        assert prediction.images_per_second > 0 and prediction.epoch_seconds > 0
