"""The calibration: the catalog's free figures, fitted to measured rows and published runs, and how far it is off.

Every figure has a prior and moves only as far as the evidence requires. What kernels reach is a share of the data
sheet's peak by kind of kernel, times a factor for the chip family; a software has an efficiency, an overhead and what
it loses by scaling; a machine whose cards copy through the host has a budget. `splits` says how far it is off.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from benchmarks.calibration.published import PublishedRun, predict_run, published_runs, run_kinds
from benchmarks.calibration.reading import Reading, read_row, row_rate
from benchmarks.calibration.rows import known_rows
from stagewright.cluster.catalog import read_catalog, shipped
from stagewright.cluster.specs import HALF, Catalog, DeviceSpec
from stagewright.planning.compare import Evidence
from stagewright.voice import SILENT, Voice

Array = Any  # a numpy array
_SPREAD = 0.06  # the error to expect of such a law for one row, in logarithms
_STEP = 0.02  # for slopes by finite differences, in logarithms
_ITERATIONS = 5
_MOST_STEP = 0.7
_REFERENCE = "pytorch"  # the software that the shares of kernels are stated for
HOST_PRIOR = (16e9, 0.5)
_SLOW_HOST, _FAST_HOST = 2.5e9, 30e9
_FAMILIES = ("kepler", "maxwell", "pascal", "volta", "turing", "ga100", "ga102", "ada", "hopper", "blackwell", "amd")
# Plain kernels reach more of GDDR's bandwidth than of HBM's, and the newest chips keep much in their large caches.
_MEMORY_PRIORS = {"ga102": 1.12, "ada": 1.45, "turing": 1.1, "pascal": 1.05, "blackwell": 1.3}
_KEPLER = 0.55  # of the others' share: its cards hardly hold their boost clock, and libraries have few kernels for them
# What software loses by every doubling: usual figures, and when it does. Each has its own, near what all of them lose.
_LOSSES: Mapping[str, tuple[float, Callable[[Observation], bool]]] = {
    "jitter": (0.01, lambda o: True),
    "half_jitter": (0.02, lambda o: o.precision in HALF),
    "network_jitter": (0.03, lambda o: o.machines > 1),
}
_SOFTWARE = ("mxnet", "oneflow", "paddle", "pipedream", "pytorch", "tensorflow", "tensorflow-xla")


def units_of(device: DeviceSpec, precision: str, convolution: bool = True) -> str:
    """What computes in a precision; all kinds of half precision count as one."""
    units = device.units(precision, convolution=convolution)
    return "fp16" if units in HALF else units


@dataclass(frozen=True)
class Observation:
    """A measured rate, what it depends on, and how to predict it."""

    measured: float
    source: str
    kinds: tuple[str, ...]
    precision: str
    software: str
    devices: int
    machines: int
    host: str | None
    predict: Callable[[Catalog], float]
    weight: float = 1.0
    is_staged: bool = False  # a pipeline of several stages

    def uses(self, units: str, *, convolution: bool, family: str | None = None) -> bool:
        """Whether units of a family compute its convolutions, or its products."""
        devices = [shipped().device(kind) for kind in self.kinds]
        return any(
            units_of(device, self.precision, convolution) == units and family in (None, device.family.name)
            for device in devices
        )

    def is_of(self, family: str) -> bool:
        return any(shipped().device(kind).family.name == family for kind in self.kinds)


def _is_on(o: Observation, host: str) -> bool:
    return o.host == host


def _loses(o: Observation, name: str) -> bool:
    return o.devices > 1 and _LOSSES[name][1](o)


def _observe_row(reading: Reading) -> Observation:
    row = reading.row
    return Observation(
        row.images_per_second,
        row.source,
        reading.kinds,
        reading.precision,
        reading.software,
        row.gpus,
        row.nodes,
        reading.host if reading.is_staged else None,
        lambda catalog: row_rate(reading, catalog),
        weight=0.2 if "not stated" in row.precision else 1.0,
    )


def _observe_run(run: PublishedRun) -> Observation:
    devices, machines, kinds, staged = run_kinds(run)
    return Observation(
        float(run.rate or 0),
        run.source,
        kinds,
        run.precision,
        run.software,
        devices,
        machines,
        f"cluster {run.cluster}" if staged else None,
        lambda catalog: predict_run(run, catalog).images_per_second,
        weight=0.4 if run.cluster == "h200-1" else 1.0,  # three models of one card, which eager launches slow down
        is_staged=run.placement is not None,
    )


@cache
def readings() -> tuple[Reading, ...]:
    """The known rows that can be read."""
    return tuple(reading for row in known_rows() if isinstance(reading := read_row(row, shipped()), Reading))


def observations(sources: set[str] | None = None) -> list[Observation]:
    """What there is to fit: rows of some sources (None: of all), and the published runs that are of no other source."""
    rows = [_observe_row(reading) for reading in readings() if sources is None or reading.row.source in sources]
    of_rows = {row.source for row in known_rows()}
    wanted = [run for run in published_runs() if run.rate is not None]
    return rows + [
        _observe_run(run) for run in wanted if sources is None or run.source in sources or run.source not in of_rows
    ]


# --- The free figures -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """One free figure: its place in the catalog, the mean and spread of its prior, and what it changes."""

    path: tuple[str, ...]
    prior: float
    spread: float  # in logarithms
    touches: Callable[[Observation], bool]


_SHARES = {
    "convolution": {"fp32": (0.9, 0.15), "tf32": (0.32, 0.25), "fp16": (0.75, 0.15)},
    "product": {"fp32": (0.85, 0.2), "tf32": (0.6, 0.2), "fp16": (0.75, 0.2)},
}


def parameters(observed: Sequence[Observation]) -> list[Parameter]:
    """The figures that the observations may move, and those that only have a prior."""
    found = []
    for kind, known in _SHARES.items():
        for units, (mean, spread) in known.items():
            uses = partial(Observation.uses, units=units, convolution=kind == "convolution")
            found.append(Parameter(("kernels", kind, units), mean, spread, uses))
            for family in _FAMILIES:
                prior = _KEPLER if family == "kepler" else 1.0
                found.append(Parameter(("family", family, kind, units), prior, 0.1, partial(uses, family=family)))
    found.append(Parameter(("kernels", "memory"), 0.72, 0.1, lambda o: True))
    found.append(Parameter(("kernels", "grouped"), 0.2, 0.4, lambda o: o.uses("fp32", convolution=True)))
    found.append(Parameter(("kernels", "slope"), 0.3, 0.4, lambda o: o.precision not in ("fp64", "ieee")))
    for family in _FAMILIES:
        path = ("family", family, "memory")
        found.append(Parameter(path, _MEMORY_PRIORS.get(family, 1.0), 0.08, partial(Observation.is_of, family=family)))
    for name, (mean, _) in _LOSSES.items():
        found.append(Parameter(("shared", name), mean, 0.8, partial(_loses, name=name)))
    for software in _SOFTWARE:
        found += _of_software(software)
    for host in sorted({o.host for o in observed if o.host is not None}):
        found.append(Parameter(("hosts", host), *HOST_PRIOR, partial(_is_on, host=host)))
    found.append(Parameter(("link", "host-copy", "bandwidth"), 1.5e9, 0.5, lambda o: o.is_staged))
    found.append(Parameter(("loader", "decode"), 566.0, 0.2, lambda o: o.software in ("oneflow", "pipedream")))
    return found


def _of_software(software: str) -> list[Parameter]:
    def parameter(name: str, prior: float, spread: float, applies: Callable[[Observation], bool]) -> Parameter:
        path = ("software", software, name)
        return Parameter(path, prior, spread, lambda o: o.software == software and applies(o))

    found = [parameter("overhead", 3e-3 if software == "tensorflow" else 1e-3, 0.5, lambda o: True)]
    for name in _LOSSES:  # times what all of them lose
        found.append(parameter(name, 1.0, 0.5, partial(_loses, name=name)))
    if software != _REFERENCE:
        prior, spread = (0.8, 0.3) if software == "pipedream" else (1.0, 0.1)
        found.append(parameter("efficiency", prior, spread, lambda o: True))
    if software == "pipedream":
        found.append(parameter("parallel_efficiency", 0.8, 0.3, lambda o: not o.is_staged))
    return found


def overrides(known: Sequence[Parameter], logs: Sequence[float]) -> dict[str, Any]:
    """The parameters' values, given as logarithms, as tables of the catalog."""
    tables: dict[str, Any] = {}
    for parameter, log in zip(known, logs, strict=True):
        table = tables
        for key in parameter.path[:-1]:
            table = table.setdefault(key, {})
        table[parameter.path[-1]] = math.exp(log)
    shared = tables.pop("shared", {})
    for table in tables.get("software", {}).values():
        for name in shared.keys() & table.keys():
            table[name] *= shared[name]
    own = tables.setdefault("software", {})
    own["stagewright"] = {name: value for name, value in own.get(_REFERENCE, {}).items() if name != "efficiency"}
    return tables


