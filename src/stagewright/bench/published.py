"""Calibrates the catalogue's free figures on the published runs, and says how well each run is told by the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from stagewright.catalog import read_catalogue
from stagewright.catalog.values import MIB
from stagewright.predict import IMAGENET
from stagewright.published import Run, predict_run, published_runs

Array = Any  # a numpy array
_ROW_SPREAD = 0.05  # how well a law like this can tell a run, in logarithms
_STEP = 0.02
_ITERATIONS = 4


@dataclass(frozen=True, slots=True)
class Parameter:
    """One free figure: its place in the catalogue, what is believed of it beforehand, and how firmly."""

    path: tuple[str, ...]
    prior: float
    spread: float  # in logarithms


# Per device and precision one efficiency, per software one, per link one bandwidth, one decoding rate a core.
PARAMETERS = (
    Parameter(("device", "titan-v", "efficiency", "fp32"), 0.85, 0.15),
    Parameter(("device", "v100-sxm2-16", "efficiency", "fp32"), 0.85, 0.15),
    Parameter(("device", "v100-sxm2-16", "efficiency", "fp16"), 0.6, 0.3),
    Parameter(("device", "rtx-2080ti-22", "efficiency", "fp16"), 0.6, 0.3),
    Parameter(("software", "pytorch", "efficiency"), 1.0, 0.15),
    Parameter(("software", "pipedream", "efficiency"), 0.5, 0.5),
    Parameter(("link", "pcie3-sys", "bandwidth"), 10.0e9, 0.3),
    Parameter(("link", "host-copy", "bandwidth"), 1.5e9, 0.5),
    Parameter(("loader", "decode"), 566.0, 0.2),
)


def overrides(logs: Sequence[float]) -> dict[str, Any]:
    """Values of the parameters as tables of the catalogue."""
    tables: dict[str, Any] = {}
    for parameter, log in zip(PARAMETERS, logs, strict=True):
        table = tables
        for key in parameter.path[:-1]:
            table = table.setdefault(key, {})
        table[parameter.path[-1]] = math.exp(log)
    return tables


def _errors(runs: Sequence[Run], logs: Array) -> Array:
    """Predicted over measured, in logarithms."""
    catalogue = read_catalogue((), overrides(list(logs)))
    return np.array([math.log(predict_run(run, catalogue).images_per_second / float(run.rate or 1)) for run in runs])


@dataclass(frozen=True, slots=True)
class Fit:
    """The figures that tell the runs best, and how each run's prediction moves with each figure."""

    logs: Array
    errors: Array
    slopes: Array  # runs x parameters

    def without(self, left_out: int) -> Array:
        """The figures fitted again without one run, on the slopes of the whole fit."""
        kept = [index for index in range(len(self.errors)) if index != left_out]
        return self.logs + _solve(self.slopes[kept], self.errors[kept], self.logs)


def _priors() -> tuple[Array, Array]:
    return (
        np.array([math.log(parameter.prior) for parameter in PARAMETERS]),
        np.array([parameter.spread for parameter in PARAMETERS]),
    )


def _solve(slopes: Array, errors: Array, logs: Array) -> Array:
    """The step that least squares takes: every run counts alike, and every figure pulls towards its prior."""
    prior, spread = _priors()
    rows = np.vstack([slopes / _ROW_SPREAD, np.diag(1 / spread)])
    wanted = np.concatenate([-errors / _ROW_SPREAD, (prior - logs) / spread])
    return np.linalg.lstsq(rows, wanted, rcond=None)[0]


def fit(runs: Sequence[Run], tell: Callable[[str], None] = lambda text: None) -> Fit:
    """Gauss-Newton from the priors."""
    logs, _ = _priors()
    for iteration in range(_ITERATIONS):
        tell(f"fitting {len(PARAMETERS)} figures to {len(runs)} runs, pass {iteration + 1} of {_ITERATIONS}")
        errors = _errors(runs, logs)
        slopes = _slopes(runs, logs, errors)
        if iteration < _ITERATIONS - 1:
            logs = logs + _solve(slopes, errors, logs)
    return Fit(logs, errors, slopes)


def _slopes(runs: Sequence[Run], logs: Array, errors: Array) -> Array:
    columns = []
    for index in range(len(logs)):
        moved = logs.copy()
        moved[index] += _STEP
        columns.append((_errors(runs, moved) - errors) / _STEP)
    return np.column_stack(columns)


@dataclass(frozen=True, slots=True)
class Row:
    """One published run beside what the simulator says of it."""

    run: Run
    predicted: float  # images a second, with every figure fitted
    left_out: float | None  # the same, with figures fitted to the other runs alone
    memory: tuple[float, ...]  # MiB of the first and the last stage's ranks
    is_alone: bool  # no other run shares its device, precision and software

    @property
    def error(self) -> float | None:
        """Predicted over measured by the other runs, less one."""
        return None if self.left_out is None or self.run.rate is None else self.left_out / self.run.rate - 1

    @property
    def counts(self) -> bool:
        return self.error is not None and not self.is_alone


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted figures and every run."""

    figures: Mapping[str, float]
    rows: tuple[Row, ...]

    @property
    def median(self) -> float:
        return statistics.median(abs(row.error or 0.0) for row in self.rows if row.counts)

    @property
    def worst(self) -> float:
        return max(abs(row.error or 0.0) for row in self.rows if row.counts)


def measure(tell: Callable[[str], None] = lambda text: None) -> Calibration:
    """Fit all runs that carry results, then tell each from the others, then predict those that carry none."""
    runs = [run for run in published_runs() if run.rate is not None]
    whole = fit(runs, tell)
    groups = [run.group for run in runs]
    catalogue = read_catalogue((), overrides(list(whole.logs)))
    rows = []
    for run in published_runs():
        tell(f"predicting {run}")
        prediction = predict_run(run, catalogue)
        memory = (prediction.memory[0].total / MIB, prediction.memory[-1].total / MIB)[: len(prediction.plan.stages)]
        left_out = None
        if run.rate is not None:
            left_out = run.rate * math.exp(float(_errors([run], whole.without(runs.index(run)))[0]))
        rows.append(Row(run, prediction.images_per_second, left_out, memory, groups.count(run.group) == 1))
    figures = {".".join(parameter.path): math.exp(log) for parameter, log in zip(PARAMETERS, whole.logs, strict=True)}
    return Calibration(figures, tuple(rows))


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
