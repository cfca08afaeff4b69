"""What a plan costs on a cluster: seconds per action, bytes per message, memory per rank."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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


class UnitSums:
    """Prefix sums over a table's units, from which any contiguous segment is summed."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.names = [unit.name for unit in table.units]
        self.forward = _prefix([unit.forward for unit in table.units])
        self.backward = _prefix([unit.backward for unit in table.units])
        self.parameters = _prefix([unit.parameters for unit in table.units])
        self.frozen = _prefix([unit.frozen for unit in table.units])
        self.saved = _prefix([unit.saved for unit in table.units])
        self.live = np.array([0.0, *(unit.live for unit in table.units[:-1]), 0.0])
        self.live_gradient = np.array([0.0, *(unit.live_gradient for unit in table.units[:-1]), 0.0])
        self.outputs = np.array([unit.output for unit in table.units], dtype=float)
        self.workspaces = np.array([unit.workspace for unit in table.units], dtype=float)

    @property
    def count(self) -> int:
        return len(self.names)


def _prefix(values: Sequence[float]) -> np.ndarray:
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=float))))


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
        key = (kind, samples)
        if key not in self._known_sums:
            self._known_sums[key] = UnitSums(self.tables(kind, samples))
        return self._known_sums[key]

    @cached_property
    def _known_sums(self) -> dict[tuple[str, int], UnitSums]:
        return {}

    def update_seconds(self, parameters: float, kind: str) -> float:
        return float(cost.update_seconds(parameters, self.software.update_passes, self.devices(kind).bandwidth))


