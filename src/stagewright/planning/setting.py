"""Settings: where and how a model would run, with the cost of its units, for the planner and the simulator.

`make_setting` is the only builder. The others call it for a configuration: `planning_setting` to choose cuts and lag,
`prediction_setting` to predict a run's speed, `memory_setting` its memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import Placement
from stagewright.cluster.specs import Catalog, DeviceSpec, Software
from stagewright.cluster.topology import Cluster, Level, Link, Machine
from stagewright.config.sections import Config
from stagewright.errors import UserError, counted
from stagewright.model.call import Form
from stagewright.model.chain import Chain
from stagewright.plan.estimate import Setting
from stagewright.plan.plan import Plan
from stagewright.planning.traced import Tied, tied_by, trace_model
from stagewright.profile.analytic import analytic_table
from stagewright.profile.profile import Ceilings, Profile, Table, read_profile
from stagewright.profile.shapes import Shape

PROFILED = "the profiled machine"  # the name of its cluster
_ANY_GPU = "h200"  # supports every precision; its memory does not matter here


def make_setting(
    units: Sequence[Shape] | Profile,
    cluster: Cluster | None,
    precision: str,
    *,
    optimizer: str = "sgd",
    is_averaged: bool = False,
    catalog: Catalog | None = None,
    software: str = "stagewright",
    loads: bool = False,
    tied: Tied | None = None,
) -> Setting:
    """A model on a cluster: by the catalog's arithmetic on the shapes of its units, or as a profile measured them.

    A profile also decides the software, and without a cluster the machine: the one it was taken on.
    `loads`: training data is loaded and decoded, not synthetic. `tied`: what its cuts tie (`tied_by`).
    """
    catalog = catalog or shipped()
    system = catalog.system(units.software if isinstance(units, Profile) else software)

    @cache
    def tables(kind: str, samples: int) -> Table:
        if isinstance(units, Profile):
            return units.at(precision, samples).of_stages()
        return analytic_table(units, catalog.device(kind), precision, samples, system).of_stages()

    if isinstance(units, Profile):
        cluster = cluster or _measured_cluster(units)
        values, loader, covered = math.prod(units.input) if units.input else 0, None, units.covered(precision)
    else:
        assert cluster is not None, "only a profile has a machine of its own"
        system = _unscaled(system) if all(machine.kind == "cpu" for machine in cluster.machines) else system
        cores = min((machine.cores or 1 for machine in cluster.machines), default=1)
        values, loader, covered = units[0].inputs, catalog.decode * cores if loads else None, None
    setting = Setting(cluster, catalog.device, system, precision, tables, optimizer, values, loader, covered=covered)
    setting = replace(setting, tied=tied, is_averaged=is_averaged)
    if isinstance(units, Profile) and units.ceilings is not None:
        return _with_ceilings(setting, units.ceilings)
    return setting


def _with_ceilings(setting: Setting, ceilings: Ceilings) -> Setting:
    """The setting with the peak rates that were measured beside the units, instead of the catalog's."""

    def measured(kind: str) -> DeviceSpec:
        memory = _own_memory() if kind == "cpu" else setting.devices(kind).memory
        return DeviceSpec(kind, kind, memory, ceilings.copy, {"fp32": ceilings.matrix.get("fp32", 1.0)}, {})

    plain = _unscaled(setting.software)
    software = replace(plain, update_passes=ceilings.copy / ceilings.update, context=0, workspace=0)
    return replace(setting, devices=measured, software=software, overhead=ceilings.overhead)


def _unscaled(software: Software) -> Software:
    """The software without what it loses on GPUs by steps and by scaling: on CPUs, and where a profile measured it."""
    return replace(software, overhead=0.0, jitter=0.0, half_jitter=0.0, network_jitter=0.0)


def _measured_cluster(profile: Profile) -> Cluster:
    """The machine that a profile was taken on: as many processes as ran together, over the measured links."""
    if profile.device != "cpu":
        raise UserError(f"the profile of {profile.model} does not say how many GPUs there are; give --cluster as well")
    level = Level(measured_link(profile), (tuple(range(profile.together)),))
    return Cluster((Machine(profile.together, "cpu", (level,)),), PROFILED)


