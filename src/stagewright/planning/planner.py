"""The planner: searches plans, simulates and improves the best of them, and explains why the others are slower.

`choose` does that for `stagewright plan`. The search (`plan.search`) gives first plans by a simple cost model, for
several numbers of microbatches and stages, on all devices and on parts of them. What counts is the simulator: plans are
simulated in the order of their lower bound (`Estimate.floor`), those of other shapes too, and the best are improved by
small changes as long as one is faster: a cut, the microbatches, a device that moves or is left out, two stages that
swap devices or merge. Lag and depth are chosen together, last. Machines are planned in an order of their own, so that
theirs does not matter. `least_lag` also chooses the lag of plans that `build` makes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from stagewright.cluster.placement import Placement, format_placement
from stagewright.cluster.topology import Cluster, Device
from stagewright.errors import UserError, counted, did_you_mean
from stagewright.metrics import MIB
from stagewright.plan.estimate import Estimate, Setting, with_own_ties, with_whole_batches
from stagewright.plan.make import MOST_MICROBATCHES, divisors, make_plan, stale_versions, with_ties
from stagewright.plan.plan import Mode, Plan
from stagewright.plan.search import make_search
from stagewright.plan.search_space import make_blocks
from stagewright.planning.predict import Prediction, predict
from stagewright.planning.simulate import ClusterCosts, steady

BUBBLE_MARGIN = 0.02
_MARGIN = 0.03  # a smaller gain is not worth more stages, lag and memory
_TIE = 0.005
_SMALL, _FEW, _SOME = 10, 32, 160  # devices up to which the planner tries much, less, and little
_MOST_STAGES = 6
_COUNTS = 6  # numbers of microbatches that the search tries
_MOST_SHOWN = 6  # plans of several stages
_MOST_SUBSETS = 40
_FEWER = 0.1  # by how much a part of the devices may be slower to be shown
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried, by the number of devices."""

    seeds: int  # plans of the search that are simulated
    shapes: int  # plans of other shapes that are simulated too
    moves: int  # changes that are simulated
    starts: int  # plans that are improved
    stages: int | None  # most stages; None: whatever is fastest
    counts: int  # numbers of microbatches
    parts: int  # parts of the cluster that get stages

    @staticmethod
    def of(devices: int) -> Effort:
        if devices <= _SMALL:
            return Effort(16, 8, 100, 3, _MOST_STAGES, _COUNTS, 4)
        if devices <= _FEW:
            return Effort(5, 2, 12, 1, 4, 2, 1)
        if devices <= _SOME:
            return Effort(3, 0, 6, 1, None, 2, 1)
        return Effort(1, 0, 0, 0, None, 1, 1)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its prediction, and why it is not the best."""

    prediction: Prediction
    speedup: float  # over plain data parallel on all devices
    why: str

    @property
    def plan(self) -> Plan:
        return self.prediction.plan


@dataclass(frozen=True, slots=True, repr=False)
class Choice:
    """The candidates, fastest first, and the plans that do not fit."""

    candidates: tuple[Candidate, ...]
    refused: tuple[str, ...]
    lags: tuple[Prediction, ...] = ()  # the best plan with no lag, with a lag of one update, and so on
    unprofiled: tuple[int, ...] = ()  # microbatch sizes that were not tried, because the profile does not cover them
    decided: bool = False  # the candidates were trained, and the first is the fastest

    def __repr__(self) -> str:
        best = self.best
        return (
            f"Choice({best.plan.mode} {format_placement(best.plan.placement)}: "
            f"{best.prediction.images_per_second:,.0f} images/s, {best.speedup:.2f} x data parallel; "
            f"{counted(len(self.candidates), 'candidate')})"
        )

    @property
    def fastest(self) -> Candidate:
        return self.candidates[0]

    @property
    def best(self) -> Candidate:
        """The fewest stages within three percent of the fastest: a smaller gain is not worth more lag and memory."""
        if self.decided:
            return self.candidates[0]
        best = _fewest_stages([candidate.prediction for candidate in self.candidates])
        return next(candidate for candidate in self.candidates if candidate.prediction is best)

    @property
    def without_lag(self) -> Candidate | None:
        """The best of those whose weights do not lag, which `train` chooses from by itself."""
        own = tuple(candidate for candidate in self.candidates if candidate.plan.is_synchronous)
        return replace(self, candidates=own, decided=False).best if own else None

    def within(self, spread: float) -> list[Candidate]:
        """The candidates that are slower than the fastest by no more than a spread, in logarithms."""
        least = self.fastest.prediction.images_per_second * math.exp(-spread)
        return [candidate for candidate in self.candidates if candidate.prediction.images_per_second >= least]


def _fewest_stages(predictions: Sequence[Prediction]) -> Prediction:
    """The prediction with the fewest stages, and then the least lag, that is within three percent of the fastest."""
    ordered = sorted(predictions, key=lambda one: -one.images_per_second)
    close = [one for one in ordered if one.images_per_second >= ordered[0].images_per_second / (1 + _MARGIN)]
    return min(close, key=lambda one: (len(one.plan.stages), sum(stage.versions for stage in one.plan.stages)))


def choose(
    setting: Setting,
    batch: int,
    *,
    modes: Sequence[Mode] = (Mode.STALE, Mode.SYNC),
    microbatches: int | None = None,
    staleness: int | None = None,
    whole: bool = False,
    synchronous: bool = False,
    progress: Progress = lambda text: None,
) -> Choice:
    """Search, simulate and improve the most promising plans, and compare them with plain data parallel.

    `whole`: only plans that use every device. `synchronous`: where the weights of the best plan lag, search plans
    without lag by themselves too, so that the best of these is among the candidates.
    """
    devices = len(setting.cluster.devices)
    usual = microbatch_counts(batch, devices) if microbatches is None else [microbatches]
    counts = microbatch_counts(batch, devices, setting.covers) if microbatches is None else usual
    _require_covered(setting, batch, usual, counts)
    order = _canonical(setting.cluster)
    sorted_setting = replace(setting, cluster=_reordered(setting.cluster, order))
    effort = Effort.of(devices)
    pool = _Pool(sorted_setting, batch, tuple(modes), microbatches, staleness, effort, progress, is_whole=whole)
    pool.fill()
    finished = pool.finished()
    if synchronous and finished and not _fewest_stages(finished).plan.is_synchronous:

        def without_lag(text: str) -> None:
            progress(f"without lag: {text}")

        alone = _Pool(sorted_setting, batch, (Mode.SYNC,), microbatches, None, effort, without_lag, is_whole=whole)
        alone.fill()
        if found_alone := alone.finished():
            best_alone = _fewest_stages(found_alone)
            shape = best_alone.plan.mode, best_alone.plan.shape
            finished = [*(one for one in finished if (one.plan.mode, one.plan.shape) != shape), best_alone]
    found = [_renamed(prediction, order) for prediction in finished]
    refused = [_refusal(_renamed_plan(plan, order), setting) for plan in pool.refused()]
    if not found:
        raise UserError(f"nothing fits: {refused[0]}")
    plain = max((p.images_per_second for p in found if p.plan.mode is Mode.DP and p.plan.world == devices), default=0.0)
    found.sort(key=lambda prediction: (-prediction.images_per_second, len(prediction.plan.stages)))
    best = found[0]  # of all; the one to run may be a simpler one close to it
    candidates = tuple(
        Candidate(
            prediction, prediction.images_per_second / plain if plain else float("nan"), _why(prediction, best, setting)
        )
        for prediction in found
    )
    unprofiled = tuple(size for size in _sizes(batch, usual) if not setting.covers(size))
    choice = Choice(candidates, tuple(dict.fromkeys(refused)), unprofiled=unprofiled)
    here = [order.index(number) for number in range(len(order))]
    lags = (pool.predict(lagging) for lagging in _lags(_renamed_plan(choice.best.plan, here)))
    return replace(choice, lags=tuple(_renamed(prediction, order) for prediction in lags))


# --- The order of machines --------------------------------------------------------------------------------------------


def _canonical(cluster: Cluster) -> list[int]:
    """The machines in an order that does not depend on theirs: like machines side by side."""
    return sorted(range(len(cluster.machines)), key=lambda number: repr(cluster.machines[number]))


def _reordered(cluster: Cluster, order: Sequence[int]) -> Cluster:
    return replace(cluster, machines=tuple(cluster.machines[number] for number in order))


def _renamed_plan(plan: Plan, order: Sequence[int]) -> Plan:
    """A plan for reordered machines as a plan for the machines as they are numbered."""
    placement = tuple(
        tuple(Device(order[device.machine], device.index) for device in devices) for devices in plan.placement
    )
    depths = [stage.depth for stage in plan.stages]
    return _remade(plan, placement, versions=[stage.versions for stage in plan.stages], depths=depths)


def _renamed(prediction: Prediction, order: Sequence[int]) -> Prediction:
    if list(order) == list(range(len(order))):
        return prediction
    plan = _renamed_plan(prediction.plan, order)
    old = {Device(order[device.machine], device.index): rank for rank, device in enumerate(prediction.plan.devices)}
    ranks = [old[device] for device in plan.devices]
    return replace(
        prediction,
        plan=plan,
        steady=replace(prediction.steady, busy=tuple(prediction.steady.busy[rank] for rank in ranks)),
        memory=tuple(prediction.memory[rank] for rank in ranks),
        limits=tuple(prediction.limits[rank] for rank in ranks),
    )


def _remade(
    plan: Plan,
    placement: Placement,
    *,
    cuts: Sequence[str] | None = None,
    microbatches: int | None = None,
    versions: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
) -> Plan:
    """The plan with another placement, other cuts or microbatches; versions and depths are the defaults of these."""
    is_stale = plan.mode is Mode.STALE
    lag = min(max(stage.versions for stage in plan.stages) - 1, len(placement) - 1) if is_stale else None
    return make_plan(
        placement,
        batch=plan.batch,
        microbatches=plan.microbatches if microbatches is None else microbatches,
        mode=plan.mode,
        staleness=lag,
        versions=versions if is_stale else None,
        depths=depths,
        cuts=plan.cuts if cuts is None else cuts,
    )


# --- Plans that are tried ---------------------------------------------------------------------------------------------


class _Pool:
    """Every plan that was simulated, each once; plans that can't be faster than the best are not."""

    def __init__(
        self,
        setting: Setting,
        batch: int,
        modes: Sequence[Mode],
        microbatches: int | None,
        staleness: int | None,
        effort: Effort,
        progress: Progress,
        *,
        is_whole: bool = False,
    ) -> None:
        self._is_whole = is_whole
        self._setting = setting
        self._batch = batch
        self._modes = modes
        self._microbatches = microbatches
        self._staleness = staleness
        self._effort = effort
        self._progress = progress
        self._found: dict[Plan, Prediction] = {}
        self._refused: dict[Plan, Estimate] = {}
        self._predicted: dict[Plan, Prediction] = {}
        self._fastest = math.inf  # seconds of a batch
        self._names = [unit.name for unit in setting.tables(setting.cluster.machines[0].kind, self._sample()).units]

    def _sample(self) -> int:
        counts = self._counts(1) or [1]
        return self._batch // counts[0]

    def fill(self) -> None:
        """Try data parallel everywhere, then stages, then changes of the best stages."""
        self._progress("data parallel on all devices and on parts of them")
        parts = self._parallel()
        self._progress("searching stages")
        for number, estimate in enumerate(_varied(self._seeds(parts), self._effort)):
            self._progress(f"simulating {estimate.plan.mode} {estimate.plan.shape} ({number + 1})")
            self._try(estimate)
        self._improve()

    # --- Data parallel ---

    def _parallel(self) -> list[tuple[Device, ...]]:
        """Data parallel on every part at every number of microbatches; the parts, the fastest first."""
        rates = []
        everything = self._setting.cluster.devices
        for part in [everything] if self._is_whole else _parts(self._setting.cluster):
            best = 0.0
            for count in self._counts(len(part)):
                plan = make_plan((part,), batch=self._batch, microbatches=count, mode=Mode.DP)
                prediction = self._try(Estimate(plan, self._setting), always=True)
                best = max(best, prediction.images_per_second if prediction else 0.0)
            rates.append((best, part))
        others = [part for _, part in sorted(rates, key=lambda rate: (-rate[0], -len(rate[1]))) if part != everything]
        return [everything, *others]

    def _counts(self, replicas: int) -> list[int]:
        """Numbers of microbatches for so many replicas: every divisor of the batch from one a replica on."""
        if self._microbatches is not None:
            return [self._microbatches]
        covered = self._covered()
        enough = [count for count in covered if count >= replicas]
        return enough[:12] or covered[-1:]

    def _covered(self) -> list[int]:
        possible = (count for count in divisors(self._batch) if count <= MOST_MICROBATCHES)
        return [count for count in possible if self._setting.covers(self._batch // count)]

    # --- Stages ---

    def _seeds(self, parts: Sequence[tuple[Device, ...]]) -> Iterator[Estimate]:
        """The search's best plan of every mode, number of microbatches and number of stages."""
        seen = set()
        for part in parts[: self._effort.parts]:
            if len(part) < 2:
                continue
            for order in _orders(self._setting.cluster, part, self._effort):
                for plan in self._searched(order):
                    if plan not in seen:
                        seen.add(plan)
                        yield self._estimate(plan)

    def _searched(self, order: _Part) -> Iterator[Plan]:
        setting = replace(self._setting, cluster=order.cluster)
        devices = len(order.cluster.devices)
        counts = [self._microbatches]
        if self._microbatches is None:
            counts = list(microbatch_counts(self._batch, devices, setting.covers, self._effort.counts))
        blocks = make_blocks(order.cluster, sorted({machine.kind for machine in order.cluster.machines}))
        for mode, count in itertools.product(self._modes, counts):
            assert count is not None
            search = make_search(setting, mode, self._batch, count, staleness=self._staleness, quick=True)
            most = self._effort.stages
            numbers = [None] if most is None else range(2, min(most, devices, len(self._names)) + 1)
            for number in numbers:
                found = search.best(number)
                if found is None or len(found.sizes) < 2:
                    continue
                placement = order.restore(found.placement(blocks))
                cuts = tuple(self._names[bound] for bound in found.bounds[1:-1])
                lag = self._staleness if mode is Mode.STALE else None
                yield make_plan(placement, batch=self._batch, microbatches=count, mode=mode, staleness=lag, cuts=cuts)

    # --- Changes ---

    def _improve(self) -> None:
        """Change the best plans as long as a change is faster."""
        tried: set[Plan] = set()
        total = self._effort.moves
        starts = self._starts()
        for number, start in enumerate(starts):
            left = total // (len(starts) - number)  # what one start leaves the next ones have
            total -= left
            current = start
            while left > 0:
                neighbours = [plan for plan in dict.fromkeys(self._neighbours(current.plan)) if plan not in tried]
                tried |= set(neighbours)
                estimates = [self._estimate(plan) for plan in neighbours]
                better = current
                for estimate in sorted(estimates, key=lambda estimate: estimate.floor):
                    if left <= 0 or estimate.floor >= better.steady.batch_seconds:
                        break
                    left -= 1
                    prediction = self._try(estimate, against=better.steady.batch_seconds)
                    if prediction and prediction.steady.batch_seconds < better.steady.batch_seconds * (1 - 1e-4):
                        better = prediction
                if better is current:
                    break
                self._progress(f"improving {better.plan.mode} {better.plan.shape}: {better.images_per_second:,.0f}")
                current = better
            total += left

    def _starts(self) -> list[Prediction]:
        """The fastest plans of different shapes, then those of other numbers of microbatches."""
        shapes: dict[object, Prediction] = {}
        others: dict[object, Prediction] = {}
        for prediction in sorted(self._found.values(), key=lambda found: found.steady.batch_seconds):
            plan = prediction.plan
            if len(plan.stages) > 1 and shapes.setdefault((plan.mode, plan.shape), prediction) is not prediction:
                others.setdefault((plan.mode, plan.shape, plan.microbatches), prediction)
        return list(shapes.values())[: self._effort.starts] + list(others.values())[: self._effort.starts // 2]

    def _neighbours(self, plan: Plan) -> Iterator[Plan]:
        """Every small change of a plan."""
        everything = len(self._setting.cluster.devices)
        return (changed for changed in self._changes(plan) if not self._is_whole or changed.world == everything)

    def _changes(self, plan: Plan) -> Iterator[Plan]:
        placement, cuts = [list(devices) for devices in plan.placement], list(plan.cuts)
        widest = max(len(devices) for devices in placement)
        counts = [plan.microbatches, *(self._near_counts(plan, widest) if self._microbatches is None else ())]
        for moved, count in itertools.product([cuts, *self._moved_cuts(cuts)], counts):  # the best cut differs with M
            if moved != cuts or count != plan.microbatches:
                yield _remade(plan, plan.placement, cuts=moved, microbatches=count)
        for one, other in itertools.pairwise(range(len(placement))):
            for source, target, position in ((one, other, -1), (other, one, 0)):
                if len(placement[source]) > 1:  # its nearest device moves over
                    changed = [list(devices) for devices in placement]
                    changed[target].insert(0 if position else len(changed[target]), changed[source].pop(position))
                    yield self._placed(plan, changed, cuts)
            swapped = [list(devices) for devices in placement]
            swapped[one], swapped[other] = swapped[other], swapped[one]
            yield self._placed(plan, swapped, cuts)
            yield from self._exchanged(plan, placement, one, other, cuts)
            if len(placement) > 2:
                merged = [*placement[:one], placement[one] + placement[other], *placement[other + 1 :]]
                yield self._placed(plan, merged, [*cuts[:one], *cuts[one + 1 :]])
        for index, devices in enumerate(placement):
            if len(devices) > 1:
                for leaving in {self._setting.cluster.kind_of(device): device for device in devices}.values():
                    fewer = [list(kept) for kept in placement]
                    fewer[index].remove(leaving)
                    yield self._placed(plan, fewer, cuts)
        used = {device for devices in placement for device in devices}
        spare = [device for device in self._setting.cluster.devices if device not in used][:1]
        for device, index in itertools.product(spare, range(len(placement))):
            more = [list(kept) for kept in placement]
            more[index].append(device)
            yield self._placed(plan, more, cuts)

    def _moved_cuts(self, cuts: Sequence[str]) -> Iterator[list[str]]:
        """The cuts with one of them moved by a few units."""
        bounds = [self._names.index(cut) for cut in cuts]
        for index, bound in enumerate(bounds):
            low = bounds[index - 1] if index else 0
            high = bounds[index + 1] if index + 1 < len(bounds) else len(self._names)
            for step in (-4, -3, -2, -1, 1, 2, 3, 4):
                if low < bound + step < high:
                    yield [*cuts[:index], self._names[bound + step], *cuts[index + 1 :]]

    def _exchanged(
        self, plan: Plan, placement: Sequence[list[Device]], one: int, other: int, cuts: Sequence[str]
    ) -> Iterator[Plan]:
        """Two devices of different kinds that change places between neighbouring stages."""
        kind_of = self._setting.cluster.kind_of
        first = {kind_of(device): index for index, device in enumerate(placement[one])}
        second = {kind_of(device): index for index, device in enumerate(placement[other])}
        for kind, here in first.items():
            for other_kind, there in second.items():
                if kind != other_kind:
                    changed = [list(devices) for devices in placement]
                    changed[one][here], changed[other][there] = changed[other][there], changed[one][here]
                    yield self._placed(plan, changed, cuts)

    def _placed(self, plan: Plan, placement: Sequence[Sequence[Device]], cuts: Sequence[str]) -> Plan:
        return _remade(plan, tuple(tuple(devices) for devices in placement), cuts=cuts)

    def _near_counts(self, plan: Plan, replicas: int) -> list[int]:
        known = [
            count for count in self._covered() if replicas <= count <= 16 * plan.world or count == plan.microbatches
        ]
        if plan.microbatches not in known:
            return []
        at = known.index(plan.microbatches)
        return known[max(0, at - 2) : at] + known[at + 1 : at + 3]

    # --- One plan ---

    def _estimate(self, plan: Plan) -> Estimate:
        """A plan's estimate with its ties where its mode can have them: they raise versions, which lowers the bound."""
        plan = with_whole_batches(plan, self._setting.software)
        try:
            return Estimate(with_own_ties(plan, self._setting), self._setting)
        except UserError:
            return Estimate(plan, self._setting)

    def _try(self, estimate: Estimate, *, always: bool = False, against: float | None = None) -> Prediction | None:
        """Simulate a plan that fits, unless its lower bound is above what it has to beat."""
        plan = estimate.plan
        if plan in self._found:
            return self._found[plan]
        try:
            tied = with_own_ties(plan, self._setting)
        except UserError:  # a mode that can't have these ties
            return None
        if tied is not plan:
            estimate = Estimate(tied, self._setting)
        if not estimate.fits:
            self._refused[plan] = estimate
            return None
        limit = self._fastest if against is None else against
        if not always and estimate.floor > limit * (1 + _MARGIN):
            return None
        prediction = self.predict(plan)
        self._found[plan] = prediction
        self._fastest = min(self._fastest, prediction.steady.batch_seconds)
        return prediction

    def predict(self, plan: Plan) -> Prediction:
        """Simulate a plan, once."""
        if plan not in self._predicted:
            self._predicted[plan] = predict(plan, self._setting)
        return self._predicted[plan]

    def finished(self) -> list[Prediction]:
        """The fastest plan of every mode and shape, with the least lag and depth that it needs."""
        kept: dict[object, Prediction] = {}
        for prediction in sorted(self._found.values(), key=lambda found: found.steady.batch_seconds):
            plan = prediction.plan
            kept.setdefault((plan.mode, plan.shape), prediction)
        devices = self._setting.cluster.devices
        parallel = [p for p in kept.values() if p.plan.mode is Mode.DP]
        whole = next((p for p in parallel if p.plan.devices == devices), None)
        fewer = [p for p in parallel if p is not whole][:1]  # the fastest on a part, if all are hardly faster
        if whole is not None and fewer:
            fewer = [p for p in fewer if p.images_per_second > (1 - _FEWER) * whole.images_per_second]
        staged = [p for p in kept.values() if p.plan.mode is not Mode.DP][:_MOST_SHOWN]
        shown = sorted([*staged, *fewer, *filter(None, [whole])], key=lambda found: found.steady.batch_seconds)
        few = 3 if self._effort.stages == _MOST_STAGES else 1
        done = [self._with_least_lag(p) if index < few else p for index, p in enumerate(shown)]
        distinct = {
            (p.plan.mode, p.plan.placement, p.plan.cuts, tuple(s.versions for s in p.plan.stages)): p for p in done
        }
        return list(distinct.values())

    def _with_least_lag(self, prediction: Prediction) -> Prediction:
        """The prediction with the least lag, at its best depth, that is within two points of the fullest lag's."""
        plan = prediction.plan
        if len(plan.stages) == 1 or plan.mode is Mode.PIPEDREAM:
            return prediction
        if plan.mode is not Mode.STALE or self._staleness is not None:
            return self._deepest(plan)
        *lesser, fullest = (self._deepest(lagging) for lagging in every_lag(plan))
        wanted = fullest.steady.bubble + BUBBLE_MARGIN
        found = next((p for p in lesser if p.steady.bubble <= wanted and p.fits), fullest)
        if all(stage.versions == 1 for stage in found.plan.stages):  # that is a synchronous plan
            depths = [stage.depth for stage in found.plan.stages]
            placement = found.plan.placement
            plan = make_plan(
                placement,
                batch=plan.batch,
                microbatches=plan.microbatches,
                mode=Mode.SYNC,
                depths=depths,
                cuts=plan.cuts,
            )
            found = self.predict(plan)
        return found if found.fits else prediction

    def _deepest(self, plan: Plan) -> Prediction:
        return choose_depth(plan, self.predict) if self._effort.stages == _MOST_STAGES else self.predict(plan)

    def refused(self) -> list[Plan]:
        """Plans that do not fit: of data parallel on all devices the one that needs least, and of stages the first."""
        found = []
        everything = self._setting.cluster.devices
        parallel = [plan for plan in self._refused if plan.mode is Mode.DP and plan.devices == everything]
        fitted = any(plan.mode is Mode.DP and plan.devices == everything for plan in self._found)
        if parallel and not fitted:
            found.append(parallel[-1])
        if not self._found:
            found += [plan for plan in self._refused if plan not in found][:1]
        return found


def _varied(seeds: Iterable[Estimate], effort: Effort) -> list[Estimate]:
    """The plans with the least lower bounds, and behind them the best of other modes and shapes.

    Orders of machines and numbers of microbatches give many plans of one shape with almost the same bound.
    """
    ordered = sorted(seeds, key=lambda estimate: estimate.floor)
    least = ordered[: effort.seeds]
    seen = {(estimate.plan.mode, estimate.plan.shape) for estimate in least}
    others: dict[object, Estimate] = {}
    for estimate in ordered[effort.seeds :]:
        kind = (estimate.plan.mode, estimate.plan.shape)
        if kind not in seen:
            others.setdefault(kind, estimate)
    return [*least, *list(others.values())[: effort.shapes]]


@dataclass(frozen=True)
class _Part:
    """Some devices of a cluster as a cluster of their own, with the devices they are."""

    cluster: Cluster
    devices: tuple[Device, ...]  # of the whole cluster, in the order of this one's

    def restore(self, placement: Placement) -> Placement:
        names = dict(zip(self.cluster.devices, self.devices, strict=True))
        return tuple(tuple(names[device] for device in devices) for devices in placement)


def _orders(cluster: Cluster, devices: Sequence[Device], effort: Effort) -> Iterator[_Part]:
    """A part of a cluster with its kinds of machines in several orders."""
    numbers = list(dict.fromkeys(device.machine for device in devices))
    groups = [list(group) for _, group in itertools.groupby(numbers, key=lambda number: cluster.machines[number])]
    orders = itertools.islice(itertools.permutations(groups), 6 if effort.stages else 2)
    for order in orders:
        machines, own = [], []
        for number in itertools.chain(*order):
            indices = [device.index for device in devices if device.machine == number]
            machines.append(cluster.machines[number].first(len(indices)))
            own += [Device(number, index) for index in indices]
        yield _Part(replace(cluster, machines=tuple(machines)), tuple(own))


def _parts(cluster: Cluster) -> list[tuple[Device, ...]]:
    """Parts of a cluster that may be as fast as all of it: first devices of some machines, the largest parts first.

    Like machines are interchangeable, and so are the devices of a machine but for the links between them.
    """
    sizes = [machine.devices or 0 for machine in cluster.machines]
    total = sum(sizes)
    found: dict[tuple[int, ...], None] = {tuple(sizes): None}
    groups = [list(group) for _, group in itertools.groupby(range(len(sizes)), key=lambda n: cluster.machines[n])]

    def keep(counts: Iterable[int]) -> None:
        made = tuple(counts)
        if sum(made) > 0:
            found[made] = None

    if total <= _SMALL and math.prod(size + 1 for size in sizes) <= 4 * _MOST_SUBSETS:
        for counts in itertools.product(*(range(size, -1, -1) for size in sizes)):
            keep(counts)
    else:
        for chosen in itertools.product((True, False), repeat=min(len(groups), 4)):  # whole groups of like machines
            kept = {number for group, is_in in zip(groups, chosen, strict=False) if is_in for number in group}
            keep(size if number in kept else 0 for number, size in enumerate(sizes))
        for group in groups:  # halves of a group, and of a machine
            machines = len(group)
            while machines > 1:
                machines //= 2
                keep(size if number in group[:machines] else 0 for number, size in enumerate(sizes))
            half = sizes[group[0]]
            while half > 1:
                half //= 2
                keep(half if number == group[0] else 0 for number in range(len(sizes)))
        keep([*sizes[:-1], sizes[-1] - 1])
    parts = []
    for counts in sorted(found, key=lambda counts: (-sum(counts), [-count for count in counts])):
        parts.append(tuple(Device(number, index) for number, count in enumerate(counts) for index in range(count)))
    distinct = {_likeness(cluster, part): part for part in reversed(parts)}
    return sorted(distinct.values(), key=len, reverse=True)[:_MOST_SUBSETS]


def _likeness(cluster: Cluster, part: Sequence[Device]) -> object:
    """Parts with the same number of devices on like machines are the same."""
    counts: dict[int, int] = {}
    for device in part:
        counts[device.machine] = counts.get(device.machine, 0) + 1
    return tuple(sorted((repr(cluster.machines[number]), count) for number, count in counts.items()))


def _sizes(batch: int, counts: Sequence[int]) -> list[int]:
    return sorted({batch // count for count in counts})


def _require_covered(setting: Setting, batch: int, usual: Sequence[int], counts: Sequence[int]) -> None:
    """Raise if the profile covers no microbatch size that the search would try; names all of these."""
    if any(setting.covers(size) for size in _sizes(batch, counts)):
        return
    assert setting.covered is not None
    smallest, largest = setting.covered
    sizes = ",".join(map(str, _sizes(batch, usual)))
    raise UserError(
        f"the profile covers microbatches of {smallest} to {largest} samples but the search of batch {batch} on "
        f"{len(setting.cluster.devices)} devices needs one of {sizes}; profile again with --samples {sizes}"
    )


def _lags(plan: Plan) -> list[Plan]:
    """A plan at every lag; none for one stage."""
    if len(plan.stages) == 1 or plan.mode is Mode.PIPEDREAM:
        return []
    return every_lag(replace(plan, mode=Mode.STALE))


def _refusal(plan: Plan, setting: Setting) -> str:
    try:
        Estimate(plan, setting).require_fit()
    except UserError as error:
        return f"{plan.mode} {format_placement(plan.placement)}: {error}"
    return ""


def microbatch_counts(
    batch: int, devices: int, covers: Callable[[int], bool] = lambda samples: True, most: int | None = None
) -> list[int]:
    """A few numbers of microbatches worth trying: divisors of the batch, from one to four per device.

    Only those whose microbatch size is covered.
    """
    fitting = [count for count in divisors(batch) if devices <= count <= min(4 * devices, batch, MOST_MICROBATCHES)]
    if not fitting:
        fitting = [next((count for count in range(min(devices, batch), 0, -1) if batch % count == 0), 1)]
    fitting = [count for count in fitting if covers(batch // count)]
    few = min(most or (_COUNTS if devices <= _SMALL else _COUNTS // 2), len(fitting))
    return sorted({fitting[round(index * (len(fitting) - 1) / max(few - 1, 1))] for index in range(few)})


def bubble_in(setting: Setting) -> Callable[[Plan], float]:
    """The share of time that a plan's ranks wait in a setting; computed once per plan."""

    def bubble(plan: Plan) -> float:
        deep = with_whole_batches(plan, setting.software)
        return steady(deep, ClusterCosts(Estimate(deep, setting))).bubble

    return cache(bubble)


def least_lag(plan: Plan, bubble: Callable[[Plan], float]) -> Plan:
    """The smallest lag whose bubble is within two points of the fullest lag's."""
    *lesser, fullest = every_lag(plan)
    most = bubble(fullest) + BUBBLE_MARGIN
    return next((candidate for candidate in lesser if bubble(candidate) <= most), fullest)


def every_lag(plan: Plan) -> list[Plan]:
    """The same plan with no lag, with a lag of one update, and so on."""
    count = len(plan.stages)
    versions = [stale_versions(count, lag) for lag in range(count)]
    tied = [parameter for tie in plan.ties for parameter in tie.parameters]
    lagging = (
        replace(plan, stages=tuple(replace(stage, versions=numbers[stage.index]) for stage in plan.stages))
        for numbers in versions
    )
    return [with_ties(candidate, tied) for candidate in lagging]


def choose_depth(plan: Plan, predicted: Callable[[Plan], Prediction]) -> Prediction:
    """The prediction of a plan at the best of three depths: the default, one less and one more.

    That is the shallowest within half a percent of the fastest that fits: a shallower pipeline needs less memory.
    """
    usual = predicted(plan)
    if len(plan.stages) == 1 or plan.mode is Mode.PIPEDREAM:
        return usual

    def deeper(by: int) -> Plan:
        stages = (stage if stage.is_last else replace(stage, depth=max(1, stage.depth + by)) for stage in plan.stages)
        return replace(plan, stages=tuple(stages))

    tried = [predicted(deeper(-1)), usual, predicted(deeper(1))]
    fitting = [prediction for prediction in tried if prediction.fits] or [usual]
    fastest = max(prediction.images_per_second for prediction in fitting)
    return next(prediction for prediction in fitting if prediction.images_per_second >= fastest * (1 - _TIE))


def _why(prediction: Prediction, best: Prediction, setting: Setting) -> str:
    """One line: what makes a plan slower than the best, or what limits the best."""
    estimate = Estimate(prediction.plan, setting)
    plan = prediction.plan
    left_out = len(setting.cluster.devices) - plan.world
    fewer = f"; leaves {left_out} of {len(setting.cluster.devices)} devices out" if left_out else ""
    if prediction is best:
        return f"fastest; bound by {prediction.bound}{fewer}"
    busiest = max(range(plan.world), key=lambda rank: prediction.steady.busy[rank])
    seconds = prediction.steady.batch_seconds
    reduces = {stage.index: estimate.exposed(stage.index) * plan.microbatches / stage.round for stage in plan.stages}
    worst = max(reduces, key=lambda index: reduces[index])
    size = estimate.parameters(worst) * 4 / MIB
    if plan.mode is Mode.DP or (plan.is_synchronous and reduces[worst] / seconds > 0.1):
        if reduces[worst] / seconds > 0.05:
            return f"sums {size:,.0f} MiB of gradient, {reduces[worst] / seconds:.0%} of the batch{fewer}"
        if plan.mode is Mode.DP:
            return f"every device computes all of it; bound by {prediction.bound}{fewer}"
    if prediction.steady.bubble > best.steady.bubble + 0.03:
        waits = f"devices wait {prediction.steady.bubble:.0%} of the time, {best.steady.bubble:.0%} in the best"
        return f"{waits}{fewer}"
    stage = plan.stages_of(busiest)[-1].index
    bound = "" if prediction.bound == f"compute of stage {stage}" else f"; bound by {prediction.bound}"
    return f"stage {stage} is the slowest, busy {prediction.steady.busy[busiest]:.0%}{bound}{fewer}"


def explain(setting: Setting, plan: Plan, unit: str) -> dict[str, object]:
    """The cost of a unit, its stage in a plan, and the bytes that a cut before or behind it would carry."""
    estimate = Estimate(plan, setting)
    table = setting.tables(setting.cluster.kind_of(plan.devices[0]), plan.samples)
    names = [entry.name for entry in table.units]
    if unit not in names:
        raise UserError(f"--explain names '{unit}' but the model has no such unit; {did_you_mean(unit, names)}")
    position = names.index(unit)
    entry = table.units[position]
    stage = max(index for index, bound in enumerate(estimate.bounds[:-1]) if bound <= position)
    total = table.seconds
    return {
        "unit": unit,
        "kind": entry.kind,
        "stage": stage,
        "samples": plan.samples,
        "forward": entry.forward,
        "backward": entry.backward,
        "share": (entry.forward + entry.backward) / total if total else 0.0,
        "parameters": entry.parameters,
        "saved": entry.saved,
        "cut_before": table.units[position - 1].live if position else 0,
        "cut_behind": entry.live,
    }
