"""Predicted beside measured on this machine: models are profiled, plans simulated, and then run."""

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
from rich.table import Table

from stagewright.config.toml import make_config
from stagewright.run.train import run

Tell = Callable[[str], None]
_PLANS = (("dp", "0:0-1", 2), ("sync", "0:0.0:1", 4), ("stale", "0:0.0:1", 4))
_MODELS = (("vgg-small", 32, 64), ("alexnet", 64, 32), ("resnet18", 64, 32))  # name, image side, batch
_CLASSES = 10
_ROUNDS = 3
_STEPS = 20


@dataclass(frozen=True, slots=True)
class Compared:
    """One plan of one model: images a second, predicted and measured, round by round."""

    model: str
    plan: str
    predicted: tuple[float, ...]
    measured: tuple[float, ...]

    @property
    def error(self) -> float:
        """The median prediction over the median measurement, less one."""
        return statistics.median(self.predicted) / statistics.median(self.measured) - 1


def measure(tell: Tell) -> list[Compared]:
    """In rounds, so that what a shared machine does meets both: profile each model, then run each of its plans."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(_ROUNDS):
            for model, image, batch in _MODELS:
                tell(f"round {number + 1} of {_ROUNDS}: profiling {model}")
                file = str(Path(folder) / f"{model}.json")
                _profile(model, image, batch, file)
                for mode, placement, pieces in _PLANS:
                    tell(f"round {number + 1} of {_ROUNDS}: {model}, {mode} {placement}")
                    pair = _run(model, image, batch, mode, placement, pieces, file, folder)
                    found.setdefault((model, f"{mode} {placement}, M {pieces}"), []).append(pair)
    return [
        Compared(model, plan, tuple(predicted for predicted, _ in pairs), tuple(measured for _, measured in pairs))
        for (model, plan), pairs in found.items()
    ]


def _profile(model: str, image: int, batch: int, file: str) -> None:
    """Profile in a process of its own, as ranks run in processes of their own."""
    sizes = sorted({batch // microbatches for _, _, microbatches in _PLANS})
    command = [sys.executable, "-m", "stagewright.cli.main", "profile", model, "--together", "2", "-o", file]
    command += ["--image", str(image), "--classes", str(_CLASSES), "--samples", ",".join(map(str, sizes))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _run(
    model: str, image: int, batch: int, mode: str, placement: str, pieces: int, file: str, folder: str
) -> tuple[float, float]:
    """Images a second of one run, predicted and measured."""
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": model, "classes": _CLASSES},
        "data": {"image": image, "samples": 256},
        "plan": {"mode": mode, "placement": placement, "batch": batch, "microbatches": pieces, "profile": file},
        "run": {"steps": _STEPS, "runs": folder},
    }
    summary = run(make_config(tables)).summary
    return summary["predicted_images_per_second"], summary["images_per_second"]


def median_error(rows: list[Compared]) -> float:
    return statistics.median(abs(row.error) for row in rows)


def describe(rows: list[Compared]) -> dict[str, Any]:
    return {"median": median_error(rows), "rows": [{**asdict(row), "error": row.error} for row in rows]}


def show(console: Console, rows: list[Compared]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("model", "plan", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name in ("model", "plan") else "right", no_wrap=True)
    for row in rows:
        table.add_row(row.model, row.plan, _spread(row.predicted), _spread(row.measured), f"{row.error:+.1%}")
    console.print(table)
    console.print(
        f"images/s on this machine, median and range of {_ROUNDS} rounds; median error {median_error(rows):.1%}",
        highlight=False,
    )


def _spread(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f}-{max(values):,.0f})"
