"""Settings: where and how a model would run, with the cost of its units, for the planner and the simulator.

`analytic_setting` takes costs from the catalog's arithmetic, `profile_setting` from a measured profile;
`planning_setting` and `memory_setting` are those of a configuration.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import Placement
from stagewright.cluster.specs import Catalog, DeviceSpec, Software
from stagewright.cluster.topology import Cluster, Level, Link, Machine
from stagewright.config.sections import Config
from stagewright.model.cut import Chain
from stagewright.model.load import build_model
from stagewright.model.walk import model_errors
from stagewright.model.zoo import ZOO, build
from stagewright.plan.estimate import Setting
from stagewright.plan.plan import Plan
from stagewright.profile.analytic import analytic_table
from stagewright.profile.profile import Profile, Table, read_profile
from stagewright.profile.shapes import Shape, on_meta, trace_shapes

_ANY_GPU = "h200"  # supports every precision; its memory does not matter here


class Untraceable(Exception):
    """The shapes of the model's units can't be traced."""


@dataclass(frozen=True)
class TracedModel:
    """A model traced without running it: its chain of units, and the shape of each unit for one sample."""

    chain: Chain
    shapes: tuple[Shape, ...]


@cache
def trace_model(name: str, classes: int | None = None, image: int | None = None) -> TracedModel:
    """Trace a zoo model or a user's own, on tensors without storage."""
    side = image or (ZOO[name].image if name in ZOO else 32)
    sample = (3, side, side)
    module = build_model(name, 0, classes).to("meta") if ":" in name else on_meta(lambda: build(name, classes))
    chain = Chain(module)
    with model_errors(name, sample):
        return TracedModel(chain, trace_shapes(chain, sample))


def analytic_setting(
    catalog: Catalog,
    cluster: Cluster,
    shapes: Sequence[Shape],
    software: Software,
    precision: str,
    *,
    optimizer: str = "sgd",
    loads: bool = False,
) -> Setting:
    """A model on hardware of the catalog; `loads`: training data is loaded and decoded, not synthetic."""
    kept: dict[tuple[str, int], Table] = {}

    def tables(kind: str, samples: int) -> Table:
        if (kind, samples) not in kept:
            kept[kind, samples] = analytic_table(shapes, catalog.device(kind), precision, samples, software)
        return kept[kind, samples]

    cores = min((machine.cores or 1 for machine in cluster.machines), default=1)
    loader = catalog.decode * cores if loads else None
    return Setting(cluster, catalog.device, software, precision, tables, optimizer, shapes[0].inputs, loader)


def config_setting(config: Config, cluster: Cluster, catalog: Catalog, *, loads: bool = False) -> Setting:
    """A configuration on hardware of the catalog; raises ValueError if the model can't be traced."""
    shapes = trace_model(config.model.name, config.model.classes, config.data.image).shapes
    software, optimizer = catalog.system("stagewright"), config.optimizer.name
    return analytic_setting(catalog, cluster, shapes, software, config.run.precision, optimizer=optimizer, loads=loads)


def profile_setting(
    profile: Profile, cluster: Cluster | None, catalog: Catalog, precision: str, *, optimizer: str = "sgd"
) -> Setting:
    """A measured model, on the machine it was measured on or on a cluster of devices like it."""
    software = catalog.system(profile.software)
    if cluster is None:
        cluster = measured_cluster(profile)

    def tables(kind: str, samples: int) -> Table:
        return profile.at(precision, samples)

    device: Callable[[str], DeviceSpec] = catalog.device
    ceilings = profile.ceilings
    if ceilings is not None:
        software = replace(software, update_passes=ceilings.copy / ceilings.update, context=0, workspace=0)

        def measured(kind: str) -> DeviceSpec:
            memory = _own_memory() if kind == "cpu" else catalog.device(kind).memory
            return DeviceSpec(kind, kind, memory, ceilings.copy, {"fp32": ceilings.matrix.get("fp32", 1.0)}, {})

        device = measured
    values = math.prod(profile.input) if profile.input else 0
    overhead = ceilings.overhead if ceilings else 0.0
    covered = profile.covered(precision)
    return Setting(cluster, device, software, precision, tables, optimizer, values, None, overhead, covered)


def measured_cluster(profile: Profile) -> Cluster:
    """The machine that a profile was taken on: as many devices as ran together, over the measured links."""
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


def memory_setting(config: Config, plan: Plan) -> Setting:
    """The setting of a run, for its memory only; raises ValueError if the model can't be traced."""
    if config.run.device != "cpu":
        return config_setting(config, unconnected_cluster(plan), shipped())
    setting = config_setting(config, unconnected_cluster(plan, "cpu"), shipped())
    return replace(setting, software=replace(setting.software, context=0, workspace=0))  # those are of CUDA


def unconnected_cluster(plan: Plan, kind: str = _ANY_GPU) -> Cluster:
    """Machines with the devices that a plan names, without links: enough to compute its memory."""
    count = 1 + max(device.index for device in plan.devices)
    machines = 1 + max(device.machine for device in plan.devices)
    return Cluster((Machine(count, kind),) * machines)


def planning_setting(config: Config, chain: Chain, placement: Placement) -> Setting:
    """The setting of a run for its planner: by its profile if it has one, else by the catalog's generic core.

    Raises Untraceable if there is no profile and the model can't be traced.
    """
    if config.plan.profile is not None:
        profile = read_profile(config.plan.profile)
        profile.require(config.model.name, chain.units)
        return profile_setting(profile, None, shipped(), config.run.precision, optimizer=config.optimizer.name)
    try:
        return config_setting(config, _local_cluster(placement), shipped())
    except ValueError as error:
        raise Untraceable from error


def _local_cluster(placement: Placement) -> Cluster:
    """CPU machines with as many processes as the placement's highest index, on an ordinary network."""
    devices = [device for stage in placement for device in stage]
    count = 1 + max(device.index for device in devices)
    level = Level(shipped().links["memory"], (tuple(range(count)),))
    machines = (Machine(count, "cpu", (level,)),) * (1 + max(device.machine for device in devices))
    return Cluster(machines, "these machines", shipped().links["net-10g"] if len(machines) > 1 else None)