def make_catalog(known: Sequence[Parameter], logs: Array) -> Catalog:
    """The shipped catalog with these figures, and of hosts only those that were fitted."""
    tables = overrides(known, list(logs))
    hosts = tables.pop("hosts", {})
    return read_catalog((), tables, replaced={"hosts": hosts})


@dataclass(frozen=True, slots=True)
class Fit:
    """The figures that predict the observations best."""

    known: tuple[Parameter, ...]
    logs: Array
    catalog: Catalog

    @property
    def figures(self) -> Mapping[str, float]:
        """Every figure by its place in the catalog."""
        return {".".join(one.path): math.exp(log) for one, log in zip(self.known, self.logs, strict=True)}


def fit(observed: Sequence[Observation], voice: Voice = SILENT) -> Fit:
    """Fit the figures by Gauss-Newton from their priors.

    Rows of one source share what nobody wrote down, so each source counts as the root of its rows; a row that is far
    off counts less.
    """
    known = parameters(observed)
    prior = np.array([math.log(parameter.prior) for parameter in known])
    spread = np.array([parameter.spread for parameter in known])
    counts = Counter(o.source for o in observed)
    weights = np.array([3 * o.weight / math.sqrt(counts[o.source]) for o in observed])
    touched = [[index for index, o in enumerate(observed) if parameter.touches(o)] for parameter in known]
    moved = [index for index, of in enumerate(touched) if of]
    logs = prior.copy()
    for iteration in range(_ITERATIONS):
        voice.progress(f"fitting {len(moved)} figures to {len(observed)} rates, pass {iteration + 1} of {_ITERATIONS}")
        catalog = make_catalog(known, logs)
        errors = np.array([_error(o, catalog) for o in observed])
        slopes = np.zeros((len(observed), len(moved)))
        for column, index in enumerate(moved):
            tried = logs.copy()
            tried[index] += _STEP
            other = make_catalog(known, tried)
            for row in touched[index]:
                slopes[row, column] = (_error(observed[row], other) - errors[row]) / _STEP
        robust = weights / np.sqrt(np.maximum(1.0, np.abs(errors) / (2 * _SPREAD)))
        rows = np.vstack([slopes * robust[:, None] / _SPREAD, np.diag(1 / spread[moved])])
        wanted = np.concatenate([-errors * robust / _SPREAD, (prior - logs)[moved] / spread[moved]])
        step = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        logs[moved] += np.clip(step, -_MOST_STEP, _MOST_STEP)
    return Fit(tuple(known), logs, make_catalog(known, logs))


