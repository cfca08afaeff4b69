"""The calibration: the catalog's free figures, fitted to measured rows and published runs, and how far it is off.

Every figure has a prior and moves only as far as the evidence requires. What kernels reach is a share of the data
sheet's peak by kind of kernel, times a factor for the chip family; a software has an efficiency, an overhead and what
it loses by scaling; a machine whose cards copy through the host has a budget. `evaluate` fits one half of the sources
and predicts the other, and `class_errors` makes of such errors the intervals of every prediction.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from benchmarks.calibration.published import PublishedRun, predict_run, published_pairs, published_runs, run_kinds
from benchmarks.calibration.reading import Reading, Unknown, read_row, row_rate
from benchmarks.calibration.rows import SPLITS, known_rows, split_by_source
from stagewright.cluster.catalog import read_catalog, shipped
from stagewright.cluster.specs import HALF, Catalog
from stagewright.hardware.rows import Row
from stagewright.planning.compare import Evidence, bounds, worst

Array = Any  # a numpy array
Progress = Callable[[str], None]
_SPREAD = 0.06  # the error to expect of such a law for one row, in logarithms
_GIVEN_SPREAD = 0.25  # the same, of the one row that tells a host's budget, whose compute is off as well
_STEP = 0.02  # for slopes by finite differences, in logarithms
_ITERATIONS = 5
_MOST_STEP = 0.7
_COVERAGE = 0.9  # of the intervals
_SHEET_ERROR = 0.35  # at least, of a card that is known by its data sheet: too few families were ever held back
_REFERENCE = "pytorch"  # the software that the shares of kernels are stated for
_HOST_PRIOR = (16e9, 0.5)
_SLOW_HOST, _FAST_HOST = 2.5e9, 30e9
MEASURED_ERROR = 0.1  # of a profile that was measured on the machine itself (`bench own`)
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


def card_evidence(reading: Reading, catalog: Catalog, seen: frozenset[tuple[str, str]]) -> Evidence:
    """What the speed of a row's cards is based on, given the cards and families that were fitted."""
    found = []
    for kind in reading.kinds:
        device = catalog.device(kind)
        units = device.units(reading.precision, convolution=True)
        units = "fp16" if units in HALF else units
        is_family = (f"family {device.family.name}", units) in seen
        found.append(
            Evidence.FITTED if (device.name, units) in seen else Evidence.FAMILY if is_family else Evidence.SHEET
        )
    return worst(found)


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
        for kind in self.kinds:
            device = shipped().device(kind)
            own = device.units(self.precision, convolution=convolution)
            own = "fp16" if own in HALF else own
            if own == units and family in (None, device.family.name):
                return True
        return False


def _is_of(o: Observation, family: str) -> bool:
    return any(shipped().device(kind).family.name == family for kind in o.kinds)


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
        found.append(Parameter(path, _MEMORY_PRIORS.get(family, 1.0), 0.08, partial(_is_of, family=family)))
    for name, (mean, _) in _LOSSES.items():
        found.append(Parameter(("shared", name), mean, 0.8, partial(_loses, name=name)))
    for software in _SOFTWARE:
        found += _of_software(software)
    for host in sorted({o.host for o in observed if o.host is not None}):
        found.append(Parameter(("hosts", host), *_HOST_PRIOR, partial(_is_on, host=host)))
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
        pairs = zip(self.known, self.logs, strict=True)
        return {".".join(parameter.path): math.exp(log) for parameter, log in pairs}


def fit(observed: Sequence[Observation], progress: Progress = lambda text: None) -> Fit:
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
        progress(f"fitting {len(moved)} figures to {len(observed)} rates, pass {iteration + 1} of {_ITERATIONS}")
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


# --- Hosts that no fit has seen ---------------------------------------------------------------------------------------


def telling_rows(rows: Sequence[Reading], catalog: Catalog) -> list[Reading]:
    """Of every machine with an unknown host budget, the row that copies most for its compute."""
    hosts: dict[str, Reading] = {}
    for reading in rows:
        if reading.is_staged and reading.host not in catalog.hosts:
            best = hosts.get(reading.host)
            if best is None or _copied(reading) > _copied(best):
                hosts[reading.host] = reading
    return list(hosts.values())


def _copied(reading: Reading) -> float:
    row = reading.row
    return (row.gpus - 1) * float(reading.columns.parameters.sum()) / row.batch_per_gpu