def measured_link(profile: Profile) -> Link:
    """The slowest link between the processes of a profile, through host memory."""
    ceilings = profile.ceilings
    if ceilings is None or not ceilings.transfers:
        raise UserError(
            f"the profile of {profile.model} has no links; profile again with --together 2 "
            "(plan and simulate also take --cluster instead)"
        )
    slowest = min(ceilings.transfers, key=lambda transfer: transfer.bandwidth)
    return Link("measured", slowest.bandwidth, slowest.latency, staged=True, reduction=ceilings.reduce)


def _own_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --- Settings of a configuration --------------------------------------------------------------------------------------


def config_setting(
    config: Config,
    cluster: Cluster | None,
    profile: Profile | None = None,
    *,
    catalog: Catalog | None = None,
    loads: bool = False,
    form: Form | None = None,
) -> Setting:
    """A configuration on a cluster, by a profile or by the catalog; UserError if the model can't be traced.

    `form` is what the model takes, where that is no image.
    """
    common: dict[str, Any] = {
        "optimizer": config.optimizer.name,
        "is_averaged": config.optimizer.ema is not None,
        "catalog": catalog,
        "loads": loads,
    }
    if profile is not None:
        return make_setting(profile, cluster, config.run.precision, **common)
    traced = trace_model(config.model.name, config.model.classes, config.data.image, form, config.model.freeze)
    return make_setting(traced.shapes, cluster, config.run.precision, tied=traced.tied, **common)


def planning_setting(config: Config, chain: Chain, placement: Placement) -> Setting | None:
    """The setting to plan a run in: by its profile if it has one, else by the catalog's generic core.

    None if there is no profile and the model can't be traced.
    """
    if config.plan.profile is not None:
        profile = read_profile(config.plan.profile)
        profile.require(config.model.name, chain.units)
        return replace(config_setting(config, None, profile), tied=tied_by(chain))
    try:
        setting = config_setting(config, _local_cluster(placement), form=in_single(chain.example.form))
    except UserError:
        return None
    names = [unit.name for unit in setting.tables("cpu", 1).units]
    if not set(names) <= set(chain.units):  # traced without storage it has other units
        return None
    return replace(setting, tied=tied_by(chain))


def in_single(form: Form) -> Form:
    """The form with real numbers in single precision, in which models are traced."""
    return replace(form, dtypes=tuple("float32" if "float" in kind else kind for kind in form.dtypes))


def _local_cluster(placement: Placement) -> Cluster:
    """CPU machines with as many processes as the placement's highest index, on an ordinary network."""
    devices = [device for stage in placement for device in stage]
    count = 1 + max(device.index for device in devices)
    level = Level(shipped().links["memory"], (tuple(range(count)),))
    machines = (Machine(count, "cpu", (level,)),) * (1 + max(device.machine for device in devices))
    return Cluster(machines, "these machines", shipped().links["net-10g"] if len(machines) > 1 else None)


def prediction_setting(config: Config, plan: Plan) -> Setting | None:
    """The setting to predict a run's speed in: by its profile; None if it has none."""
    if config.plan.profile is None:
        return None
    profile = read_profile(config.plan.profile)
    if plan.world > max(1, profile.together):
        raise UserError(
            f"the profile was taken with {counted(profile.together, 'process', 'es')} at once but the "
            f"plan has {counted(plan.world, 'rank')}; "
            f"profile again with --together {plan.world}"
        )
    alone = Cluster((Machine(1, "cpu"),), PROFILED) if plan.world == 1 else None
    return config_setting(config, alone, profile)


def memory_setting(config: Config, plan: Plan, form: Form | None = None) -> Setting:
    """The setting of a run for its memory only, on devices without links; UserError if the model can't be traced.

    `form` is what the model takes, where that is no image.
    """
    on_cpu = config.run.device == "cpu"
    machine = Machine(1 + max(device.index for device in plan.devices), "cpu" if on_cpu else _ANY_GPU)
    cluster = Cluster((machine,) * (1 + max(device.machine for device in plan.devices)))
    setting = config_setting(config, cluster, form=None if form is None else in_single(form))
    software = replace(setting.software, context=0, workspace=0) if on_cpu else setting.software  # those are of CUDA
    return replace(setting, software=software)
