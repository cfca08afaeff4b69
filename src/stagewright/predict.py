"""What a plan would do on a cluster: images a second, memory, bubble; from a profile or from the catalogue."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from stagewright.catalog.values import MIB, Catalogue, DeviceSpec, Software
from stagewright.cluster import Cluster, Level, Link, Machine
from stagewright.plan import cost
from stagewright.plan.estimate import Estimate, Setting, holding_batches
from stagewright.plan.memory import Memory
from stagewright.plan.plan import Plan
from stagewright.profile.analytic import analytic_table
from stagewright.profile.profile import Profile, Table
from stagewright.profile.shape import Shape
from stagewright.simulate import ClusterCosts, Steady, steady

if TYPE_CHECKING:
    from stagewright.model.units import Chain

IMAGENET = 1_281_167


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan in numbers, before it runs."""

    plan: Plan
    images_per_second: float
    steady: Steady
    memory: tuple[Memory, ...]  # of each rank
    limits: tuple[int, ...]
    traffic: float  # bytes a batch moves between devices
    bound: str  # what the time goes to

    @property
    def epoch_seconds(self) -> float:
        return IMAGENET / self.images_per_second

    @property
    def fits(self) -> bool:
        return all(memory.total <= limit for memory, limit in zip(self.memory, self.limits, strict=True))

    def describe(self) -> dict[str, Any]:
        """The prediction as it stands in JSON."""
        return {
            "plan": self.plan.describe(),
            "images_per_second": self.images_per_second,
            "epoch_seconds": self.epoch_seconds,
            "batch_seconds": self.plan.batch / self.images_per_second,
            "bubble": self.steady.bubble,
            "utilisation": list(self.steady.busy),
            "memory_mib": [memory.total / MIB for memory in self.memory],
            "memory_limit_mib": [limit / MIB for limit in self.limits],
            "memory_largest": [memory.largest for memory in self.memory],
            "traffic": self.traffic,
            "bound": self.bound,
            "fits": self.fits,
        }


def predict(plan: Plan, setting: Setting) -> Prediction:
    """Simulate a plan in a setting."""
    plan = holding_batches(plan, setting.software)
    estimate = Estimate(plan, setting)
    found = steady(plan, ClusterCosts(estimate))
    rate = plan.batch / found.batch_seconds
    bound = _bound(estimate, found)
    if setting.loader is not None:
        machines = {plan.devices[rank].machine for rank in plan.stages[0].ranks}
        loader = setting.loader * len(machines)
        if loader < rate:
            bound = "loading data"
        rate = cost.loaded_rate(rate, loader)
    memory = tuple(estimate.memory(rank) for rank in range(plan.world))
    limits = tuple(estimate.limit(rank) for rank in range(plan.world))
    return Prediction(plan, rate, found, memory, limits, traffic(estimate), bound)


def traffic(estimate: Estimate) -> float:
    """Bytes that devices send each other for one batch."""
    plan = estimate.plan
    total = 0.0
    for stage in plan.stages:
        rounds = plan.microbatches / stage.round
        total += 2 * (stage.replicas - 1) * estimate.parameters(stage.index) * cost.GRADIENT_BYTES * rounds
        if not stage.is_last:
            both = sum(estimate.boundary(stage.index, backward=backward) for backward in (False, True))
            apart = sum(
                stage.rank_of(microbatch) != plan.stages[stage.index + 1].rank_of(microbatch)
                for microbatch in range(plan.microbatches)
            )
            total += both * apart
    return total


def _bound(estimate: Estimate, found: Steady) -> str:
    """What the time of a batch goes to, in a few words."""
    plan = estimate.plan
    exposed = max(
        estimate.exposed(stage.index) * plan.microbatches / stage.round if stage.replicas > 1 else 0.0
        for stage in plan.stages
    )
    if len(plan.stages) == 1 or plan.is_synchronous:
        share = exposed / found.batch_seconds
        if share > 0.1:
            return f"all-reduce ({share:.0%})"
    busiest = max(range(plan.world), key=lambda rank: found.busy[rank])
    stage = plan.stages_of(busiest)[-1].index
    if found.busy[busiest] > 0.85:
        return "compute" if len(plan.stages) == 1 else f"compute of stage {stage}"
    return "waiting between stages" if len(plan.stages) > 1 else "all-reduce"


