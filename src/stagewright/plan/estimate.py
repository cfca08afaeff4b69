"""What a plan costs on a cluster: seconds per action, bytes per message, memory per rank."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from stagewright.cluster.specs import DeviceSpec, Software
from stagewright.cluster.topology import HOST, Cluster, Edge
from stagewright.config.optimizers import moments_of
from stagewright.errors import UserError
from stagewright.metrics import MIB
from stagewright.plan import cost
from stagewright.plan.make import with_ties
from stagewright.plan.memory import Memory, microbatches_held, weight_copies
from stagewright.plan.plan import Plan, Stage, Tie, TiedParameter
from stagewright.profile.profile import Table

_MOST_TURNS = 1024  # of messages between two stages that are looked at one by one
_REMEDIES = {  # by the largest part of a rank's memory
    "weights": "give the stage fewer units, or lower --staleness",
    "gradients": "give the stage fewer units",
    "optimizer": "give the stage fewer units",
    "activations": "use a smaller --batch, more --microbatches, or give the stage fewer units",
    "buffers": "use a smaller --batch or more --microbatches",
}


class UnitSums:
    """Prefix sums over a table's units, from which any contiguous segment is summed."""

    def __init__(self, table: Table) -> None:
        def column(name: str) -> np.ndarray:
            return np.array([getattr(unit, name) for unit in table.units], dtype=float)

        def prefix(name: str) -> np.ndarray:
            return np.concatenate(([0.0], np.cumsum(column(name))))

        def border(name: str) -> np.ndarray:
            return np.concatenate(([0.0], column(name)[:-1], [0.0]))

        self.names = [unit.name for unit in table.units]
        self.count = len(self.names)
        self.forward, self.backward = prefix("forward"), prefix("backward")
        self.parameters, self.frozen, self.saved = prefix("parameters"), prefix("frozen"), prefix("saved")
        self.live, self.live_gradient = border("live"), border("live_gradient")
        self.outputs, self.workspaces = column("output"), column("workspace")


@dataclass(frozen=True)
class Setting:
    """Where and how a model would run; `tables` gives its units on a kind of device at a microbatch size."""

    cluster: Cluster
    devices: Callable[[str], DeviceSpec]
    software: Software
    precision: str
    tables: Callable[[str, int], Table]
    optimizer: str = "sgd"
    input: int = 0  # values of one sample
    loader: float | None = None  # samples per second that a machine can load; None: data is made on the device
    overhead: float = 0.0  # seconds per compute beside its units
    covered: tuple[int, int] | None = None  # smallest and largest microbatch with a table; None: any size has one
    tied: Callable[[Sequence[str]], Sequence[TiedParameter]] | None = None  # of a model's cuts; None: not known
    is_averaged: bool = False  # an average of the weights is kept beside them (--ema)

    def covers(self, samples: int) -> bool:
        return self.covered is None or self.covered[0] <= samples <= self.covered[1]

    @property
    def moments(self) -> float:
        """Copies of the weights that the optimizer's state has, and their average."""
        return moments_of(self.optimizer) + self.is_averaged

    def sums(self, kind: str, samples: int) -> UnitSums:
        """The prefix sums of a table, made once."""
        return self._sums(kind, samples)

    @cached_property
    def _sums(self) -> Callable[[str, int], UnitSums]:
        return cache(lambda kind, samples: UnitSums(self.tables(kind, samples)))

    def update_seconds(self, parameters: float, kind: str) -> float:
        return float(cost.update_seconds(parameters, self.software.update_passes, self.devices(kind).bandwidth))


_Figure = Callable[["Estimate", int, int], float]


def _once_a_kind(compute: _Figure) -> _Figure:
    """A figure of a stage on a rank, computed once: ranks with one kind of device share it."""

    def figure(estimate: Estimate, stage: int, rank: int) -> float:
        key = (compute.__name__, stage, estimate.kind(rank))
        if key not in estimate.known:
            estimate.known[key] = compute(estimate, stage, rank)
        return estimate.known[key]

    return figure


