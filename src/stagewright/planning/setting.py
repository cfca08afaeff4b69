"""Settings: where and how a model would run, with the cost of its units, for the planner and the simulator.

`make_setting` is the only builder; `run_setting` has those of a run that is to be trained.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from stagewright.cluster.catalog import shipped
from stagewright.cluster.specs import Catalog, DeviceSpec, Software
from stagewright.cluster.topology import Cluster, Level, Link, Machine
from stagewright.config.commands import OURS
from stagewright.config.sections import Config
from stagewright.errors import UserError
from stagewright.plan.estimate import Setting
from stagewright.planning.known import Tied, Traced
from stagewright.profile.analytic import analytic_table
from stagewright.profile.profile import Ceilings, Profile, Table
from stagewright.profile.shapes import Shape

PROFILED = "the profiled machine"  # the name of its cluster


def make_setting(
    units: Sequence[Shape] | Profile,
    cluster: Cluster | None,
    precision: str,
    *,
    optimizer: str = "sgd",
    is_averaged: bool = False,
    catalog: Catalog | None = None,
    software: str = OURS,
    loads: bool = False,
    tied: Tied | None = None,
) -> Setting:
    """A model on a cluster: by the catalog's arithmetic on the shapes of its units, or as a profile measured them.

    A profile also decides the software, and without a cluster the machine: the one it was taken on.
    `loads`: training data is loaded and decoded, not synthetic. `tied`: what its cuts tie.
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


def setting_of(
    config: Config,
    model: Traced | None,
    cluster: Cluster | None,
    profile: Profile | None = None,
    *,
    catalog: Catalog | None = None,
    software: str = OURS,
    loads: bool = False,
) -> Setting:
    """A configuration on a cluster: by a profile, or by the shapes of its model."""
    units = profile if profile is not None else None if model is None else model.shapes
    assert units is not None, "neither a profile nor a model"
    return make_setting(
        units,
        cluster,
        config.run.precision,
        optimizer=config.optimizer.name,
        is_averaged=config.optimizer.ema is not None,
        catalog=catalog,
        software=software,
        loads=loads,
        tied=None if model is None else model.tied,
    )


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