def with_hosts(catalog: Catalog, given: Sequence[Reading]) -> Catalog:
    """The catalog with the budget of every given row's host: the one that its rate and the prior make most likely."""
    hosts = dict(catalog.hosts)
    usual, spread = catalog.host.budget, _HOST_PRIOR[1]
    for reading in given:

        def cost(log: float, reading: Reading = reading) -> float:
            tried = replace(catalog, hosts={**hosts, reading.host: math.exp(log)})
            error = math.log(row_rate(reading, tried) / reading.row.images_per_second)
            return (error / _GIVEN_SPREAD) ** 2 + ((log - math.log(usual)) / spread) ** 2

        logs = np.linspace(math.log(usual / 30), math.log(usual * 5), 120)
        hosts[reading.host] = math.exp(min(logs, key=cost))
    return replace(catalog, hosts=hosts)


# --- How far the law is off -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PredictedRow:
    """A row beside its prediction."""

    row: Row
    software: str  # as the catalog has it
    predicted: float
    card: Evidence
    by_host: tuple[float, float] | None = None  # on a slow and on a fast host, where nobody measured it

    @property
    def evidence(self) -> Evidence:
        return self.card if self.by_host is None else Evidence.HOST

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.row.images_per_second - 1

    def bounds(self, errors: Mapping[Any, float]) -> tuple[float, float]:
        """The interval that nine of ten such rates are within."""
        low, high = self.by_host or (self.predicted, self.predicted)
        return bounds(low, high, errors[self.card])

    def is_covered(self, errors: Mapping[Any, float]) -> bool:
        low, high = self.bounds(errors)
        return low <= self.row.images_per_second <= high


def predict_rows(
    rows: Sequence[Row], catalog: Catalog, fitted: Sequence[Observation]
) -> tuple[list[PredictedRow], list[Unknown]]:
    """Every row that can be read with its prediction, and those that can't."""
    found: list[PredictedRow] = []
    unknown: list[Unknown] = []
    seen = seen_units(fitted)
    for row in rows:
        reading = read_row(row, catalog)
        if isinstance(reading, Unknown):
            unknown.append(reading)
            continue
        by_host = None
        if reading.is_staged and reading.host not in catalog.hosts:
            budgets = (catalog.host.slow, catalog.host.fast)
            slow, fast = (replace(catalog, hosts={**catalog.hosts, reading.host: budget}) for budget in budgets)
            by_host = (row_rate(reading, slow), row_rate(reading, fast))
        rate, card = row_rate(reading, catalog), card_evidence(reading, catalog, seen)
        found.append(PredictedRow(row, reading.software, rate, card, by_host))
    return found, unknown


def seen_units(fitted: Sequence[Observation]) -> frozenset[tuple[str, str]]:
    """Cards and their families with the units that fitted rates come from."""
    seen = set()
    for o in fitted:
        for kind in o.kinds:
            device = shipped().device(kind)
            units = device.units(o.precision, convolution=True)
            units = "fp16" if units in HALF else units
            seen |= {(device.name, units), (f"family {device.family.name}", units)}
    return frozenset(seen)


@dataclass(frozen=True, slots=True)
class Split:
    """One half of the sources predicted by a fit to the other."""

    seed: int
    fitted: int
    rows: tuple[PredictedRow, ...]
    given: frozenset[Row]  # rows that told a host's budget; they count in no error
    staged: frozenset[Row]  # rows whose gradients are copied through the host
    blind: tuple[PredictedRow, ...]  # those of unknown hosts, predicted without a row that tells its budget

    @property
    def counted(self) -> list[PredictedRow]:
        return [row for row in self.rows if row.row not in self.given]

    def median(self, software: str | None = None) -> float:
        """The median error of all rows, or of those of a software."""
        return _median(row.error for row in self.counted if software in (None, row.software))

    @property
    def worst_direct(self) -> float:
        """The worst error of one card, and of machines whose cards are joined by NVLink."""
        return _worst(row.error for row in self.counted if row.row.nodes == 1 and is_direct(row.row))

    @property
    def worst_given(self) -> float:
        """The worst error on a host that one other row told the budget of; 0 where there is none."""
        hosts = {row.host for row in self.given}
        return _worst(row.error for row in self.counted if row.row in self.staged and row.row.host in hosts)

    def orders(self) -> tuple[int, int]:
        """Of all pairs of rows of one model, how many are predicted in the measured order, and how many there are."""
        right = pairs = 0
        for one, other in itertools.combinations(self.counted, 2):
            if one.row.model == other.row.model and one.row.images_per_second != other.row.images_per_second:
                pairs += 1
                faster = one.row.images_per_second > other.row.images_per_second
                right += (one.predicted > other.predicted) == faster
        return right, pairs


def is_direct(row: Row) -> bool:
    return row.gpus == 1 or "nv" in row.link.lower()


def _median(errors: Iterable[float]) -> float:
    found = [abs(error) for error in errors]
    return statistics.median(found) if found else 0.0


def _worst(errors: Iterable[float]) -> float:
    return max((abs(error) for error in errors), default=0.0)


