"""The search: which units form a stage and which devices run it, so that the slowest stage is as fast as it can be.

Devices stand in the order of the topology and stages take contiguous blocks of it, the last stage the last devices. For
a given time, one pass over the units from the end finds the fewest devices that run them without any stage taking
longer; the smallest such time is bracketed, and the last step proves that nothing below it can be reached.

What a block costs depends on its size and on which links it and its borders cross, and that repeats from machine to
machine: positions are told apart modulo the machine. Fewest devices is the right thing to keep at each of these
positions, because with fewer devices taken everything that could come before still can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagewright.cluster.placement import Placement
from stagewright.plan.estimate import Setting
from stagewright.plan.plan import Mode
from stagewright.plan.search_space import Blocks, Runs, as_kind, make_blocks, narrow_points
from stagewright.plan.stage_costs import Limits, make_limits, make_rules

Array = Any  # a numpy array
_FAR = 1 << 30  # more devices than there are
_CELLS = 20_000_000  # runs of units on blocks, from which on stages begin only where a chain is narrow
_LIMITED_CELLS = 2_000_000  # the same where memory binds
_MOST_LAYERS = 8  # stages, where memory binds and their number was not given
_CLOSE = 1e-9
_NEAR = 1e-4


@dataclass(frozen=True)
class Found:
    """A way to lay out the units: where stages begin, how many devices each has, and the slowest stage's time."""

    bounds: tuple[int, ...]  # first unit of each stage, and the end
    sizes: tuple[int, ...]
    seconds: float

    def placement(self, blocks: Blocks) -> Placement:
        behind = [sum(self.sizes[index + 1 :]) for index in range(len(self.sizes))]
        return tuple(blocks.take(rest, size) for rest, size in zip(behind, self.sizes, strict=True))


class Search:
    """The fastest layout of a model on a cluster under one set of rules."""

    def __init__(
        self,
        runs: Runs,
        blocks: Blocks,
        seconds: Array,
        limits: Limits | None = None,
        narrow: Callable[[], Search] | None = None,
    ) -> None:
        self._runs = runs
        self._blocks = blocks
        self._seconds = seconds  # kinds of blocks x pairs
        self._limits = limits
        self._narrow = narrow  # the same search over fewer runs, for where memory binds
        self._devices = len(blocks.devices)
        self._position = (blocks.offset + blocks.size) % blocks.period
        self._starts = np.array([runs.beginning(unit).start for unit in range(runs.units)])
        self._room: dict[int, Array] = {}

    def best(self, stages: int | None = None) -> Found | None:
        """The layout whose slowest stage is fastest, of any or exactly so many stages; None if nothing fits.

        Memory is looked at only where the layout that ignores it does not fit.
        """
        found = self._bracket(stages, limited=False)
        if found is None or self._limits is None or self._fits(found):
            return found
        limited = self if self._narrow is None else self._narrow()
        return limited._bracket(stages, limited=True)

    def _fits(self, found: Found) -> bool:
        assert self._limits is not None
        for stage, size in enumerate(found.sizes):
            first, last = np.searchsorted(self._runs.points, found.bounds[stage : stage + 2])
            pairs = np.array([self._runs.beginning(first).start + last - first - 1])
            behind = np.array([[sum(found.sizes[stage + 1 :])]])
            stages = len(found.sizes) - stage
            needs = self._limits.needs(self._runs, pairs, stages, behind, np.array([[size]]))
            if needs.max() > self._limits.memory:
                return False
        return True

    def _bracket(self, stages: int | None, *, limited: bool) -> Found | None:
        """Close in on the smallest time that can be kept; the last step proves that nothing below it can."""
        found = self._within(float(self._seconds.max()), stages, limited)
        if found is None:
            return None
        low = 0.0
        while low < found.seconds * (1 - _CLOSE):
            if found.seconds < low * (1 + _NEAR):
                middle = found.seconds * (1 - _CLOSE)
            else:
                middle = (low * found.seconds) ** 0.5 if low else found.seconds / 2
            better = self._within(middle, stages, limited)
            if better is None:
                low = middle
            else:
                found = better
        return found

    def _within(self, most: float, stages: int | None, limited: bool) -> Found | None:
        """A layout in which no stage takes longer than so many seconds, with as few stages as that takes."""
        allowed = (self._seconds <= most)[self._blocks.signature]
        if stages is None and not limited:
            return self._of_any_number(allowed)
        reach = [self._empty()]
        for layer in range(1, (stages or min(_MOST_LAYERS, self._devices, self._runs.units)) + 1):
            reach.append(self._layer(reach[-1], layer, allowed, limited))
            if reach[-1][0].min() < _FAR and stages in (None, layer):
                return self._trace(reach, allowed, limited)
        return None

    def _empty(self) -> Array:
        """Fewest devices that run the units from each on, by position: none for what is behind the last."""
        reach = np.full((self._runs.units + 1, self._blocks.period), _FAR, dtype=np.int64)
        reach[self._runs.units, 0] = 0
        return reach

    def _layer(self, before: Array, layer: int, allowed: Array, limited: bool) -> Array:
        """The same with one stage more, for all units at once."""
        fewest = np.minimum.reduceat(
            self._taken(before, slice(None), allowed, layer if limited else 0), self._starts, axis=1
        )
        own = np.full_like(before, _FAR)
        for block, position in enumerate(self._position):
            np.minimum(own[:-1, position], fewest[block], out=own[:-1, position])
        return own

    def _taken(self, before: Array, pairs: slice, allowed: Array, limited_layer: int) -> Array:
        """Devices taken in all when a stage takes a run on a block: blocks x pairs."""
        behind = before[self._runs.last[pairs]][:, self._blocks.offset].T
        taken = behind + self._blocks.size[:, None]
        fits = allowed[:, pairs] & (taken <= self._devices)
        if limited_layer:
            fits &= behind <= self._room_behind(limited_layer)[:, pairs]
        return np.where(fits, taken, _FAR)

    def _room_behind(self, layer: int) -> Array:
        if layer not in self._room:
            assert self._limits is not None
            self._room[layer] = self._limits.most_behind(self._runs, self._blocks, layer)
        return self._room[layer]

    def _of_any_number(self, allowed: Array) -> Found | None:
        """Where memory sets no limit the number of stages does not matter: one pass from the last unit to the first."""
        reach = self._empty()
        for unit in range(self._runs.units - 1, -1, -1):
            fewest = self._taken(reach, self._runs.beginning(unit), allowed, 0).min(axis=1)
            np.minimum.at(reach[unit], self._position, fewest)
        return self._trace([reach], allowed, limited=False) if reach[0].min() < _FAR else None

    def _trace(self, reach: Sequence[Array], allowed: Array, limited: bool) -> Found:
        """Walk from the first unit to the end along what made each state; one array stands for all layers."""
        bounds, sizes, seconds = [0], [], 0.0
        layer = len(reach) - 1
        unit, taken = 0, int(reach[-1][0].min())
        while unit < self._runs.units:
            pairs = self._runs.beginning(unit)
            candidates = self._taken(reach[max(layer - 1, 0)], pairs, allowed, layer if limited else 0)
            wanted = (candidates == taken) & (self._position == taken % self._blocks.period)[:, None]
            block, end = (int(index[0]) for index in np.nonzero(wanted))
            seconds = max(seconds, float(self._seconds[self._blocks.signature[block], pairs.start + end]))
            sizes.append(int(self._blocks.size[block]))
            unit, taken, layer = unit + 1 + end, taken - sizes[-1], layer - 1
            bounds.append(unit)
        return Found(tuple(int(self._runs.points[bound]) for bound in bounds), tuple(sizes), seconds)


