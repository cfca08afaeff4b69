"""Calibrates the catalogue's free figures on the published runs, and says how well each run is told by the others."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from stagewright.planning.calibrate import Calibration
from stagewright.planning.predict import IMAGENET


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
                "memory_mib": list(row.memory),
                "measured_memory_mib": list(row.run.memory_mib),
            }
            for row in calibration.rows
        ],
    }


def show(console: Console, calibration: Calibration) -> None:
    """Every run in a line or two, then the verdict."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    for row in calibration.rows:
        say(str(row.run))
        text = f"    predicted {row.predicted:,.0f} images/s, epoch {IMAGENET / row.predicted:,.1f} s"
        if row.run.rate is not None:
            text += f"; measured {row.run.rate:,.0f}; told by the others {row.error:+.1%}"
        if row.run.rate is not None and row.is_alone:
            text += " (alone: not counted)"
        say(text)
        for found, measured in zip(row.memory, row.run.memory_mib, strict=False):
            say(f"    memory {found:,.0f} MiB, measured {measured:,.0f} ({found / measured - 1:+.0%})")
    say("fitted:")
    for name, value in calibration.figures.items():
        say(f"    {name} = {value:.4g}")
    say(f"told by the others: median error {calibration.median:.1%}, worst {calibration.worst:.1%}")
