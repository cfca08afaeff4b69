"""The search: which units form a stage and which devices run it, so that the slowest stage is as fast as it can be.

Devices are in the order of the topology, and stages take contiguous blocks of it, the last stage the last devices. For
a given time, one pass over the units from the end finds the fewest devices that run them without any stage taking
longer; the smallest such time is bracketed, and the last step proves that nothing below it can be reached.

The cost of a block depends on its size and on the links that it and its borders cross. That repeats from machine to
machine, so positions are kept modulo the machine. At each position it is enough to keep the fewest devices: whatever
fits before a stage with more devices taken also fits with fewer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagewright.cluster.placement import Placement
from stagewright.cluster.topology import Device
from stagewright.errors import UserError
from stagewright.plan.estimate import Setting
from stagewright.plan.plan import Mode
from stagewright.plan.search_space import Blocks, Segments, as_kind, make_blocks, narrow_points
from stagewright.plan.stage_costs import MemoryLimits, make_memory_limits, make_time_model

Array = Any  # a numpy array
_FAR = 1 << 30  # more devices than any cluster has: unreachable
_CELLS = 20_000_000  # segments x blocks above which stages begin only where the chain is narrow
_LIMITED_CELLS = 2_000_000  # the same where memory is the limit
_MOST_LAYERS = 8  # stages, where memory is the limit and their number is not given
_CLOSE = 1e-9
_QUICK, _QUICK_CELLS = 1e-2, 50_000
_NEAR = 1e-4


@dataclass(frozen=True)
class Partition:
    """Where stages begin, how many devices each has, and the slowest stage's seconds per batch."""

    bounds: tuple[int, ...]  # first unit of each stage, and the end
    sizes: tuple[int, ...]
    seconds: float

    def placement(self, devices: Sequence[Device]) -> Placement:
        """The devices of each stage, of which the last one has the last."""
        bounds = itertools.accumulate(self.sizes, initial=len(devices) - sum(self.sizes))
        return tuple(tuple(devices[first:end]) for first, end in itertools.pairwise(bounds))