def _error(observation: Observation, catalog: Catalog) -> float:
    """Predicted over measured, in logarithms."""
    return math.log(observation.predict(catalog) / observation.measured)


def seen_units(fitted: Sequence[Observation]) -> frozenset[tuple[str, str]]:
    """Cards and their families with the units that fitted rates come from."""
    seen = set()
    for o in fitted:
        for kind in o.kinds:
            device = shipped().device(kind)
            units = units_of(device, o.precision)
            seen |= {(device.name, units), (f"family {device.family.name}", units)}
    return frozenset(seen)


# --- The file ---------------------------------------------------------------------------------------------------------


_HEAD = """\
# The catalog's free figures, written by `python -m benchmarks calibrate`: fitted to the published runs and
# measured rows, from the priors of benchmarks/calibration. A figure that no row depends on keeps its prior.
# errors: what nine of ten held-back rows are within, in logarithms, by class of evidence.

[source.published-fit]
text = "fitted to the published runs and measured rows by `python -m benchmarks calibrate`"
date = "2026-11"
checked = true
measured = "several runs"

[source.data-sheet-host]
text = "estimate: hosts differ by an order of magnitude; an old one with two sockets, and a server of 2022"
date = "2026-11"
checked = false
"""


def calibration_text(whole: Fit, errors: Mapping[Evidence, float], observed: Sequence[Observation]) -> str:
    """The catalog's calibration.toml."""
    tables = overrides(whole.known, list(whole.logs))
    budgets = [*tables.get("hosts", {}).values(), _SLOW_HOST]  # the slow ones publish little
    usual = math.exp(statistics.fmean(math.log(budget) for budget in budgets))
    lines = [
        _HEAD,
        "[host]    # what all copies of a machine through its host get together, where nobody measured it",
        f'budget = [{usual:.4g}, "published-fit"]',
        f'slow = [{_SLOW_HOST:.4g}, "data-sheet-host"]',
        f'fast = [{_FAST_HOST:.4g}, "data-sheet-host"]',
        "",
        "[hosts]",
        *(f"{json.dumps(name)} = {value:.4g}" for name, value in sorted(tables.get("hosts", {}).items())),
        "",
        "[errors]",
        *(f"{json.dumps(str(name))} = {value:.3g}" for name, value in errors.items()),
    ]
    for name in ("kernels", "family", "software", "link", "loader"):
        lines += _section(name, tables[name])
    lines += _section("device", _fitted_devices(observed))
    return "\n".join(lines) + "\n"


def _section(path: str, table: Mapping[str, Any]) -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = ["", f"[{path}]"] if plain or path.startswith("family.") else []
    for key, value in plain.items():
        lines.append(f'{key} = "{value}"' if isinstance(value, str) else f'{key} = [{value:.4g}, "published-fit"]')
    for key in [key for key in table if key not in plain]:
        lines += _section(f"{path}.{key}", table[key])
    return lines


def _fitted_devices(observed: Sequence[Observation]) -> dict[str, Any]:
    devices: dict[str, Any] = {}
    for name, units in sorted(seen_units(observed)):
        if not name.startswith("family "):
            devices.setdefault(name, {"evidence": {}})["evidence"][units] = str(Evidence.FITTED)
    return devices