def evaluate(seed: int, progress: Progress = lambda text: None) -> Split:
    """Fit one half of the sources, predict the other; one row of every unknown host tells its budget."""
    fitted, held = split_by_source(known_rows(), seed)
    observed = observations({row.source for row in fitted})
    progress(f"split {seed}: fitting {len(observed)} rates")
    catalog = fit(observed).catalog
    read = [reading for row in held if isinstance(reading := read_row(row, catalog), Reading)]
    given = telling_rows(read, catalog)
    rows, _ = predict_rows(held, with_hosts(catalog, given), observed)
    blind, _ = predict_rows(held, catalog, observed)
    return Split(
        seed,
        len(observed),
        tuple(rows),
        frozenset(reading.row for reading in given),
        frozenset(reading.row for reading in read if reading.is_staged),
        tuple(row for row in blind if row.evidence is Evidence.HOST),
    )


def class_errors(splits: Sequence[Split]) -> dict[Evidence, float]:
    """What nine of ten errors of held-back rows are within, by what is known of their cards, in logarithms.

    A worse class is never within less; a class without rows takes the next better one's.
    """
    errors = defaultdict(list)
    for split in splits:
        for row in split.counted:
            errors[row.card].append(abs(math.log1p(row.error)))
    found: dict[Evidence, float] = {Evidence.MEASURED: MEASURED_ERROR}
    for evidence in (Evidence.FITTED, Evidence.FAMILY, Evidence.SHEET):
        own = float(np.quantile(errors[evidence], _COVERAGE)) if errors[evidence] else 0.0
        found[evidence] = max(own, *found.values())
    return found | {Evidence.SHEET: max(found[Evidence.SHEET], _SHEET_ERROR)}


def coverage(splits: Sequence[Split]) -> tuple[int, int]:
    """How many held-back rows are within their interval, by the errors of the other splits, and how many there are."""
    inside = rows = 0
    for split in splits:
        errors = class_errors([other for other in splits if other is not split])
        for row in (*split.counted, *split.blind):
            rows += 1
            inside += row.is_covered(errors)
    return inside, rows


def all_splits(progress: Progress = lambda text: None) -> list[Split]:
    """The splits that the law was judged by while it was made, and as many others: intervals are of all of them."""
    return [evaluate(seed, progress) for seed in range(2 * SPLITS)]


# --- Stages against data parallel -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """Stages and plain data parallel of one software on one machine: how many times faster the stages are."""

    name: str
    predicted: float
    measured: float

    @property
    def is_right(self) -> bool:
        return (self.predicted > 1) == (self.measured > 1)


def staged_pairs(progress: Progress = lambda text: None) -> list[Pair]:
    """Every published pair; the staged run of a pair is left out of the fit that predicts it."""
    found = []
    everything = observations()
    for staged, parallel, ratio in published_pairs():
        progress(f"leaving out {staged}")
        rate = staged.rate
        left = [o for o in everything if not (o.is_staged and rate is not None and o.measured == rate)]
        catalog = fit(left).catalog if len(left) < len(everything) else _whole_catalog()
        rates = [predict_run(run, catalog).images_per_second for run in (staged, parallel)]
        found.append(Pair(str(staged), rates[0] / rates[1], ratio))
    return found


@cache
def _whole_catalog() -> Catalog:
    return fit(observations()).catalog


# --- The file ---------------------------------------------------------------------------------------------------------


def calibration_text(whole: Fit, errors: Mapping[Evidence, float], observed: Sequence[Observation]) -> str:
    """The catalog's calibration.toml."""
    tables = overrides(whole.known, list(whole.logs))
    budgets = [*tables.get("hosts", {}).values(), _SLOW_HOST]  # the slow ones publish little
    usual = math.exp(statistics.fmean(math.log(budget) for budget in budgets))
    lines = [
        "# The catalog's free figures, written by `python -m benchmarks calibrate`: fitted to the published runs and",
        "# measured rows, from the priors of benchmarks/calibration. A figure that no row depends on keeps its prior.",
        "# errors: what nine of ten held-back rows are within, in logarithms, by class of evidence.",
        "",
        "[source.published-fit]",
        'text = "fitted to the published runs and measured rows by `python -m benchmarks calibrate`"',
        'date = "2026-11"',
        "checked = true",
        'measured = "several runs"',
        "",
        "[source.data-sheet-host]",
        'text = "estimate: hosts differ by an order of magnitude; an old one with two sockets, and a server of 2022"',
        'date = "2026-11"',
        "checked = false",
        "",
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
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += _section(f"{path}.{key}", value)
    return lines


def _fitted_devices(observed: Sequence[Observation]) -> dict[str, Any]:
    devices: dict[str, Any] = defaultdict(lambda: {"evidence": {}})
    for name, units in sorted(seen_units(observed)):
        if not name.startswith("family "):
            devices[name]["evidence"][units] = str(Evidence.FITTED)
    return dict(devices)