class Search:
    """Finds the fastest partition of a model over a cluster, given the seconds of every segment on every block."""

    def __init__(
        self,
        segments: Segments,
        blocks: Blocks,
        seconds: Array,
        limits: MemoryLimits | None = None,
        narrow: Callable[[], Search] | None = None,
        accuracy: float = _CLOSE,
    ) -> None:
        self._accuracy = accuracy
        self._segments = segments
        self._blocks = blocks
        self._seconds = seconds  # kinds of blocks x pairs
        self._limits = limits
        self._narrow = narrow  # the same search over fewer segments, for when memory is the limit
        self._devices = len(blocks.devices)
        self._position = (blocks.offset + blocks.size) % blocks.period
        self._starts = np.array([segments.beginning(unit).start for unit in range(segments.units)])
        self._most_behind: dict[int, Array] = {}  # by layer

    def best(self, stages: int | None = None) -> Partition | None:
        """The partition whose slowest stage is fastest, with any or a given number of stages; None if nothing fits.

        Memory is considered only if the best partition without it does not fit.
        """
        found = self._bracket(stages, limited=False)
        if found is None or self._limits is None or self._fits(found):
            return found
        limited = self if self._narrow is None else self._narrow()
        return limited._bracket(stages, limited=True)

    def _fits(self, found: Partition) -> bool:
        assert self._limits is not None
        for stage, size in enumerate(found.sizes):
            first, last = np.searchsorted(self._segments.points, found.bounds[stage : stage + 2])
            pairs = np.array([self._segments.beginning(first).start + last - first - 1])
            behind = np.array([[sum(found.sizes[stage + 1 :])]])
            stages = len(found.sizes) - stage
            needs = self._limits.needs(self._segments, pairs, stages, behind, np.array([[size]]))
            if needs.max() > self._memory(int(behind[0, 0]), size) - self._limits.context:
                return False
        return True

    def _memory(self, behind: int, size: int) -> float:
        """Bytes of the smallest device of a block."""
        same = (self._blocks.size == size) & (self._blocks.offset == behind % self._blocks.period)
        return float(self._blocks.kinds.memory[self._blocks.signature[np.flatnonzero(same)[0]]])

    def _bracket(self, stages: int | None, *, limited: bool) -> Partition | None:
        """Bisect for the smallest feasible time; the last step proves that nothing below it is feasible."""
        found = self._within(float(self._seconds.max()), stages, limited)
        if found is None:
            return None
        low = 0.0
        while low < found.seconds * (1 - self._accuracy):
            if found.seconds < low * (1 + max(_NEAR, self._accuracy)):
                middle = found.seconds * (1 - self._accuracy)
            else:
                middle = (low * found.seconds) ** 0.5 if low else found.seconds / 2
            better = self._within(middle, stages, limited)
            if better is None:
                low = middle
            else:
                found = better
        return found

    def _within(self, most: float, stages: int | None, limited: bool) -> Partition | None:
        """A partition in which no stage takes longer than so many seconds, with as few stages as possible."""
        allowed = (self._seconds <= most)[self._blocks.signature]
        if stages is None and not limited:
            return self._of_any_number(allowed)
        reach = [self._empty()]
        for layer in range(1, (stages or min(_MOST_LAYERS, self._devices, self._segments.units)) + 1):
            reach.append(self._layer(reach[-1], layer, allowed, limited))
            if reach[-1][0].min() < _FAR and stages in (None, layer):
                return self._trace(reach, allowed, limited)
        return None

    def _empty(self) -> Array:
        """Fewest devices that run the units from each unit on, by position; 0 behind the last unit."""
        reach = np.full((self._segments.units + 1, self._blocks.period), _FAR, dtype=np.int64)
        reach[self._segments.units, 0] = 0
        return reach

    def _layer(self, before: Array, layer: int, allowed: Array, limited: bool) -> Array:
        """The same with one more stage, for all units at once."""
        fewest = np.minimum.reduceat(
            self._taken(before, slice(None), allowed, layer if limited else 0), self._starts, axis=1
        )
        own = np.full_like(before, _FAR)
        for block, position in enumerate(self._position):
            np.minimum(own[:-1, position], fewest[block], out=own[:-1, position])
        return own

    def _taken(self, before: Array, pairs: slice, allowed: Array, limited_layer: int) -> Array:
        """Total devices taken once a stage takes a segment on a block: blocks x pairs."""
        behind = before[self._segments.last[pairs]][:, self._blocks.offset].T
        taken = behind + self._blocks.size[:, None]
        fits = allowed[:, pairs] & (taken <= self._devices)
        if limited_layer:
            fits &= behind <= self._behind_limit(limited_layer)[:, pairs]
        return np.where(fits, taken, _FAR)

    def _behind_limit(self, layer: int) -> Array:
        if layer not in self._most_behind:
            assert self._limits is not None
            self._most_behind[layer] = self._limits.most_behind(self._segments, self._blocks, layer)
        return self._most_behind[layer]

    def _of_any_number(self, allowed: Array) -> Partition | None:
        """Without a memory limit the number of stages does not matter: one pass from the last unit to the first."""
        reach = self._empty()
        for unit in range(self._segments.units - 1, -1, -1):
            fewest = self._taken(reach, self._segments.beginning(unit), allowed, 0).min(axis=1)
            np.minimum.at(reach[unit], self._position, fewest)
        return self._trace([reach], allowed, limited=False) if reach[0].min() < _FAR else None

    def _trace(self, reach: Sequence[Array], allowed: Array, limited: bool) -> Partition:
        """Walk from the first unit to the end along the choices behind each state.

        `reach` has one array per layer, or a single array for all layers.
        """
        bounds, sizes, seconds = [0], [], 0.0
        layer = len(reach) - 1
        unit, taken = 0, int(reach[-1][0].min())
        while unit < self._segments.units:
            pairs = self._segments.beginning(unit)
            candidates = self._taken(reach[max(layer - 1, 0)], pairs, allowed, layer if limited else 0)
            wanted = (candidates == taken) & (self._position == taken % self._blocks.period)[:, None]
            block, end = (int(index[0]) for index in np.nonzero(wanted))
            seconds = max(seconds, float(self._seconds[self._blocks.signature[block], pairs.start + end]))
            sizes.append(int(self._blocks.size[block]))
            unit, taken, layer = unit + 1 + end, taken - sizes[-1], layer - 1
            bounds.append(unit)
        return Partition(tuple(int(self._segments.points[bound]) for bound in bounds), tuple(sizes), seconds)


