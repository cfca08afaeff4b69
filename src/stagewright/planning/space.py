"""The plans that the planner tries, as generators; nothing here is simulated.

Data parallel on parts of a cluster, stages that the search finds, and small changes of a plan.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from stagewright.cluster.topology import Cluster, Device
from stagewright.plan.estimate import Setting
from stagewright.plan.make import MOST_MICROBATCHES, divisors, make_plan
from stagewright.plan.plan import Mode, Plan
from stagewright.plan.search import make_search

MOST_STAGES = 6
_SMALL, _FEW, _SOME = 10, 32, 160  # devices up to which the planner tries much, less, and little
_COUNTS = 6  # numbers of microbatches that the search tries
_MOST_COUNTS = 12  # that data parallel tries
_MOST_SUBSETS = 40
_MOST_GROUPS = 4  # of like machines, of which every subset is tried
_STEPS = (-4, -3, -2, -1, 1, 2, 3, 4)  # units that a cut moves by
Part = tuple[Device, ...]
_T = TypeVar("_T")


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
            return Effort(16, 8, 100, 3, MOST_STAGES, _COUNTS, 4)
        if devices <= _FEW:
            return Effort(5, 2, 12, 1, 4, 2, 1)
        if devices <= _SOME:
            return Effort(3, 0, 6, 1, None, 2, 1)
        return Effort(1, 0, 0, 0, None, 1, 1)


@dataclass(frozen=True)
class Space:
    """What may be tried in a setting: its modes, and what of a plan is given."""

    setting: Setting
    batch: int
    modes: tuple[Mode, ...]
    microbatches: int | None  # None: several
    staleness: int | None
    is_whole: bool  # only plans of every device

    @property
    def cluster(self) -> Cluster:
        return self.setting.cluster

    @cached_property
    def devices(self) -> Part:
        return self.cluster.devices

    @cached_property
    def effort(self) -> Effort:
        return Effort.of(len(self.devices))

    @cached_property
    def _names(self) -> list[str]:
        """Of the units, which are the same on every kind of device and at every size."""
        count = (self._counts(1) or [1])[0]
        return self.setting.sums(self.cluster.machines[0].kind, self.batch // count).names

    def _counts(self, replicas: int) -> list[int]:
        """Numbers of microbatches for so many replicas: every divisor of the batch from one a replica on."""
        if self.microbatches is not None:
            return [self.microbatches]
        enough = [count for count in self._covered if count >= replicas]
        return enough[:_MOST_COUNTS] or self._covered[-1:]

    @cached_property
    def _covered(self) -> list[int]:
        possible = (count for count in divisors(self.batch) if count <= MOST_MICROBATCHES)
        return [count for count in possible if self.setting.covers(self.batch // count)]

    # --- Data parallel and stages ---

    def parallel(self) -> Iterator[tuple[Part, list[Plan]]]:
        """Data parallel on every part, at every number of microbatches."""
        for part in [self.devices] if self.is_whole else parts_of(self.cluster):
            yield (
                part,
                [
                    make_plan((part,), batch=self.batch, microbatches=count, mode=Mode.DP)
                    for count in self._counts(len(part))
                ],
            )

    def staged(self, parts: Iterable[Part]) -> Iterator[Plan]:
        """The search's best plan on some parts, of every mode, number of microbatches and number of stages."""
        for part in parts:
            for cluster, devices in _orders(self.cluster, part, self.effort) if len(part) > 1 else ():
                yield from self._searched(replace(self.setting, cluster=cluster), devices)

    def _searched(self, setting: Setting, devices: Part) -> Iterator[Plan]:
        """Those on some devices, which are those of the setting's cluster."""
        counts = [self.microbatches or 0]
        if self.microbatches is None:
            counts = microbatch_counts(self.batch, len(devices), setting.covers, self.effort.counts)
        most = self.effort.stages
        numbers: Sequence[int | None] = (
            (None,) if most is None else range(2, min(most, len(devices), len(self._names)) + 1)
        )
        for mode, count in itertools.product(self.modes, counts):
            search = make_search(setting, mode, self.batch, count, staleness=self.staleness, quick=True)
            for found in map(search.best, numbers):
                if found is not None and len(found.sizes) > 1:
                    yield make_plan(
                        found.placement(devices),
                        batch=self.batch,
                        microbatches=count,
                        mode=mode,
                        staleness=self.staleness if mode.preset.has_staleness else None,
                        cuts=tuple(self._names[bound] for bound in found.bounds[1:-1]),
                    )

    # --- Changes ---

    def neighbours(self, plan: Plan) -> Iterator[Plan]:
        """Every small change of a plan."""
        return (changed for changed in self._changes(plan) if not self.is_whole or changed.world == len(self.devices))

    def _changes(self, plan: Plan) -> Iterator[Plan]:
        placement, cuts = plan.placement, plan.cuts
        counts = [plan.microbatches, *(self._near_counts(plan) if self.microbatches is None else ())]
        for moved, count in itertools.product([cuts, *self._moved_cuts(cuts)], counts):  # the best cut differs with M
            if moved != cuts or count != plan.microbatches:
                yield _remade(plan, placement, moved, count)
        for index, (one, other) in enumerate(itertools.pairwise(placement)):
            before, behind = placement[:index], placement[index + 2 :]
            for pair in self._rearranged(one, other):
                yield _remade(plan, (*before, *pair, *behind), cuts)
            if len(placement) > 2:
                yield _remade(plan, (*before, one + other, *behind), cuts[:index] + cuts[index + 1 :])
        for index, devices in enumerate(placement):
            if len(devices) > 1:
                for leaving in self._of_each_kind(devices).values():
                    yield _remade(plan, _with(placement, index, devices[:leaving] + devices[leaving + 1 :]), cuts)
        used = set(plan.devices)
        for spare in [device for device in self.devices if device not in used][:1]:
            for index, devices in enumerate(placement):
                yield _remade(plan, _with(placement, index, (*devices, spare)), cuts)

    def _moved_cuts(self, cuts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """The cuts with one of them moved by a few units."""
        bounds = [0, *map(self._names.index, cuts), len(self._names)]
        for index in range(len(cuts)):
            low, bound, high = bounds[index : index + 3]
            for step in _STEPS:
                if low < bound + step < high:
                    yield (*cuts[:index], self._names[bound + step], *cuts[index + 1 :])

    def _rearranged(self, one: Part, other: Part) -> Iterator[tuple[Part, Part]]:
        """The devices of two neighbouring stages: the nearest moves over, all swap, two of different kinds do."""
        if len(one) > 1:
            yield one[:-1], (one[-1], *other)
        if len(other) > 1:
            yield (*one, other[0]), other[1:]
        yield other, one
        for kind, here in self._of_each_kind(one).items():
            for other_kind, there in self._of_each_kind(other).items():
                if kind != other_kind:
                    yield _with(one, here, other[there]), _with(other, there, one[here])

    def _of_each_kind(self, devices: Part) -> dict[str, int]:
        """The place of the last device of each kind."""
        return {self.cluster.kind_of(device): index for index, device in enumerate(devices)}

    def _near_counts(self, plan: Plan) -> list[int]:
        most = 16 * plan.world
        known = [count for count in self._covered if plan.widest <= count <= most or count == plan.microbatches]
        if plan.microbatches not in known:
            return []
        at = known.index(plan.microbatches)
        return known[max(0, at - 2) : at] + known[at + 1 : at + 3]


def _with(row: tuple[_T, ...], index: int, value: _T) -> tuple[_T, ...]:
    """A row with another value in one place."""
    return (*row[:index], value, *row[index + 1 :])


def _remade(plan: Plan, placement: tuple[Part, ...], cuts: Sequence[str], microbatches: int | None = None) -> Plan:
    """The plan with another placement, cuts or microbatches; versions and depths are the defaults of these."""
    return make_plan(
        placement,
        batch=plan.batch,
        microbatches=microbatches or plan.microbatches,
        mode=plan.mode,
        staleness=min(plan.lag, len(placement) - 1) if plan.mode.preset.has_staleness else None,
        cuts=cuts,
    )


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


# --- Parts of a cluster -----------------------------------------------------------------------------------------------


def _orders(cluster: Cluster, part: Part, effort: Effort) -> Iterator[tuple[Cluster, Part]]:
    """A part of a cluster as a cluster of its own, its kinds of machines in several orders, with the devices it has."""
    own = Counter(device.machine for device in part)
    groups = [list(group) for _, group in itertools.groupby(own, key=lambda number: cluster.machines[number])]
    for order in itertools.islice(itertools.permutations(groups), 6 if effort.stages else 2):
        numbers = list(itertools.chain(*order))
        machines = tuple(cluster.machines[number].first(own[number]) for number in numbers)
        devices = tuple(device for number in numbers for device in part if device.machine == number)
        yield replace(cluster, machines=machines), devices


def parts_of(cluster: Cluster) -> list[Part]:
    """Parts of a cluster that may be as fast as all of it: first devices of some machines, the largest parts first.

    Like machines are interchangeable, and so are the devices of a machine but for the links between them.
    """
    sizes = [machine.devices or 0 for machine in cluster.machines]
    if sum(sizes) <= _SMALL and math.prod(size + 1 for size in sizes) <= 4 * _MOST_SUBSETS:
        found = set(itertools.product(*(range(size + 1) for size in sizes)))
    else:
        found = set(_usual_parts(cluster, sizes))
    parts: dict[object, Part] = {}
    for counts in sorted(found):
        likeness = sorted(
            (repr(machine), count) for machine, count in zip(cluster.machines, counts, strict=True) if count
        )
        if likeness:
            parts[tuple(likeness)] = tuple(
                Device(number, index) for number, count in enumerate(counts) for index in range(count)
            )
    return sorted(parts.values(), key=len, reverse=True)[:_MOST_SUBSETS]


def _usual_parts(cluster: Cluster, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Devices of each machine: of whole groups of like machines, halves of a group and of a machine, all but one."""
    numbers = range(len(sizes))

    def only(kept: Iterable[int]) -> tuple[int, ...]:
        return tuple(sizes[number] if number in kept else 0 for number in numbers)

    yield tuple(sizes)
    groups = [list(group) for _, group in itertools.groupby(numbers, key=lambda number: cluster.machines[number])]
    for chosen in itertools.product((True, False), repeat=min(len(groups), _MOST_GROUPS)):
        yield only({number for group, is_in in zip(groups, chosen, strict=False) if is_in for number in group})
    for group in groups:
        yield from (only(group[:count]) for count in _halves(len(group)))
        yield from (_with((0,) * len(sizes), group[0], count) for count in _halves(sizes[group[0]]))
    yield (*sizes[:-1], sizes[-1] - 1)


def _halves(count: int) -> Iterator[int]:
    while count > 1:
        count //= 2
        yield count
