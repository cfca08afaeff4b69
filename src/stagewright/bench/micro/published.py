"""`bench published`: fit the catalog's free figures to the published runs, and predict each run from the others."""

from __future__ import annotations

from collections.abc import Callable

from stagewright.bench.predict import published_row
from stagewright.bench.result import Outcome, new_outcome
from stagewright.planning.calibrate import Calibration, calibrate


def measure(progress: Callable[[str], None]) -> Outcome:
    """Calibrate on all published runs."""
    return make_outcome(calibrate(progress))


def make_outcome(calibration: Calibration) -> Outcome:
    """Every run, the fitted figures, and the errors of predicting a run from the others."""
    return new_outcome(
        "published",
        "Published runs, predicted",
        1,
        published=tuple(sorted(map(published_row, calibration.rows), key=lambda row: row.model)),
        figures={
            **calibration.figures,
            "median error of a run predicted from the others, %": 100 * calibration.median,
            "worst error, %": 100 * calibration.worst,
        },
    )
