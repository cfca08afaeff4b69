"""`bench own`: how accurate predictions are on this machine: models are profiled, their plans simulated, then run."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from stagewright.config.toml import make_config
from stagewright.report.live.terminal import plain_table
from stagewright.run.train import run

Progress = Callable[[str], None]
_PLANS = (("dp", "0:0-1", 2), ("sync", "0:0.0:1", 4), ("stale", "0:0.0:1", 4))
_MODELS = (("vgg-small", 32, 64), ("alexnet", 64, 32), ("resnet18", 64, 32))  # name, image side, batch
_CLASSES = 10
_REPEATS = 3
_STEPS = 20


@dataclass(frozen=True, slots=True)
class Compared:
    """One plan of one model: images per second, predicted and measured, one of each per repeat."""

    model: str
    plan: str
    predicted: tuple[float, ...]
    measured: tuple[float, ...]

    @property
    def error(self) -> float:
        """The median prediction over the median measurement, minus 1."""
        return statistics.median(self.predicted) / statistics.median(self.measured) - 1


def measure(progress: Progress) -> list[Compared]:
    """Profile each model and run each of its plans, in turns, so that background load meets both."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(_REPEATS):
            for model, image, batch in _MODELS:
                progress(f"repeat {number + 1} of {_REPEATS}: profiling {model}")
                file = str(Path(folder) / f"{model}.json")
                _profile(model, image, batch, file)
                for mode, placement, microbatches in _PLANS:
                    progress(f"repeat {number + 1} of {_REPEATS}: {model}, {mode} {placement}")
                    pair = _run(model, image, batch, mode, placement, microbatches, file, folder)
                    found.setdefault((model, f"{mode} {placement}, M {microbatches}"), []).append(pair)
    return [
        Compared(model, plan, tuple(predicted for predicted, _ in pairs), tuple(measured for _, measured in pairs))
        for (model, plan), pairs in found.items()
    ]


def _profile(model: str, image: int, batch: int, file: str) -> None:
    """Profile in a separate process, just as ranks run in separate processes."""
    sizes = sorted({batch // microbatches for _, _, microbatches in _PLANS})
    command = [sys.executable, "-m", "stagewright", "profile", model, "--together", "2", "-o", file]
    command += ["--image", str(image), "--classes", str(_CLASSES), "--samples", ",".join(map(str, sizes))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _run(
    model: str, image: int, batch: int, mode: str, placement: str, microbatches: int, file: str, folder: str
) -> tuple[float, float]:
    """Images per second of one run, predicted and measured."""
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": model, "classes": _CLASSES},
        "data": {"image": image, "samples": 256},
        "plan": {"mode": mode, "placement": placement, "batch": batch, "microbatches": microbatches, "profile": file},
        "run": {"steps": _STEPS, "runs": folder},
    }
    summary = run(make_config(tables)).summary
    return summary["predicted_images_per_second"], summary["images_per_second"]


def median_error(rows: list[Compared]) -> float:
    return statistics.median(abs(row.error) for row in rows)


def describe(rows: list[Compared]) -> dict[str, Any]:
    return {"median": median_error(rows), "rows": [{**asdict(row), "error": row.error} for row in rows]}


def show(console: Console, rows: list[Compared]) -> None:
    columns = ("model", "plan", "predicted", "measured", "error")
    table = plain_table(*columns, left=("model", "plan"), no_wrap=columns)
    for row in rows:
        table.add_row(row.model, row.plan, _spread(row.predicted), _spread(row.measured), f"{row.error:+.1%}")
    console.print(table)
    console.print(
        f"images/s on this machine, median and range of {_REPEATS} repeats; median error {median_error(rows):.1%}",
        highlight=False,
    )


def _spread(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f}-{max(values):,.0f})"
