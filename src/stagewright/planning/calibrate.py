"""The published runs, and the calibration of the catalog's free figures on them.

`published_runs` reads what others ran and measured; `predict_run` simulates one of them. `calibrate` fits the free
figures to all runs with results, and predicts each run from the others alone, for `bench published`.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from stagewright.cluster.catalog import read_catalog
from stagewright.cluster.placement import format_placement
from stagewright.cluster.specs import Catalog
from stagewright.cluster.topology import Cluster
from stagewright.config.toml import make_config
from stagewright.metrics import MIB
from stagewright.plan.estimate import Setting
from stagewright.plan.plan import Plan
from stagewright.planning.build import build_plan
from stagewright.planning.predict import IMAGENET, Prediction, predict
from stagewright.planning.setting import make_setting, trace_model

Array = Any  # a numpy array
_ROW_SPREAD = 0.05  # the error to expect of such a model for one run, in logarithms
_STEP = 0.02  # for slopes by finite differences, in logarithms
_ITERATIONS = 4


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One published run."""

    system: str
    software: str
    model: str
    cluster: str
    precision: str
    data: str
    mode: str
    global_batch: int | None = None
    microbatch: int | None = None
    devices: int | None = None
    placement: str | None = None
    shares: str | None = None
    scheduling: str | None = None
    images_per_second: float | None = None
    epoch_seconds: tuple[float, ...] = ()
    memory_mib: tuple[float, ...] = ()
    held_out: bool = False  # its result became known after the fit: never fitted, only predicted

    @property
    def rate(self) -> float | None:
        """Measured images per second, over the mean of its epochs."""
        if self.images_per_second is not None:
            return self.images_per_second
        return IMAGENET / statistics.fmean(self.epoch_seconds) if self.epoch_seconds else None

    @property
    def group(self) -> tuple[str, str, str]:
        """Device, precision and software: runs that share them inform each other's prediction."""
        return (self.cluster.rpartition("-")[0], self.precision, self.software)

    def __str__(self) -> str:
        devices = f" x{self.devices}" if self.devices else ""
        size = f"{self.global_batch}" if self.global_batch else f"{self.microbatch} each"
        return (
            f"{self.system}, {self.model}, {self.cluster}{devices}, {self.mode} {size}, {self.data}, {self.precision}"
        )


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Every run of the catalog."""
    tables = tomllib.loads(resources.files("stagewright.cluster").joinpath("published.toml").read_text())
    runs = []
    for entry in tables["run"]:
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
        }
        runs.append(PublishedRun(software=tables["system"][entry["system"]], **values))
    return tuple(runs)


def run_plan(run: PublishedRun, catalog: Catalog) -> Plan:
    """The plan of a published run: one microbatch per replica of the widest stage, and the largest lag of its mode."""
    cluster = _run_cluster(run, catalog)
    placement = run.placement or format_placement((cluster.devices,))
    staleness = placement.count(".") if run.mode == "stale" else None
    options = {"placement": placement, "shares": run.shares, "mode": run.mode, "staleness": staleness}
    size = {} if run.global_batch is None else {"batch": run.global_batch}
    return build_plan(
        make_config({"plan": options | size}).plan,
        cluster,
        trace_model(run.model).chain,
        lambda placement: run_setting(run, catalog),
        microbatch=None if run.global_batch else run.microbatch or 1,
        one_each=True,
    )


def _run_cluster(run: PublishedRun, catalog: Catalog) -> Cluster:
    cluster = catalog.cluster(run.cluster)
    return cluster.first(run.devices) if run.devices else cluster


def run_setting(run: PublishedRun, catalog: Catalog) -> Setting:
    """The hardware and software of a published run."""
    shapes, loads = trace_model(run.model).shapes, run.data != "synthetic"
    cluster = _run_cluster(run, catalog)
    return make_setting(shapes, cluster, run.precision, catalog=catalog, software=run.software, loads=loads)


def predict_run(run: PublishedRun, catalog: Catalog) -> Prediction:
    """Simulate a published run."""
    return predict(run_plan(run, catalog), run_setting(run, catalog))


@dataclass(frozen=True, slots=True)
class Parameter:
    """One free figure: its place in the catalog, and the mean and spread of its prior."""

    path: tuple[str, ...]
    prior: float
    spread: float  # in logarithms


# One efficiency per device and precision, one per software, one bandwidth per link, one decoding rate per core.
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
    """The parameters' values, given as logarithms, as tables of the catalog."""
    tables: dict[str, Any] = {}
    for parameter, log in zip(PARAMETERS, logs, strict=True):
        table = tables
        for key in parameter.path[:-1]:
            table = table.setdefault(key, {})
        table[parameter.path[-1]] = math.exp(log)
    return tables


