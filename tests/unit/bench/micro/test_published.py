"""`bench published`: held-out runs are shown with their own errors, apart from the leave-one-out errors."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from stagewright.bench.micro.published import make_outcome
from stagewright.bench.pages import show
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
    outcome = make_outcome(made())
    show(Console(file=text, width=200), outcome, Path("runs/x"))
    lines = text.getvalue().splitlines()
    assert any(line.endswith("-50.0% held out") for line in lines)
    assert "median error of a run predicted from the others, %: 0" in lines and "worst error, %: 0" in lines
    assert outcome.figures["link.pcie3-sys.bandwidth"] == 1e9


def test_held_out_runs_are_marked() -> None:
    rows = {row.held_out: row.told for row in make_outcome(made()).published}
    assert rows == {False: 0.0, True: -0.5}