def analytic_setting(
    catalogue: Catalogue,
    cluster: Cluster,
    shapes: Sequence[Shape],
    software: Software,
    precision: str,
    *,
    optimizer: str = "sgd",
    loads: bool = False,
) -> Setting:
    """A model on hardware of the catalogue."""
    kept: dict[tuple[str, int], Table] = {}

    def tables(kind: str, samples: int) -> Table:
        if (kind, samples) not in kept:
            kept[kind, samples] = analytic_table(shapes, catalogue.device(kind), precision, samples, software)
        return kept[kind, samples]

    cores = min((machine.cores or 1 for machine in cluster.machines), default=1)
    loader = catalogue.decode * cores if loads else None
    return Setting(cluster, catalogue.device, software, precision, tables, optimizer, shapes[0].inputs, loader)


@dataclass(frozen=True)
class Study:
    """A model looked at without running it: its chain of units, and each unit for one sample."""

    name: str
    chain: Chain
    input: tuple[int, ...]
    shapes: tuple[Shape, ...]


@cache
def study(name: str, classes: int | None = None, image: int | None = None) -> Study:
    """Trace a zoo model or a user's own, on tensors without storage."""
    from stagewright.model.load import build_model
    from stagewright.model.output import running
    from stagewright.model.units import Chain
    from stagewright.model.zoo import ZOO, build
    from stagewright.profile.trace import on_meta, trace_shapes

    side = image or (ZOO[name].image if name in ZOO else 32)
    sample = (3, side, side)
    module = build_model(name, 0, classes).to("meta") if ":" in name else on_meta(lambda: build(name, classes))
    chain = Chain(module)
    with running(name, sample):
        shapes = trace_shapes(chain, sample)
    return Study(name, chain, sample, shapes)


def profile_setting(
    profile: Profile, cluster: Cluster | None, catalogue: Catalogue, precision: str, *, optimizer: str = "sgd"
) -> Setting:
    """A measured model, on the machine it was measured on or on a cluster of devices like it."""
    software = catalogue.system("stagewright" if profile.software == "stagewright" else profile.software)
    if cluster is None:
        cluster = measured_cluster(profile)

    def tables(kind: str, samples: int) -> Table:
        return profile.at(precision, samples)

    device: Callable[[str], DeviceSpec] = catalogue.device
    ceilings = profile.ceilings
    if ceilings is not None:
        software = replace(software, update_passes=ceilings.copy / ceilings.update, context=0, workspace=0)

        def measured(kind: str) -> DeviceSpec:
            memory = _own_memory() if kind == "cpu" else catalogue.device(kind).memory
            return DeviceSpec(kind, kind, memory, ceilings.copy, {"fp32": ceilings.matrix.get("fp32", 1.0)}, {})

        device = measured
    values = math.prod(profile.input) if profile.input else 0
    overhead = ceilings.overhead if ceilings else 0.0
    covered = profile.covered(precision)
    return Setting(cluster, device, software, precision, tables, optimizer, values, None, overhead, covered)


def measured_cluster(profile: Profile) -> Cluster:
    """The machine a profile was taken on: as many devices as ran together, over the links it measured."""
    ceilings = profile.ceilings
    if ceilings is None or not ceilings.transfers:
        raise ValueError(
            f"the profile of {profile.model} has no links; profile again with --together 2 "
            "(plan and simulate also take --cluster instead)"
        )
    slowest = min(ceilings.transfers, key=lambda transfer: transfer.bandwidth)
    on_cpu = profile.device == "cpu"
    link = Link("measured", slowest.bandwidth, slowest.latency, staged=on_cpu, reduction=ceilings.reduce)
    level = Level(link, (tuple(range(profile.together)),))
    return Cluster((Machine(profile.together, "cpu" if on_cpu else profile.device, (level,)),), "profiled")


def _own_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