def _errors(runs: Sequence[PublishedRun], logs: Array) -> Array:
    """Predicted over measured, in logarithms."""
    catalog = read_catalog((), overrides(list(logs)))
    return np.array([math.log(predict_run(run, catalog).images_per_second / float(run.rate or 1)) for run in runs])


@dataclass(frozen=True, slots=True)
class Fit:
    """The figures that predict the runs best, and how each run's prediction moves with each figure."""

    logs: Array
    errors: Array  # predicted over measured, in logarithms
    slopes: Array  # runs x parameters

    def without(self, left_out: int) -> Array:
        """The figures fitted again without one run, with the slopes of the whole fit."""
        kept = [index for index in range(len(self.errors)) if index != left_out]
        return self.logs + _solve(self.slopes[kept], self.errors[kept], self.logs)


def _priors() -> tuple[Array, Array]:
    return (
        np.array([math.log(parameter.prior) for parameter in PARAMETERS]),
        np.array([parameter.spread for parameter in PARAMETERS]),
    )


def _solve(slopes: Array, errors: Array, logs: Array) -> Array:
    """One step of least squares: every run has the same weight, and every figure is pulled towards its prior."""
    prior, spread = _priors()
    rows = np.vstack([slopes / _ROW_SPREAD, np.diag(1 / spread)])
    wanted = np.concatenate([-errors / _ROW_SPREAD, (prior - logs) / spread])
    return np.linalg.lstsq(rows, wanted, rcond=None)[0]


def fit(runs: Sequence[PublishedRun], progress: Callable[[str], None] = lambda text: None) -> Fit:
    """Fit the figures to the runs by Gauss-Newton, starting from the priors."""
    logs, _ = _priors()
    for iteration in range(_ITERATIONS):
        progress(f"fitting {len(PARAMETERS)} figures to {len(runs)} runs, pass {iteration + 1} of {_ITERATIONS}")
        errors = _errors(runs, logs)
        slopes = _slopes(runs, logs, errors)
        if iteration < _ITERATIONS - 1:
            logs = logs + _solve(slopes, errors, logs)
    return Fit(logs, errors, slopes)


def _slopes(runs: Sequence[PublishedRun], logs: Array, errors: Array) -> Array:
    columns = []
    for index in range(len(logs)):
        moved = logs.copy()
        moved[index] += _STEP
        columns.append((_errors(runs, moved) - errors) / _STEP)
    return np.column_stack(columns)


@dataclass(frozen=True, slots=True)
class Row:
    """One published run and its prediction."""

    run: PublishedRun
    predicted: float  # images per second, with the figures of the whole fit
    left_out: float | None  # the same, with figures fitted without this run; None where it has no result
    memory: tuple[float, ...]  # MiB of a rank of the first and of the last stage
    is_alone: bool  # it is fitted, and no other fitted run shares its device, precision and software

    @property
    def error(self) -> float | None:
        """The relative error of the prediction by the other runs."""
        return None if self.left_out is None or self.run.rate is None else self.left_out / self.run.rate - 1

    @property
    def counts(self) -> bool:
        """Whether the error is part of the leave-one-out median."""
        return self.error is not None and not self.is_alone and not self.run.held_out


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted figures, and every run."""

    figures: Mapping[str, float]
    rows: tuple[Row, ...]

    @property
    def median(self) -> float:
        return statistics.median(abs(row.error or 0.0) for row in self.rows if row.counts)

    @property
    def worst(self) -> float:
        return max(abs(row.error or 0.0) for row in self.rows if row.counts)


def calibrate(
    progress: Callable[[str], None] = lambda text: None, runs: Sequence[PublishedRun] | None = None
) -> Calibration:
    """Fit all runs with results but those held out; then predict every run, by the other runs where it was fitted."""
    runs = published_runs() if runs is None else runs
    fitted = [run for run in runs if run.rate is not None and not run.held_out]
    whole = fit(fitted, progress)
    groups = [run.group for run in fitted]
    catalog = read_catalog((), overrides(list(whole.logs)))
    rows = []
    for run in runs:
        progress(f"predicting {run}")
        prediction = predict_run(run, catalog)
        memory = (prediction.memory[0].total / MIB, prediction.memory[-1].total / MIB)[: len(prediction.plan.stages)]
        left_out, is_alone = None, False
        if run in fitted:
            error = float(_errors([run], whole.without(fitted.index(run)))[0])
            left_out = float(run.rate or 0) * math.exp(error)
            is_alone = groups.count(run.group) == 1
        elif run.rate is not None:  # held out: no figure has seen it
            left_out = prediction.images_per_second
        rows.append(Row(run, prediction.images_per_second, left_out, memory, is_alone))
    figures = {".".join(parameter.path): math.exp(log) for parameter, log in zip(PARAMETERS, whole.logs, strict=True)}
    return Calibration(figures, tuple(rows))
