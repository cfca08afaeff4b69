"""The search: which units form a stage and which devices run it, so that the slowest stage is as fast as it can be.

Devices stand in the order of the topology and stages take contiguous blocks of it, the last stage the last devices. For
a given time, one pass over the units from the end finds the fewest devices that run them without any stage taking
longer; the smallest such time is bracketed, and the last step proves that nothing below it can be reached.

What a block costs depends on its size and on which links it and its borders cross, and that repeats from machine to
machine: positions are told apart modulo the machine. Fewest devices is the right thing to keep at each of these
positions, because with fewer devices taken everything that could come before still can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagewright.catalog import Software
from stagewright.cluster import Cluster, Device, Placement
from stagewright.plan import cost
from stagewright.plan.estimate import Setting, Sums
from stagewright.plan.memory import state_bytes
from stagewright.plan.plan import Mode

Array = Any  # a numpy array
_FAR = 1 << 30  # more devices than there are
_MANY = 64  # devices from which on large blocks come in steps
_CELLS = 20_000_000  # runs of units on blocks, from which on stages begin only where a chain is narrow
_LIMITED_CELLS = 2_000_000  # the same where memory binds
_STEPS = 128
_MOST_LAYERS = 8  # stages, where memory binds and their number was not given
_CLOSE = 1e-9
_NEAR = 1e-4


@dataclass(frozen=True)
class Runs:
    """Every contiguous run of units, as arrays over pairs (first, last); runs that begin alike stand together.

    Runs begin and end at points, which are all units unless only some are looked at.
    """

    units: int  # pieces between points
    points: Array
    first: Array  # numbers of points
    last: Array
    compute: Array  # kinds of devices x pairs, seconds of a microbatch
    backward: Array
    parameters: Array
    saved: Array
    before: Array  # bytes of activations that enter
    behind: Array  # bytes of activations that leave
    entering: Array  # bytes that come in over both borders for a microbatch, forward and backward
    leaving: Array
    transient: Array  # bytes of message buffers, of gradients of activations, and of workspace

    @staticmethod
    def of(sums: Sequence[Sums], software: Software, points: Array | None = None) -> Runs:
        """From one table a kind of device."""
        points = np.arange(sums[0].count + 1) if points is None else points
        first, last = np.triu_indices(len(points), 1)
        begin, end = points[first], points[last]

        def between(prefix: Array) -> Array:
            return prefix[end] - prefix[begin]

        def largest(values: Array) -> Array:
            pieces = np.maximum.reduceat(values, points[:-1])
            return np.concatenate([np.maximum.accumulate(pieces[piece:]) for piece in range(len(pieces))])

        own = sums[0]
        borrowed = largest(own.workspaces)
        workspace = np.full_like(borrowed, float(software.workspace))
        if not software.keeps_workspace:
            workspace = np.minimum(borrowed, workspace)
        messages = 2 * (own.live[begin] + own.live[end])
        return Runs(
            len(points) - 1,
            points,
            first,
            last,
            np.array([between(kind.forward) + between(kind.backward) for kind in sums]),
            np.array([between(kind.backward) for kind in sums]),
            between(own.parameters),
            between(own.saved),
            own.live[begin],
            own.live[end],
            own.live[begin] + own.live_gradient[end],
            own.live[end] + own.live_gradient[begin],
            messages + 2 * largest(own.outputs) + workspace,
        )

    def beginning(self, unit: int) -> slice:
        """The runs that begin at a unit."""
        start = unit * self.units - unit * (unit - 1) // 2
        return slice(start, start + self.units - unit)


@dataclass(frozen=True)
class Kinds:
    """Blocks that cost alike, as columns."""

    size: Array
    bandwidth: Array  # of the block's ring
    latency: Array
    staged: Array
    border: Array  # bandwidth of the slower border
    device: Array  # the slowest kind of device in it


@dataclass(frozen=True)
class Blocks:
    """Every contiguous block of devices a stage may take, by where it ends and how large it is."""

    devices: tuple[Device, ...]
    period: int  # devices after which positions repeat
    offset: Array  # devices behind the block, modulo the period
    size: Array
    signature: Array  # which of the kinds it is
    kinds: Kinds

    def take(self, behind: int, size: int) -> tuple[Device, ...]:
        end = len(self.devices) - behind
        return self.devices[end - size : end]


def make_blocks(cluster: Cluster, kinds: Sequence[str]) -> Blocks:
    """The blocks of a cluster; `kinds` name its devices from the fastest to the slowest."""
    devices = cluster.devices
    period = _period(cluster)
    places: list[tuple[int, int, int]] = []
    signatures: dict[tuple[float, ...], int] = {}
    for offset in range(min(period, len(devices))):
        for size in _sizes(len(devices), period, offset):
            signature = (size, *_block(cluster, devices, offset, size, kinds))
            places.append((offset, size, signatures.setdefault(signature, len(signatures))))
    offsets, sizes, numbers = (np.array(column) for column in zip(*places, strict=True))
    columns = Kinds(*(np.array(column) for column in zip(*signatures, strict=True)))
    return Blocks(devices, period, offsets, sizes, numbers, columns)


def _period(cluster: Cluster) -> int:
    """Positions repeat from machine to machine where all are alike, and from device to device where all links are."""
    machine = cluster.machines[0]
    if any(other != machine for other in cluster.machines):
        return len(cluster.devices)
    if len(machine.levels) <= 1 and (len(cluster.machines) == 1 or machine.devices == 1):
        return 1
    return machine.devices or 1


def _sizes(devices: int, period: int, offset: int) -> Iterator[int]:
    """Every size; from many devices on, large blocks are whole machines, or whole steps of a flat cluster."""
    step = max(period, -(-devices // _STEPS))
    for size in range(1, devices - offset + 1):
        if devices <= _MANY or size <= 2 * step or (offset == 0 and size % step == 0):
            yield size


def _block(
    cluster: Cluster, devices: Sequence[Device], offset: int, size: int, kinds: Sequence[str]
) -> tuple[float, float, bool, float, int]:
    end = len(devices) - offset
    block = devices[end - size : end]
    fabric = cost.ring_fabric(cluster, block)
    neighbours = [
        pair for pair in ((end - size - 1, end - size), (end - 1, end)) if pair[0] >= 0 and pair[1] < len(devices)
    ]
    border = min(
        (cluster.link(devices[one], devices[other]).bandwidth for one, other in neighbours), default=float("inf")
    )
    kind = max(kinds.index(cluster.kind_of(device)) for device in block)
    return fabric.bandwidth, fabric.latency, fabric.staged, border, kind


@dataclass(frozen=True)
class Rules:
    """How a mode turns a run of units on a block into seconds a batch."""

    mode: Mode
    microbatches: int
    staleness: int | None = None
    update_second_bytes: float = 0.0  # seconds the optimizer takes a byte of weights
    overhead: float = 0.0
    copies: float = 0.0  # seconds a byte of message that computes wait for
    handover: float = float("inf")  # bytes a second of the fastest message

    @property
    def is_even(self) -> bool:
        """Whether replicas take turns over batches, so that a share of a microbatch counts as one."""
        return self.mode in (Mode.STALE, Mode.PIPEDREAM)

    def seconds(self, runs: Runs, blocks: Kinds, pairs: Any = slice(None)) -> Array:
        """Seconds a batch of every run on every kind of block: kinds x pairs."""
        size = blocks.size[:, None]
        own = self.microbatches / size if self.is_even else np.ceil(self.microbatches / size)
        rounds = self.microbatches / size if self.mode is Mode.PIPEDREAM else 1.0
        entering, leaving = runs.entering[pairs], runs.leaving[pairs]
        compute = runs.compute[blocks.device][:, pairs] + 2 * self.overhead + (entering + leaving) * self.copies
        weights = runs.parameters[pairs] * cost.GRADIENT_BYTES
        reduction = cost.allreduce_seconds(weights, size, blocks.bandwidth[:, None], blocks.latency[:, None])
        backward = np.where(blocks.staged[:, None], 0.0, runs.backward[blocks.device][:, pairs])
        exposed = cost.exposed_seconds(reduction, backward, cost.tail_share(weights))
        lags = self.is_even & (runs.last[pairs] < runs.units) & (self.staleness != 0)
        waits = np.where(lags & ~blocks.staged[:, None], 0.0, exposed)
        update = weights * self.update_second_bytes
        busy = own * compute + rounds * (waits + update)
        border = np.minimum(blocks.border, self.handover)[:, None]
        link = own * np.maximum(entering, leaving) / border + rounds * reduction
        return np.maximum(busy, link)


@dataclass(frozen=True)
class Limits:
    """What fits: bytes of a device, and what a stage of some versions and depth takes of them."""

    memory: float
    moments: float
    staleness: int | None
    microbatches: int
    mode: Mode

    def versions(self, stages: int, behind: Array, size: Array) -> Array:
        """Versions of a stage with so many stages from it to the end, and devices behind it."""
        if self.mode is Mode.PIPEDREAM:
            return -(-(behind + size) // size)
        if self.mode is not Mode.STALE:
            return np.ones_like(behind + size)
        return np.full_like(behind + size, min(stages, (stages if self.staleness is None else self.staleness) + 1))

    def most_behind(self, runs: Runs, blocks: Blocks, stages: int) -> Array:
        """The most devices behind a stage with which it still fits: blocks x pairs, below 0 where it never does."""
        size = np.broadcast_to(blocks.size[:, None], (len(blocks.size), len(runs.first)))
        rounds = np.zeros_like(size)  # multiples of its own size that may stand behind it
        step = 1 << len(blocks.devices).bit_length()
        while step:
            fits = self.needs(runs, slice(None), stages, (rounds + step - 1) * size, size) <= self.memory
            rounds = np.where(fits, rounds + step, rounds)
            step //= 2
        return (rounds - 1) * size

    def needs(self, runs: Runs, pairs: Any, stages: int, behind: Array, size: Array) -> Array:
        """Bytes of a rank of each run on each block."""
        versions = self.versions(stages, behind, size)
        rounds = size if self.mode is Mode.PIPEDREAM else self.microbatches
        depth = np.minimum(-(-(behind + size) // size) + stages - 1, versions * -(-rounds // size))
        if stages == 1:
            depth = np.ones_like(depth)
        state = state_bytes(runs.parameters[pairs], versions, size, self.moments)
        return state + runs.saved[pairs] * depth + runs.transient[pairs]


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
    limits = _limits(setting, mode, microbatches, kinds, staleness) if limited else None
    cells = len(blocks.size) * sums[0].count * (sums[0].count + 1) // 2

    def over(points: Array | None, narrow: Callable[[], Search] | None = None) -> Search:
        runs = Runs.of(sums, setting.software, points)
        return Search(runs, blocks, rules.seconds(runs, blocks.kinds), limits, narrow)

    def narrow() -> Search:
        return over(_narrow_points(sums[0]))

    return narrow() if cells > _CELLS else over(None, narrow if cells > _LIMITED_CELLS else None)


def _narrow_points(sums: Sums) -> Array:
    """Where a chain is narrow: no more bytes are alive than at the points on either side. The ends are always there."""
    live = np.concatenate(([np.inf], sums.live[1:-1], [np.inf]))
    inner = [unit for unit in range(1, sums.count) if live[unit] <= live[unit - 1] and live[unit] < live[unit + 1]]
    return np.array([0, *inner, sums.count])


def make_rules(setting: Setting, mode: Mode, microbatches: int, kind: str, staleness: int | None = None) -> Rules:
    software = setting.software
    host = software.handover.bandwidth if software.handover else float("inf")
    return Rules(
        mode,
        microbatches,
        staleness,
        setting.update_seconds(1.0, kind) / cost.GRADIENT_BYTES,
        setting.overhead,
        1 / host if software.blocking else 0.0,
        float("inf") if software.blocking else host,
    )


def _limits(setting: Setting, mode: Mode, microbatches: int, kinds: Sequence[str], staleness: int | None) -> Limits:
    software = setting.software
    smallest = min(setting.devices(kind).memory for kind in kinds)
    return Limits(
        smallest - software.context,
        setting.moments + software.temporaries,
        staleness,
        microbatches,
        mode,
    )


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
        seconds = rules.seconds(runs, _as_kind(setting.cluster, devices, kinds))[0]
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


def _as_kind(cluster: Cluster, devices: Sequence[Device], kinds: Sequence[str]) -> Kinds:
    fabric = cost.ring_fabric(cluster, devices)
    others = [device for device in cluster.devices if device not in set(devices)]
    border = max((cluster.link(devices[0], other).bandwidth for other in others), default=float("inf"))
    kind = max(kinds.index(cluster.kind_of(device)) for device in devices)
    values = (len(devices), fabric.bandwidth, fabric.latency, fabric.staged, border, kind)
    return Kinds(*(np.array([value]) for value in values))


def pipedream_seconds(runs: Runs, blocks: Kinds, bandwidth: float) -> Array:
    """PipeDream's own formula on a flat network, for comparison with its plans: seconds a minibatch."""
    size = blocks.size[:, None]
    weights = runs.parameters * cost.GRADIENT_BYTES
    busy = (runs.compute[0] + 4 * (size - 1) * weights / (bandwidth * size)) / size
    entering = 2 * runs.before / (bandwidth * size)
    leaving = np.where(runs.first > 0, 2 * runs.behind / (bandwidth * size), 0.0)
    return np.maximum(busy, np.maximum(entering, leaving))
