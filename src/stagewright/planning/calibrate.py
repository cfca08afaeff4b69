"""The published runs: what was run, what it took, and what the simulator says of it. Calibrates the catalogue's free figures on the published runs, and says how well each run is told by the others."""

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

from stagewright.cluster.catalog import read_catalogue
from stagewright.cluster.placement import Placement, parse_placement
from stagewright.cluster.specs import MIB, Catalogue
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode, Plan
from stagewright.plan.search import best_cuts
from stagewright.planning.predict import IMAGENET, Prediction, predict
from stagewright.planning.setting import analytic_setting, study


@dataclass(frozen=True, slots=True)
class Run:
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
    weights: str | None = None
    scheduling: str | None = None
    images_per_second: float | None = None
    epoch_seconds: tuple[float, ...] = ()
    memory_mib: tuple[float, ...] = ()

    @property
    def rate(self) -> float | None:
        """Measured images a second, over the mean of its epochs."""
        if self.images_per_second is not None:
            return self.images_per_second
        return IMAGENET / statistics.fmean(self.epoch_seconds) if self.epoch_seconds else None

    @property
    def group(self) -> tuple[str, str, str]:
        """Rows that share their device, precision and software tell of each other."""
        return (self.cluster.rpartition("-")[0], self.precision, self.software)

    def __str__(self) -> str:
        devices = f" x{self.devices}" if self.devices else ""
        size = f"{self.global_batch}" if self.global_batch else f"{self.microbatch} each"
        return (
            f"{self.system}, {self.model}, {self.cluster}{devices}, {self.mode} {size}, {self.data}, {self.precision}"
        )


@cache
def published_runs() -> tuple[Run, ...]:
    """Every run of the catalogue."""
    tables = tomllib.loads(resources.files("stagewright.cluster").joinpath("published.toml").read_text())
    return tuple(_run(entry, tables["system"]) for entry in tables["run"])


def _run(entry: Mapping[str, Any], systems: Mapping[str, str]) -> Run:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Run(software=systems[entry["system"]], **values)


def run_plan(run: Run, catalogue: Catalogue) -> Plan:
    """The plan of a published run: a batch flows in as many pieces as its widest stage has replicas."""
    cluster = catalogue.cluster(run.cluster)
    cluster = cluster.first(run.devices) if run.devices else cluster
    placement: Placement = (cluster.devices,) if run.placement is None else parse_placement(run.placement, cluster)
    pieces = max(len(devices) for devices in placement)
    batch = run.global_batch or (run.microbatch or 1) * pieces
    mode = Mode(run.mode)
    cuts = () if mode is Mode.DP else _cuts(run, catalogue, placement, batch)
    return make_plan(placement, batch=batch, microbatches=pieces, mode=mode, cuts=cuts)


def _cuts(run: Run, catalogue: Catalogue, placement: Placement, batch: int) -> tuple[str, ...]:
    chain = study(run.model).chain
    if run.weights is not None:
        return chain.by_weights([int(weight) for weight in run.weights.split(":")])
    pieces = max(len(devices) for devices in placement)
    return best_cuts(run_setting(run, catalogue), placement, Mode(run.mode), batch, pieces)


def run_setting(run: Run, catalogue: Catalogue) -> Any:
    cluster = catalogue.cluster(run.cluster)
    return analytic_setting(
        catalogue,
        cluster.first(run.devices) if run.devices else cluster,
        study(run.model).shapes,
        catalogue.system(run.software),
        run.precision,
        loads=run.data != "synthetic",
    )


def predict_run(run: Run, catalogue: Catalogue) -> Prediction:
    """What the simulator says of a published run."""
    return predict(run_plan(run, catalogue), run_setting(run, catalogue))


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
