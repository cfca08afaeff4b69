"""Random clusters, models and batches for the laws of the planner, and random plans by hand."""

from __future__ import annotations

import random
from dataclasses import replace

from stagewright.cluster.specs import DeviceSpec, Software
from stagewright.cluster.topology import Cluster, Level, Link, Machine
from stagewright.plan.estimate import Setting
from stagewright.plan.make import divisors, make_plan
from stagewright.plan.plan import Mode, Plan
from stagewright.profile.profile import Table, Unit

SPEEDS = {"fast": 1.0, "middle": 1.7, "slow": 3.0}
SOFTWARE = Software("made", "made", 1.0, context=0, workspace=0)


def random_cluster(draw: random.Random) -> Cluster:
    """One to three machines of up to four devices; some copy through a host."""
    machines = []
    for _ in range(draw.randint(1, 3)):
        count = draw.randint(1, 3)
        link = Link("inside", draw.uniform(0.5e9, 2e10), 1e-5, staged=draw.random() < 0.3)
        level = Level(link, (tuple(range(count)),))
        host = draw.uniform(1e9, 2e10) if link.staged else None
        machines.append(Machine(count, draw.choice(list(SPEEDS)), (level,), host=host))
    network = Link("network", draw.uniform(0.1e9, 5e9), 3e-5)
    return Cluster(tuple(machines), "made", network)


def random_units(draw: random.Random) -> list[Unit]:
    """A chain of three to seven units, for one sample."""
    units = []
    for index in range(draw.randint(3, 7)):
        live = draw.randint(1, 200_000)
        parameters = draw.choice((0, draw.randint(0, 200_000), draw.randint(0, 5_000_000)))
        forward = draw.uniform(1e-4, 2e-3)
        units.append(
            Unit(f"u{index}", "made", forward, 2 * forward, parameters, live, live, live, draw.randint(0, 1_000_000))
        )
    return units


def make_made_setting(cluster: Cluster, units: list[Unit], memory: float = 1e12) -> Setting:
    """A setting whose units take time in proportion to samples and to the kind of device."""

    def tables(kind: str, samples: int) -> Table:
        factor = SPEEDS[kind] * samples
        scaled = (
            replace(
                unit,
                forward=unit.forward * factor + 1e-5,
                backward=unit.backward * factor + 1e-5,
                output=unit.output * samples,
                live=unit.live * samples,
                live_gradient=unit.live_gradient * samples,
                saved=unit.saved * samples,
            )
            for unit in units
        )
        return Table("fp32", samples, tuple(scaled))

    def device(kind: str) -> DeviceSpec:
        return DeviceSpec(kind, kind, int(memory), 5e11, {"fp32": 1e13}, {})

    return Setting(cluster, device, SOFTWARE, "fp32", tables)


def random_setting(draw: random.Random) -> tuple[Setting, int]:
    return make_made_setting(random_cluster(draw), random_units(draw)), draw.choice((8, 12, 16, 24, 32))


def hand_plan(draw: random.Random, setting: Setting, batch: int) -> Plan:
    """A plan as somebody might write it: some devices, some cuts, some microbatches, any mode."""
    devices = list(setting.cluster.devices)
    if draw.random() < 0.3:
        draw.shuffle(devices)
    devices = devices[: draw.randint(1, len(devices))]
    names = [unit.name for unit in setting.tables(setting.cluster.machines[0].kind, 1).units]
    stages = draw.randint(1, min(4, len(devices), len(names)))
    bounds = sorted(draw.sample(range(1, len(devices)), stages - 1))
    placement = tuple(tuple(devices[low:high]) for low, high in zip([0, *bounds], [*bounds, len(devices)], strict=True))
    cuts = tuple(names[index] for index in sorted(draw.sample(range(1, len(names)), stages - 1)))
    widest = max(len(stage) for stage in placement)
    counts = [count for count in divisors(batch) if widest <= count] or [batch]
    mode = Mode.DP if stages == 1 else draw.choice((Mode.SYNC, Mode.STALE))
    return make_plan(placement, batch=batch, microbatches=draw.choice(counts[:4]), mode=mode, cuts=cuts)
