"""Calibrates the catalogue's free figures on the published runs, and says how well each run is told by the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagewright.catalog import read_catalogue
from stagewright.published import Run, predict_run

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
