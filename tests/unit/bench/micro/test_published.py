"""`bench published`: held-out runs are shown with their own errors, apart from the leave-one-out errors."""

from __future__ import annotations

import io

from rich.console import Console

from stagewright.bench.micro.published import describe, show
from stagewright.planning.calibrate import Calibration, Row, published_runs


def made() -> Calibration:
    """One fitted run, predicted exactly, and one held-out run, predicted at half its speed."""
    fitted = next(run for run in published_runs() if run.rate is not None and not run.held_out)
    held_out = next(run for run in published_runs() if run.held_out)
    assert fitted.rate is not None and held_out.rate is not None
    rows = (
        Row(fitted, fitted.rate, fitted.rate, (), is_alone=False),
        Row(held_out, held_out.rate / 2, held_out.rate / 2, (), is_alone=False),
    )
    return Calibration({"link.pcie3-sys.bandwidth": 1e9}, rows)


def test_shows_the_errors_of_held_out_runs_apart_from_the_median() -> None:
    text = io.StringIO()
    show(Console(file=text, width=200), made())
    lines = text.getvalue().splitlines()
    assert any("held out of the fit -50.0%" in line for line in lines)
    assert "median error 0.0%, worst 0.0%" in lines[-2] and lines[-1].endswith("-50.0%")


def test_json_marks_held_out_runs_as_not_counted() -> None:
    found = describe(made())
    assert [(run["held_out"], run["counted"], run["error"]) for run in found["runs"]] == [
        (False, True, 0.0),
        (True, False, -0.5),
    ]
    assert found["median"] == 0.0