class Estimate:
    """The costs of one plan in one setting."""

    def __init__(self, plan: Plan, setting: Setting) -> None:
        self.plan = plan
        self.setting = setting
        self._sums = {
            kind: setting.sums(kind, plan.samples)
            for kind in sorted({setting.cluster.kind_of(device) for device in plan.devices})
        }
        self._known: dict[tuple[object, ...], float] = {}
        self._known_memory: dict[tuple[tuple[int, ...], str], Memory] = {}
        names = next(iter(self._sums.values())).names
        self.bounds = [0, *(names.index(cut) for cut in plan.cuts), len(names)]

    def _of(self, rank: int) -> UnitSums:
        return self._sums[self.kind(rank)]

    def kind(self, rank: int) -> str:
        return self.setting.cluster.kind_of(self.plan.devices[rank])

    def forward(self, stage: int, rank: int) -> float:
        return self._once(("forward", stage, self.kind(rank)), lambda: self._compute(stage, rank, backward=False))

    def backward(self, stage: int, rank: int) -> float:
        return self._once(("backward", stage, self.kind(rank)), lambda: self._compute(stage, rank, backward=True))

    def _once(self, key: tuple[object, ...], compute: Callable[[], float]) -> float:
        """A figure that ranks with one kind of device share, computed once."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def _compute(self, stage: int, rank: int, *, backward: bool) -> float:
        first, last = self.bounds[stage], self.bounds[stage + 1]
        sums = self._of(rank)
        column = sums.backward if backward else sums.forward
        seconds = float(column[last] - column[first]) * self._factor(stage) + self.setting.overhead
        if stage == 0 and not backward:
            seconds += self._input_seconds(rank)
        return seconds + self._copies(stage, backward=backward)

    def _factor(self, stage: int) -> float:
        """How much longer the computes of a stage take than its units alone on one device."""
        return self._once(("factor", stage), lambda: self._scaling(stage))

    def _scaling(self, stage: int) -> float:
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

    def parameters(self, stage: int) -> float:
        """Trained numbers of a stage; a table counts those that several units use at the first of them."""
        sums = self._of(0)
        arrived = sum(tied.size for tied in self._tied(stage) if stage != tied.homes[0])
        return float(sums.parameters[self.bounds[stage + 1]] - sums.parameters[self.bounds[stage]]) + arrived

    def own_parameters(self, stage: int) -> float:
        """Those of no other stage, whose gradient the stage's own all-reduce sums."""
        return max(0.0, self.parameters(stage) - sum(tied.size for tied in self._tied(stage)))

    def _tied(self, stage: int) -> list[TiedParameter]:
        return [tied for tie in self.plan.ties for tied in tie.parameters if stage in tied.homes]

    def update(self, stage: int, rank: int) -> float:
        """Seconds of the optimizer, of the copy of the new version into its slot, and of its average."""
        return self._once(("update", stage, self.kind(rank)), lambda: self._update(stage, rank))

    def _update(self, stage: int, rank: int) -> float:
        parameters, kind = self.parameters(stage), self.kind(rank)
        seconds = self.setting.update_seconds(parameters, kind) + self.setting.software.overhead
        if self.plan.stages[stage].versions > 1:
            seconds += float(cost.update_seconds(parameters, 2, self.setting.devices(kind).bandwidth))
        if self.setting.is_averaged:
            seconds += float(cost.update_seconds(parameters, 3, self.setting.devices(kind).bandwidth))
        return seconds

    def boundary(self, stage: int, *, backward: bool) -> float:
        """Bytes of a message across the cut behind a stage."""
        sums = self._of(0)
        return float((sums.live_gradient if backward else sums.live)[self.bounds[stage + 1]])

    def reduction(self, stage: int) -> float:
        """Seconds of a stage's all-reduce."""
        ranks, size = self.plan.stages[stage].ranks, self.own_parameters(stage) * cost.GRADIENT_BYTES

        def seconds() -> float:
            fabric = self._fabrics[stage]
            largest = float(np.diff(self._of(0).parameters[self.bounds[stage] : self.bounds[stage + 1] + 1]).max())
            carried = cost.carried_bytes(size, largest * cost.GRADIENT_BYTES, self.setting.software, fabric)
            return float(cost.allreduce_seconds(carried, len(ranks), fabric.bandwidth, fabric.latency))

        return self._once(("reduction", stage), seconds)

    def exposed(self, stage: int) -> float:
        """Seconds of a stage's all-reduce that the last backward of a round does not hide."""

        def seconds() -> float:
            backward = min(self.backward(stage, rank) for rank in self.plan.stages[stage].ranks)
            hiding = cost.hidden_seconds(backward, self._fabrics[stage])
            tail = cost.tail_share(self.own_parameters(stage) * cost.GRADIENT_BYTES)
            return float(cost.exposed_seconds(self.reduction(stage), hiding, tail))

        return self._once(("exposed", stage), seconds)

    def tie(self, tie: Tie) -> float:
        """Seconds of the sums of tied gradients, each over all ranks of its homes; nothing hides them."""

        def seconds() -> float:
            total = 0.0
            for tied in tie.parameters:
                ranks = self.plan.ranks_of(tied.homes)
                fabric = cost.ring_fabric(self.setting.cluster, [self.plan.devices[rank] for rank in ranks])
                size = tied.size * cost.GRADIENT_BYTES
                total += float(cost.allreduce_seconds(size, len(ranks), fabric.bandwidth, fabric.latency))
            return total

        return self._once(("tie", tie.stages), seconds)

    @cached_property
    def _fabrics(self) -> list[cost.Fabric]:
        return [
            cost.ring_fabric(self.setting.cluster, [self.plan.devices[rank] for rank in stage.ranks])
            for stage in self.plan.stages
        ]

    def memory(self, rank: int) -> Memory:
        """The memory of a rank."""
        return self._memory_of(tuple(self._stages_of[rank]), self.kind(rank), rank)

    @cached_property
    def memories(self) -> tuple[Memory, ...]:
        """The memory of every rank; ranks with one kind of device and the same stages have the same."""
        return tuple(self.memory(rank) for rank in range(self.plan.world))

    @cached_property
    def _stages_of(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.plan.world)]
        for stage in self.plan.stages:
            for rank in stage.ranks:
                found[rank].append(stage.index)
        return found

    def _memory_of(self, stages: tuple[int, ...], kind: str, rank: int) -> Memory:
        key = (stages, kind)
        if key not in self._known_memory:
            parts = (self._stage_memory(self.plan.stages[index], rank) for index in stages)
            self._known_memory[key] = Memory.sum(parts)
        return self._known_memory[key]

    @property
    def fits(self) -> bool:
        return all(memory.total <= self.limit(rank) for rank, memory in enumerate(self.memories))

    @cached_property
    def floor(self) -> float:
        """Seconds of a batch that no order of its actions beats: computes of ranks, bytes over edges, rounds of stages.

        Ranks that share a card compute in turns at the card's speed, or at once and slower; both take as long.
        """
        plan = self.plan
        busy = [0.0] * plan.world
        for stage in plan.stages:
            rounds = plan.microbatches / stage.round
            alike: dict[str, float] = {}
            for rank in stage.ranks:
                kind = self.kind(rank)
                if kind not in alike:
                    each = self.forward(stage.index, rank) + self.backward(stage.index, rank)
                    alike[kind] = each * plan.microbatches / stage.replicas + rounds * self.update(stage.index, rank)
                busy[rank] += alike[kind]
        for number, machine in enumerate(self.setting.cluster.machines):
            if machine.is_shared and machine.devices:
                own = [rank for rank, device in enumerate(plan.devices) if device.machine == number]
                together = sum(busy[rank] for rank in own) / machine.devices
                for rank in own:
                    busy[rank] = max(together, busy[rank] / machine.most_speedup)
        return max(*busy, *map(self._rounds, plan.stages), self._busiest_edge())

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

    def _busiest_edge(self) -> float:
        """Seconds of messages per batch over the busiest edge."""
        return max(self._loads.values(), default=0.0)

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

    def _stage_memory(self, stage: Stage, rank: int) -> Memory:
        software, sums = self.setting.software, self._of(rank)
        first, last = self.bounds[stage.index], self.bounds[stage.index + 1]
        weights = self.parameters(stage.index) * cost.GRADIENT_BYTES
        own = -(-stage.round // stage.replicas)
        depth = int(microbatches_held(stage.depth, stage.versions, stage.round, stage.replicas))
        depth = depth if stage.count > 1 else 1
        if software.whole_batches:
            depth = own if stage.is_last else own * (software.in_flight or 1)
        pieces = own if software.whole_batches else 1  # microbatches that run as one
        saved = float(sums.saved[last] - sums.saved[first])
        frozen = float(sums.frozen[last] - sums.frozen[first])
        messages = float(sums.live[first] + sums.live[last]) * pieces
        largest = float(sums.outputs[first:last].max()) * pieces
        borrowed = float(software.workspace)
        if not software.keeps_workspace:
            borrowed = min(borrowed, float(sums.workspaces[first:last].max()) * pieces)
        loads = stage.is_first and self.setting.loader is not None
        return Memory(
            weights=weights * weight_copies(stage.versions) + frozen * cost.GRADIENT_BYTES,
            gradients=weights * stage.num_gradients,
            optimizer=weights * (self.setting.moments + software.temporaries),
            activations=saved * depth,
            buffers=2 * messages + 2 * largest + (software.loader if loads else 0),
            workspace=borrowed,
            context=float(software.context),
        )

    def limit(self, rank: int) -> int:
        return self.setting.devices(self.kind(rank)).memory

    def require_fit(self) -> None:
        """Raise unless every rank's memory fits its device."""
        for rank, memory in enumerate(self.memories):
            limit = self.limit(rank)
            if memory.total > limit:
                raise UserError(
                    f"{self.plan.name_replica(rank)} needs {memory.total / MIB:,.0f} MiB but its device has "
                    f"{limit / MIB:,.0f}, {(memory.total - limit) / MIB:,.0f} too few; most of it is {memory.largest}: "
                    f"{_remedy(memory.largest)}"
                )


def _remedy(part: str) -> str:
    return {
        "weights": "give the stage fewer units, or lower --staleness",
        "gradients": "give the stage fewer units",
        "optimizer": "give the stage fewer units",
        "activations": "use a smaller --batch, more --microbatches, or give the stage fewer units",
        "buffers": "use a smaller --batch or more --microbatches",
    }.get(part, "use a device with more memory")


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