def make_search(
    setting: Setting,
    mode: Mode,
    batch: int,
    microbatches: int,
    *,
    staleness: int | None = None,
    quick: bool = False,
) -> Search:
    """A search over a setting's cluster for one mode and number of microbatches.

    `quick`: within a hundredth of the fastest, and with stages that begin where the chain is narrow unless it is short.
    """
    kinds = kinds_by_speed(setting, {machine.kind for machine in setting.cluster.machines}, batch // microbatches)
    sums = [setting.sums(kind, batch // microbatches) for kind in kinds]
    blocks = make_blocks(setting.cluster, kinds, [setting.devices(kind).memory for kind in kinds])
    times = make_time_model(setting, mode, microbatches, kinds[-1], staleness)
    limits = make_memory_limits(setting, mode, microbatches, staleness)
    cells = len(blocks.size) * sums[0].count * (sums[0].count + 1) // 2

    def over(points: Array | None, narrow: Callable[[], Search] | None = None) -> Search:
        segments = Segments.of(sums, setting.software, points)
        seconds = times.seconds(segments, blocks.kinds)
        return Search(segments, blocks, seconds, limits, narrow, _QUICK if quick else _CLOSE)

    def narrow() -> Search:
        return over(narrow_points(sums[0]))

    return (
        narrow()
        if cells > (_QUICK_CELLS if quick else _CELLS)
        else over(None, narrow if cells > _LIMITED_CELLS else None)
    )


def kinds_by_speed(setting: Setting, kinds: Iterable[str], samples: int) -> list[str]:
    """Kinds of devices from the fastest to the slowest, for microbatches of so many samples."""
    return sorted(kinds, key=lambda kind: (setting.tables(kind, samples).seconds, kind))


def best_cuts(setting: Setting, placement: Placement, mode: Mode, batch: int, microbatches: int) -> tuple[str, ...]:
    """The cuts that make the slowest stage of a given placement as fast as possible."""
    samples = batch // microbatches
    named = {setting.cluster.kind_of(device) for stage in placement for device in stage}
    kinds = kinds_by_speed(setting, named, samples)
    sums = [setting.sums(kind, samples) for kind in kinds]
    segments = Segments.of(sums, setting.software)
    if segments.units < len(placement):
        raise UserError(f"the model has {segments.units} units but the placement has {len(placement)} stages")
    times = make_time_model(setting, mode, microbatches, kinds[-1])
    slowest = np.full(segments.units + 1, np.inf)
    slowest[segments.units] = 0.0
    choices: list[Array] = []
    for devices in reversed(placement):
        seconds = times.seconds(segments, as_kind(setting.cluster, devices, kinds))[0]
        time = np.maximum(seconds, slowest[segments.last])
        ends = np.array([int(time[segments.beginning(unit)].argmin()) + unit + 1 for unit in range(segments.units)])
        now = np.array([time[segments.beginning(unit)].min() for unit in range(segments.units)])
        slowest = np.concatenate((now, [np.inf]))
        choices.append(ends)
    cuts: list[str] = []
    unit = 0
    for ends in reversed(choices[1:]):
        unit = int(ends[unit])
        cuts.append(sums[0].names[unit])
    return tuple(cuts)
