"""How sure a comparison of plans is: the interval of every candidate, and whether there is a winner.

Where a cluster's cards copy through a host that nobody measured, every candidate is predicted on a slow and on a fast
host as well. A winner is named only where no other plan is within the interval of its speed, on either host.
Nine of ten errors of held-back rows of a class are within its interval (`cluster/calibration.toml`, errors).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from stagewright.cluster.specs import ALIKE, FITTED, SHEET, Catalog
from stagewright.cluster.topology import Cluster
from stagewright.metrics import format_rate
from stagewright.plan.estimate import Setting
from stagewright.planning.planner import Candidate, Choice
from stagewright.planning.predict import Prediction, predict


class Evidence(StrEnum):
    """Classes of evidence, the best first."""

    MEASURED = "measured here"
    FITTED = FITTED
    FAMILY = ALIKE
    SHEET = SHEET
    HOST = "unknown host"  # the cards copy through a host whose budget nobody measured


_ORDER = list(Evidence)


def worst(classes: list[Evidence]) -> Evidence:
    return max(classes, key=_ORDER.index)


@dataclass(frozen=True, slots=True)
class Interval:
    """The speed of a plan, and the bounds that nine of ten such predictions are within."""

    low: float
    high: float
    slow_host: float | None = None  # the speed on a slow host, where nobody measured it
    fast_host: float | None = None

    def __str__(self) -> str:
        return f"{format_rate(self.low)}-{format_rate(self.high)}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Candidates with their intervals, and those that may be as fast as the best."""

    evidence: Evidence
    spread: float  # in logarithms
    intervals: tuple[Interval, ...]  # in the order of the candidates
    rivals: tuple[Candidate, ...]  # plans within the interval of the best

    @property
    def has_winner(self) -> bool:
        return not self.rivals

    def advice(self, choice: Choice, model: str) -> tuple[str, ...]:
        """If no plan clearly wins: that none does, and what to measure."""
        if self.has_winner:
            return ()
        names = ", ".join(f"{rival.plan.mode} {rival.plan.shape}" for rival in self.rivals[:3])
        best = choice.best.plan
        close = f"no winner: {names} may be as fast as {best.mode} {best.shape} (evidence: {self.evidence})"
        training = f"train the best three: stagewright plan {model} --try 3"
        if self.evidence is Evidence.MEASURED:
            return close, f"to decide, {training}"
        what = "copies through its host (stagewright doctor)" if self.evidence is Evidence.HOST else "the model"
        return close, f"to decide on that machine, measure {what}, or {training}"


def setting_evidence(setting: Setting, *, measured: bool) -> Evidence:
    """What predictions in a setting are based on: its cards, and its hosts where copies cross them."""
    if measured:
        return Evidence.MEASURED
    hosts = [Evidence.HOST] if _has_unknown_host(setting.cluster) else []
    return worst([_of_cards(setting, {machine.kind for machine in setting.cluster.machines}), *hosts])


def _of_cards(setting: Setting, kinds: Iterable[str]) -> Evidence:
    """What the speed of some kinds of cards is based on, by the shipped calibration."""
    return worst([Evidence(setting.devices(kind).basis(setting.precision)) for kind in kinds])


def _has_unknown_host(cluster: Cluster) -> bool:
    return any(machine.copies_through_host and not machine.knows_host for machine in cluster.machines)


def interval(prediction: Prediction, setting: Setting, catalog: Catalog, *, measured: bool) -> Interval:
    """The interval of one prediction."""
    rate = prediction.images_per_second
    if measured:
        return Interval(*bounds(rate, rate, catalog.errors[Evidence.MEASURED]))
    kinds = {setting.cluster.kind_of(device) for device in prediction.plan.devices}
    spread = catalog.errors[_of_cards(setting, kinds)]
    if not _has_unknown_host(setting.cluster) or prediction.plan.world == 1:
        return Interval(*bounds(rate, rate, spread))
    slow, fast = (
        predict(prediction.plan, replace(setting, cluster=_with_host(setting.cluster, budget))).images_per_second
        for budget in (catalog.host.slow, catalog.host.fast)
    )
    return Interval(*bounds(min(slow, rate), max(fast, rate), spread), slow, fast)


def compare(choice: Choice, setting: Setting, catalog: Catalog, *, measured: bool) -> Comparison:
    """The intervals of all candidates, and which of them may be as fast as the best."""
    evidence = setting_evidence(setting, measured=measured)
    intervals = tuple(interval(c.prediction, setting, catalog, measured=measured) for c in choice.candidates)
    kinds = {machine.kind for machine in setting.cluster.machines}
    spread = catalog.errors[_of_cards(setting, kinds) if evidence is Evidence.HOST else evidence]
    best = choice.best
    close = {id(candidate) for candidate in choice.within(spread)}
    mine = intervals[choice.candidates.index(best)]
    rivals = []
    for candidate, own in zip(choice.candidates, intervals, strict=True):
        faster_somewhere = any(
            other is not None and me is not None and other > me
            for me, other in ((mine.slow_host, own.slow_host), (mine.fast_host, own.fast_host))
        )
        if candidate is not best and (id(candidate) in close or faster_somewhere):
            rivals.append(candidate)
    return Comparison(evidence, spread, intervals, tuple(rivals))


def _with_host(cluster: Cluster, budget: float) -> Cluster:
    """The cluster with the budget of every host that nobody measured."""
    machines = tuple(machine if machine.knows_host else replace(machine, host=budget) for machine in cluster.machines)
    return replace(cluster, machines=machines)


def bounds(low: float, high: float, spread: float) -> tuple[float, float]:
    """The bounds that nine of ten rates are within, where the rate itself may be from `low` to `high`."""
    return low * math.exp(-spread), high * math.exp(spread)