class Estimate:
    """The costs of one plan in one setting."""

    def __init__(self, plan: Plan, setting: Setting) -> None:
        self.plan = plan
        self.setting = setting
        self.known: dict[tuple[str, int, str], float] = {}  # figures, by what they are of
        self._kinds = [setting.cluster.kind_of(device) for device in plan.devices]
        self._sums = {kind: setting.sums(kind, plan.samples) for kind in sorted(set(self._kinds))}
        self._any = self._sums[self._kinds[0]]  # for what is the same on every kind of device
        names = self._any.names
        self.bounds = [0, *(names.index(cut) for cut in plan.cuts), len(names)]

    def kind(self, rank: int) -> str:
        return self._kinds[rank]

    def _within(self, prefix: np.ndarray, stage: int) -> float:
        """The sum of a figure over the units of a stage."""
        return float(prefix[self.bounds[stage + 1]] - prefix[self.bounds[stage]])

    # --- Seconds of an action ---

    @_once_a_kind
    def forward(self, stage: int, rank: int) -> float:
        units = self._within(self._sums[self.kind(rank)].forward, stage)
        seconds = units * self._factor(stage, rank) + self.setting.overhead
        if stage == 0:
            seconds += self._input_seconds(rank)
        return seconds + self._copies(stage, backward=False)

    @_once_a_kind
    def backward(self, stage: int, rank: int) -> float:
        units = self._within(self._sums[self.kind(rank)].backward, stage)
        return units * self._factor(stage, rank) + self.setting.overhead + self._copies(stage, backward=True)

    @_once_a_kind
    def _factor(self, stage: int, rank: int) -> float:
        """How much longer the computes of a stage take than its units alone on one device."""
        software, ranks = self.setting.software, self.plan.stages[stage].ranks
        machines = len({self.plan.devices[rank].machine for rank in ranks})
        factor = float(cost.scaling_factor(len(ranks), machines, software, self.setting.precision))
        return factor / (software.parallel_efficiency if len(self.plan.stages) == 1 else 1.0)

    def _copies(self, stage: int, *, backward: bool) -> float:
        """Seconds of copying messages through the host, if the software's computes wait for these copies."""
        software = self.setting.software
        if not software.blocking or software.handover is None:
            return 0.0
        plan = self.plan.stages[stage]
        size = 0.0 if plan.is_first else self.boundary(stage - 1, backward=backward)
        size += 0.0 if plan.is_last else self.boundary(stage, backward=backward)
        return size / software.handover.bandwidth

    def _input_seconds(self, rank: int) -> float:
        """Seconds of copying a microbatch's images to the device, if the software's computes wait for the copy."""
        software, machine = self.setting.software, self.setting.cluster.machines[self.plan.devices[rank].machine]
        if not software.blocking or not machine.levels:
            return 0.0
        size = self.setting.input * self.plan.samples * software.input_bytes
        return size / (machine.levels[0].link.bandwidth * cost.PAGEABLE_SHARE)

    @_once_a_kind
    def update(self, stage: int, rank: int) -> float:
        """Seconds of the optimizer, of the copy of the new version into its slot, and of its average."""
        parameters, kind, setting = self.parameters(stage), self.kind(rank), self.setting
        seconds = setting.update_seconds(parameters, kind) + setting.software.overhead
        if self.plan.stages[stage].versions > 1:
            seconds += float(cost.update_seconds(parameters, 2, setting.devices(kind).bandwidth))
        if setting.is_averaged:
            seconds += float(cost.update_seconds(parameters, 3, setting.devices(kind).bandwidth))
        return seconds

    # --- Messages and sums ---

    def parameters(self, stage: int) -> float:
        """Trained numbers of a stage; a table counts those that several units use at the first of them."""
        arrived = sum(tied.size for tied in self._tied(stage) if stage != tied.homes[0])
        return self._within(self._any.parameters, stage) + arrived

    def own_parameters(self, stage: int) -> float:
        """Those of no other stage, whose gradient the stage's own all-reduce sums."""
        return max(0.0, self.parameters(stage) - sum(tied.size for tied in self._tied(stage)))

    def _tied(self, stage: int) -> list[TiedParameter]:
        return [tied for tied in self.plan.tied if stage in tied.homes]

    def boundary(self, stage: int, *, backward: bool) -> float:
        """Bytes of a message across the cut behind a stage."""
        return float((self._any.live_gradient if backward else self._any.live)[self.bounds[stage + 1]])

    def reduction(self, stage: int) -> float:
        """Seconds of a stage's all-reduce."""
        return self._reduction(stage, 0)

    @_once_a_kind
    def _reduction(self, stage: int, rank: int) -> float:
        fabric, size = self._fabrics[stage], self.own_parameters(stage) * cost.GRADIENT_BYTES
        units = self._any.parameters[self.bounds[stage] : self.bounds[stage + 1] + 1]
        largest = float(np.diff(units).max()) * cost.GRADIENT_BYTES
        carried = cost.carried_bytes(size, largest, self.setting.software, fabric)
        return self._sum_seconds(carried, self.plan.stages[stage].replicas, fabric)

    def exposed(self, stage: int) -> float:
        """Seconds of a stage's all-reduce that the last backward of a round does not hide."""
        return self._exposed(stage, 0)

    @_once_a_kind
    def _exposed(self, stage: int, rank: int) -> float:
        backward = min(self.backward(stage, rank) for rank in self.plan.stages[stage].ranks)
        hiding = cost.hidden_seconds(backward, self._fabrics[stage])
        tail = cost.tail_share(self.own_parameters(stage) * cost.GRADIENT_BYTES)
        return float(cost.exposed_seconds(self.reduction(stage), hiding, tail))

    def tie(self, tie: Tie) -> float:
        """Seconds of the sums of tied gradients, each over all ranks of its homes; nothing hides them."""
        total = 0.0
        for tied in tie.parameters:
            ranks = self.plan.ranks_of(tied.homes)
            total += self._sum_seconds(tied.size * cost.GRADIENT_BYTES, len(ranks), self._fabric(ranks))
        return total

    def _sum_seconds(self, size: float, ranks: int, fabric: cost.Fabric) -> float:
        return float(cost.allreduce_seconds(size, ranks, fabric.bandwidth, fabric.latency))

    def _fabric(self, ranks: Iterable[int]) -> cost.Fabric:
        return cost.ring_fabric(self.setting.cluster, [self.plan.devices[rank] for rank in ranks])

    @cached_property
    def _fabrics(self) -> list[cost.Fabric]:
        return [self._fabric(stage.ranks) for stage in self.plan.stages]

    # --- Bounds of a batch ---

    @cached_property
    def floor(self) -> float:
        """Seconds of a batch that no order of its actions beats: computes of ranks, bytes over edges, rounds of stages.

        Ranks that share a card compute in turns at the card's speed, or at once and slower; both take as long.
        """
        plan = self.plan
        busy = [0.0] * plan.world
        for stage in plan.stages:
            for rank in stage.ranks:
                busy[rank] += self._busy(stage.index, rank)
        for number, machine in enumerate(self.setting.cluster.machines):
            if machine.is_shared and machine.devices:
                own = [rank for rank, device in enumerate(plan.devices) if device.machine == number]
                together = sum(busy[rank] for rank in own) / machine.devices
                for rank in own:
                    busy[rank] = max(together, busy[rank] / machine.most_speedup)
        busiest_edge = max(self._loads.values(), default=0.0)
        return max(*busy, *map(self._rounds, plan.stages), busiest_edge)

    @_once_a_kind
    def _busy(self, stage: int, rank: int) -> float:
        """Seconds of a batch that a rank computes for a stage."""
        plan, own = self.plan, self.plan.stages[stage]
        each = self.forward(stage, rank) + self.backward(stage, rank)
        return each * plan.microbatches / own.replicas + plan.microbatches / own.round * self.update(stage, rank)

    def _rounds(self, stage: Stage) -> float:
        """Seconds of a batch's rounds on a stage with one version: each ends before the next begins.

        A round is as long as its slowest replica, which runs whole microbatches, and the sum and update behind it.
        """
        machines = self.setting.cluster.machines
        if stage.versions > 1 or any(machines[self.plan.devices[rank].machine].is_shared for rank in stage.ranks):
            return 0.0
        ranks = {self.kind(rank): rank for rank in stage.ranks}.values()
        seconds = [self.forward(stage.index, rank) + self.backward(stage.index, rank) for rank in ranks]
        least, most = stage.round // stage.replicas, -(-stage.round // stage.replicas)
        computes = max(least * max(seconds), most * min(seconds))
        exposed = self.exposed(stage.index) if stage.replicas > 1 else 0.0
        update = min(self.update(stage.index, rank) for rank in ranks)
        return (computes + exposed + update) * self.plan.microbatches / stage.round

    def edge_seconds(self) -> dict[str, float]:
        """Seconds of messages per batch over every edge, by its name."""
        found: dict[str, float] = defaultdict(float)
        for ((machine, level, group), _), seconds in self._loads.items():
            what = "host" if level == HOST else f"device {machine}:{group}" if level < 0 else f"level {level}"
            levels = len(self.setting.cluster.machines[machine].levels)
            name = f"network of machine {machine}" if level >= levels else f"machine {machine}, {what}"
            found[name] = max(found[name], seconds)
        return dict(found)

    @cached_property
    def _loads(self) -> dict[tuple[Edge, bool], float]:
        """Seconds of messages per batch over every edge and direction."""
        plan, cluster = self.plan, self.setting.cluster
        loads: dict[tuple[Edge, bool], float] = defaultdict(float)
        for stage, behind in itertools.pairwise(plan.stages):
            turns = math.lcm(stage.replicas, behind.replicas)
            if turns > _MOST_TURNS:
                continue
            for backward in (False, True):
                size = self.boundary(stage.index, backward=backward) * plan.microbatches / turns
                for turn in range(turns):
                    source, target = stage.rank_of(turn), behind.rank_of(turn)
                    if source != target:
                        ends = (plan.devices[source], plan.devices[target])
                        for edge, link in cluster.path(*(reversed(ends) if backward else ends)):
                            loads[edge] += size / link.bandwidth
        return loads

    # --- Memory ---

    @cached_property
    def memories(self) -> tuple[Memory, ...]:
        """The memory of every rank; ranks with one kind of device and the same stages have the same."""
        carried: list[list[Stage]] = [[] for _ in range(self.plan.world)]
        for stage in self.plan.stages:
            for rank in stage.ranks:
                carried[rank].append(stage)
        known: dict[object, Memory] = {}
        for kind, stages in zip(self._kinds, carried, strict=True):
            key = (kind, *(stage.index for stage in stages))
            if key not in known:
                known[key] = Memory.sum(self._stage_memory(stage, self._sums[kind]) for stage in stages)
        return tuple(
            known[kind, *(stage.index for stage in stages)] for kind, stages in zip(self._kinds, carried, strict=True)
        )

    def _stage_memory(self, stage: Stage, sums: UnitSums) -> Memory:
        software, index = self.setting.software, stage.index
        first, last = self.bounds[index], self.bounds[index + 1]
        weights = self.parameters(index) * cost.GRADIENT_BYTES
        own = -(-stage.round // stage.replicas)
        depth = int(microbatches_held(stage.depth, stage.versions, stage.round, stage.replicas))
        depth = depth if stage.count > 1 else 1
        if software.whole_batches:
            depth = own if stage.is_last else own * (software.in_flight or 1)
        pieces = own if software.whole_batches else 1  # microbatches that run as one
        messages = float(sums.live[first] + sums.live[last]) * pieces
        largest = float(sums.outputs[first:last].max()) * pieces
        borrowed = float(software.workspace)
        if not software.keeps_workspace:
            borrowed = min(borrowed, float(sums.workspaces[first:last].max()) * pieces)
        loads = stage.is_first and self.setting.loader is not None
        frozen = self._within(sums.frozen, index) * cost.GRADIENT_BYTES
        return Memory(
            weights=weights * weight_copies(stage.versions) + frozen,
            gradients=weights * stage.num_gradients,
            optimizer=weights * (self.setting.moments + software.temporaries),
            activations=self._within(sums.saved, index) * depth,
            buffers=2 * messages + 2 * largest + (software.loader if loads else 0),
            workspace=borrowed,
            context=float(software.context),
        )

    def limit(self, rank: int) -> int:
        return self.setting.devices(self.kind(rank)).memory

    @property
    def fits(self) -> bool:
        return all(memory.total <= self.limit(rank) for rank, memory in enumerate(self.memories))

    def require_fit(self) -> None:
        """Raise unless every rank's memory fits its device."""
        for rank, memory in enumerate(self.memories):
            limit = self.limit(rank)
            if memory.total > limit:
                raise UserError(
                    f"{self.plan.name_replica(rank)} needs {memory.total / MIB:,.0f} MiB but its device has "
                    f"{limit / MIB:,.0f}, {(memory.total - limit) / MIB:,.0f} too few; most of it is {memory.largest}: "
                    f"{_REMEDIES.get(memory.largest, 'use a device with more memory')}"
                )


def with_own_ties(plan: Plan, setting: Setting) -> Plan:
    """The plan with the ties that its cuts make of the setting's model; UserError where its mode can't have them."""
    if setting.tied is None or not (plan.cuts or plan.ties):
        return plan
    tied = setting.tied(plan.cuts)
    found = with_ties(plan, tied) if tied or plan.ties else plan
    if found.ties and setting.precision == "fp16" and not found.is_synchronous:
        raise UserError(
            f"precision fp16 needs mode sync where {found.ties[0]}, but stages lag; use --mode sync or bf16"
        )
    return found


def with_whole_batches(plan: Plan, software: Software) -> Plan:
    """The plan with stages deep enough for whole batches, if the software passes whole batches between stages."""
    if not software.whole_batches:
        return plan
    stages = []
    for stage in plan.stages:  # a replica's microbatches of a batch, once for its own stage and each stage behind it
        least = -(-stage.round // stage.replicas) * (stage.count - stage.index)
        stages.append(replace(stage, depth=max(stage.depth, least)))
    return replace(plan, stages=tuple(stages))
