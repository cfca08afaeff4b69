"""How far the calibration is off: half of the sources predicted by a fit to the other half.

`predict_rows` puts rows beside their predictions, `evaluate` makes a `Split` of them, and `class_errors` makes of such
errors the intervals of every prediction. `staged_pairs` compares stages with data parallel.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from benchmarks.calibration.calibrate import HOST_PRIOR, Observation, fit, observations, seen_units, units_of
from benchmarks.calibration.published import predict_run, published_pairs
from benchmarks.calibration.reading import Reading, Unknown, read_row, row_rate
from benchmarks.calibration.rows import SPLITS, known_rows, split_by_source
from stagewright.cluster.specs import Catalog
from stagewright.hardware.rows import Row
from stagewright.planning.compare import Evidence, bounds, worst
from stagewright.voice import SILENT, Voice

_GIVEN_SPREAD = 0.25  # of the one row that tells a host's budget, in logarithms: its compute is off as well
_COVERAGE = 0.9  # of the intervals
_SHEET_ERROR = 0.35  # at least, of a card that is known by its data sheet: too few families were ever held back
MEASURED_ERROR = 0.1  # of a profile that was measured on the machine itself (`own`)


# --- Hosts that no fit has seen ---------------------------------------------------------------------------------------


def telling_rows(rows: Sequence[Reading], catalog: Catalog) -> list[Reading]:
    """Of every machine with an unknown host budget, the row that copies most for its compute."""
    hosts: dict[str, list[Reading]] = {}
    for reading in rows:
        if reading.is_staged and reading.host not in catalog.hosts:
            hosts.setdefault(reading.host, []).append(reading)
    return [max(found, key=_copied) for found in hosts.values()]


def _copied(reading: Reading) -> float:
    row = reading.row
    return (row.gpus - 1) * float(reading.columns.parameters.sum()) / row.batch_per_gpu


def with_hosts(catalog: Catalog, given: Sequence[Reading]) -> Catalog:
    """The catalog with the budget of every given row's host: the one that its rate and the prior make most likely."""
    hosts = dict(catalog.hosts)
    usual, spread = catalog.host.budget, HOST_PRIOR[1]
    for reading in given:

        def cost(log: float, reading: Reading = reading) -> float:
            tried = replace(catalog, hosts={**hosts, reading.host: math.exp(log)})
            error = math.log(row_rate(reading, tried) / reading.row.images_per_second)
            return (error / _GIVEN_SPREAD) ** 2 + ((log - math.log(usual)) / spread) ** 2

        logs = np.linspace(math.log(usual / 30), math.log(usual * 5), 120)
        hosts[reading.host] = math.exp(min(logs, key=cost))
    return replace(catalog, hosts=hosts)


def card_evidence(reading: Reading, catalog: Catalog, seen: frozenset[tuple[str, str]]) -> Evidence:
    """What the speed of a row's cards is based on, given the cards and families that were fitted."""
    found = []
    for kind in reading.kinds:
        device = catalog.device(kind)
        units = units_of(device, reading.precision)
        is_family = (f"family {device.family.name}", units) in seen
        other = Evidence.FAMILY if is_family else Evidence.SHEET
        found.append(Evidence.FITTED if (device.name, units) in seen else other)
    return worst(found)


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
    found, unknown, seen = list[PredictedRow](), list[Unknown](), seen_units(fitted)
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
        """The median error of all rows, or of those of a software; 0 where there is none."""
        errors = [abs(row.error) for row in self.counted if software in (None, row.software)]
        return statistics.median(errors) if errors else 0.0

    @property
    def worst_direct(self) -> float:
        """The worst error of one card, and of machines whose cards are joined by NVLink."""
        return _worst(row.error for row in self.counted if _is_direct(row.row))

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


def _is_direct(row: Row) -> bool:
    return row.nodes == 1 and (row.gpus == 1 or "nv" in row.link.lower())


def _worst(errors: Iterable[float]) -> float:
    return max((abs(error) for error in errors), default=0.0)


def evaluate(seed: int, voice: Voice = SILENT) -> Split:
    """Fit one half of the sources, predict the other; one row of every unknown host tells its budget."""
    fitted, held = split_by_source(known_rows(), seed)
    observed = observations({row.source for row in fitted})
    voice.progress(f"split {seed}: fitting {len(observed)} rates")
    catalog = fit(observed).catalog
    read = [reading for row in held if isinstance(reading := read_row(row, catalog), Reading)]
    given = telling_rows(read, catalog)
    told, blind = (predict_rows(held, known, observed)[0] for known in (with_hosts(catalog, given), catalog))
    staged = frozenset(reading.row for reading in read if reading.is_staged)
    unknown = tuple(row for row in blind if row.evidence is Evidence.HOST)
    return Split(seed, len(observed), tuple(told), frozenset(reading.row for reading in given), staged, unknown)


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


def all_splits(voice: Voice = SILENT) -> list[Split]:
    """The splits that the law was judged by while it was made, and as many others: intervals are of all of them."""
    return [evaluate(seed, voice) for seed in range(2 * SPLITS)]


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


def staged_pairs(voice: Voice = SILENT) -> list[Pair]:
    """Every published pair; the staged run of a pair is left out of the fit that predicts it."""
    found = []
    everything = observations()
    for staged, parallel, ratio in published_pairs():
        voice.progress(f"leaving out {staged}")
        rate = staged.rate
        left = [o for o in everything if not (o.is_staged and rate is not None and o.measured == rate)]
        catalog = fit(left).catalog if len(left) < len(everything) else _whole_catalog()
        rates = [predict_run(run, catalog).images_per_second for run in (staged, parallel)]
        found.append(Pair(str(staged), rates[0] / rates[1], ratio))
    return found


@cache
def _whole_catalog() -> Catalog:
    return fit(observations()).catalog
