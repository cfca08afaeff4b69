"""The published runs: each told by the others, memory in bounds, the shipped figures the fitted ones."""

from __future__ import annotations

import tomllib
from importlib import resources

import pytest

from stagewright.cluster.catalog import shipped
from stagewright.planning.calibrate import PARAMETERS, Calibration, predict_run, published_runs
from tests.shared import shared_file


def test_leave_one_out_errors_are_within_their_bounds(calibration: Calibration) -> None:
    assert calibration.median <= 0.06 and calibration.worst <= 0.12
    assert sum(row.counts for row in calibration.rows) >= 24


def test_only_a_run_that_is_alone_is_not_counted(calibration: Calibration) -> None:
    alone = [str(row.run) for row in calibration.rows if row.error is not None and not row.counts]
    assert len(alone) == 1 and "rtx-2080ti-4" in alone[0]


def test_memory_is_within_fifteen_percent(calibration: Calibration) -> None:
    for row in calibration.rows:
        full_card = row.run.software == "pipedream" and row.run.model == "vgg16"  # the allocator had filled it
        for predicted, measured in zip(row.memory, row.run.memory_mib, strict=False):
            assert full_card or abs(predicted / measured - 1) <= 0.15, str(row.run)


def test_the_shipped_figures_are_the_fitted_ones(calibration: Calibration) -> None:
    shipped_tables = tomllib.loads(resources.files("stagewright.cluster").joinpath("calibration.toml").read_text())
    for parameter in PARAMETERS:
        value = shipped_tables
        for key in parameter.path:
            value = value[key]
        assert value[0] == pytest.approx(calibration.figures[".".join(parameter.path)], rel=2e-3)


def test_what_the_field_knows_of_these_runs(calibration: Calibration) -> None:
    """VGG-16 gained about a half from stages; AlexNet gained nothing, in either system."""
    rates = {
        (row.run.software, row.run.model, row.run.mode): row.predicted
        for row in calibration.rows
        if row.run.cluster == "titan-v-8" and (row.run.data == "synthetic" or row.run.software == "pipedream")
    }
    assert rates["oneflow", "vgg16", "stale"] / rates["oneflow", "vgg16", "dp"] == pytest.approx(1.46, rel=0.08)
    assert rates["oneflow", "alexnet", "stale"] < 1.06 * rates["oneflow", "alexnet", "dp"]
    assert rates["pipedream", "alexnet", "pipedream"] < rates["pipedream", "alexnet", "dp"]


def test_every_run_of_the_reference_is_in_the_catalogue() -> None:
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
        assert run.images_per_second == entry.get("images_per_second")


def test_the_shipped_catalogue_predicts_every_run() -> None:
    for run in published_runs():
        prediction = predict_run(run, shipped())
        assert prediction.images_per_second > 0 and prediction.epoch_seconds > 0
