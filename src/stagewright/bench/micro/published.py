"""`bench published`: fit the catalog's free figures to the published runs, and predict each run from the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console

from stagewright.errors import counted
from stagewright.planning.calibrate import Calibration, Row, calibrate
from stagewright.planning.predict import IMAGENET
from stagewright.report.live.terminal import say


def measure(progress: Callable[[str], None]) -> Calibration:
    """Calibrate on all published runs."""
    return calibrate(progress)


def describe(calibration: Calibration) -> dict[str, Any]:
    """The calibration as one JSON object."""
    return {
        "figures": dict(calibration.figures),
        "median": calibration.median,
        "worst": calibration.worst,
        "runs": [
            {
                "run": str(row.run),
                "measured": row.run.rate,
                "predicted": row.predicted,
                "epoch_seconds": IMAGENET / row.predicted,
                "left_out": row.left_out,
                "error": row.error,
                "counted": row.counts,
                "held_out": row.run.held_out,
                "memory_mib": list(row.memory),
                "measured_memory_mib": list(row.run.memory_mib),
            }
            for row in calibration.rows
        ],
    }


def show(console: Console, calibration: Calibration) -> None:
    """One or two lines per run, then the fitted figures and the errors."""
    for row in calibration.rows:
        say(console, str(row.run))
        epoch = IMAGENET / row.predicted
        say(console, f"    predicted {row.predicted:,.0f} images/s, epoch {epoch:,.1f} s{_error(row)}")
        for found, measured in zip(row.memory, row.run.memory_mib, strict=False):
            say(console, f"    memory {found:,.0f} MiB, measured {measured:,.0f} ({found / measured - 1:+.0%})")
    say(console, "fitted:")
    for name, value in calibration.figures.items():
        say(console, f"    {name} = {value:.4g}")
    say(console, f"predicted from the others: median error {calibration.median:.1%}, worst {calibration.worst:.1%}")
    if held_out := [row for row in calibration.rows if row.run.held_out]:
        errors = ", ".join(f"{row.error:+.1%}" for row in held_out)
        say(console, f"held out of the fit: {counted(len(held_out), 'run')}, errors {errors}")


def _error(row: Row) -> str:
    """The measured speed and the prediction's error, for a run with a result."""
    if row.run.rate is None:
        return ""
    if row.run.held_out:
        return f"; measured {row.run.rate:,.0f}; held out of the fit {row.error:+.1%}"
    alone = " (alone: not counted)" if row.is_alone else ""
    return f"; measured {row.run.rate:,.0f}; predicted from the others {row.error:+.1%}{alone}"