def make_search(
    setting: Setting,
    mode: Mode,
    batch: int,
    microbatches: int,
    *,
    staleness: int | None = None,
    limited: bool = True,
) -> Search:
    """A search over a setting's cluster for one mode and number of microbatches."""
    kinds = sorted(
        {machine.kind for machine in setting.cluster.machines},
        key=lambda kind: setting.tables(kind, batch // microbatches).seconds,
    )
    sums = [setting.sums(kind, batch // microbatches) for kind in kinds]
    blocks = make_blocks(setting.cluster, kinds)
    rules = make_rules(setting, mode, microbatches, kinds[-1], staleness)
    limits = make_limits(setting, mode, microbatches, kinds, staleness) if limited else None
    cells = len(blocks.size) * sums[0].count * (sums[0].count + 1) // 2

    def over(points: Array | None, narrow: Callable[[], Search] | None = None) -> Search:
        runs = Runs.of(sums, setting.software, points)
        return Search(runs, blocks, rules.seconds(runs, blocks.kinds), limits, narrow)

    def narrow() -> Search:
        return over(narrow_points(sums[0]))

    return narrow() if cells > _CELLS else over(None, narrow if cells > _LIMITED_CELLS else None)


def best_cuts(setting: Setting, placement: Placement, mode: Mode, batch: int, microbatches: int) -> tuple[str, ...]:
    """The cuts that make the slowest stage of a given placement fastest."""
    samples = batch // microbatches
    kinds = sorted({setting.cluster.kind_of(device) for stage in placement for device in stage})
    sums = [setting.sums(kind, samples) for kind in kinds]
    runs = Runs.of(sums, setting.software)
    if runs.units < len(placement):
        raise ValueError(f"the model has {runs.units} units but the placement has {len(placement)} stages")
    rules = make_rules(setting, mode, microbatches, kinds[0])
    slowest = np.full(runs.units + 1, np.inf)
    slowest[runs.units] = 0.0
    choices: list[Array] = []
    for devices in reversed(placement):
        seconds = rules.seconds(runs, as_kind(setting.cluster, devices, kinds))[0]
        time = np.maximum(seconds, slowest[runs.last])
        ends = np.array([int(time[runs.beginning(unit)].argmin()) + unit + 1 for unit in range(runs.units)])
        now = np.array([time[runs.beginning(unit)].min() for unit in range(runs.units)])
        slowest = np.concatenate((now, [np.inf]))
        choices.append(ends)
    cuts: list[str] = []
    unit = 0
    for ends in reversed(choices[1:]):
        unit = int(ends[unit])
        cuts.append(sums[0].names[unit])
    return tuple(cuts)
