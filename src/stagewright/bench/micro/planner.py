"""`bench planner`: how long the search and the simulator take; sizes double, so that the growth shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from stagewright.cluster.catalog import shipped
from stagewright.cluster.topology import Cluster, Device, Level, Machine
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode
from stagewright.plan.search import make_search
from stagewright.planning.setting import analytic_setting, trace_model
from stagewright.planning.simulate import balanced_costs, simulate
from stagewright.report.live.terminal import plain_table

Progress = Callable[[str], None]
_SAMPLES = 32  # of the batch per device


@dataclass(frozen=True, slots=True)
class Timing:
    """One search or simulation: its size, how long it took, and the goal."""

    work: str
    size: str
    seconds: float
    goal: float | None  # seconds
    result: str


def flat_cluster(devices: int) -> Cluster:
    """All GPUs behind one switch."""
    level = Level(shipped().links["pcie3-pix"], (tuple(range(devices)),))
    return Cluster((Machine(devices, "v100-sxm2-16", (level,)),), f"{devices} flat")


def machines_cluster(machines: int, each: int) -> Cluster:
    """Machines with GPUs connected by NVLink, on one network."""
    level = Level(shipped().links["nvlink2"], (tuple(range(each)),))
    machine = Machine(each, "v100-sxm2-16", (level,))
    return Cluster((machine,) * machines, f"{machines}x{each}", shipped().links["net-100g"])


def measure(progress: Progress) -> list[Timing]:
    """Time every size once."""
    rows = []
    for devices, goal in ((16, 0.1), (32, None), (64, None)):
        rows.append(_search("resnet50", flat_cluster(devices), goal, progress))
    for machines, goal in ((2, 2.0), (4, None), (8, None), (32, None), (64, None), (128, 20.0)):
        rows.append(_search("resnet152", machines_cluster(machines, 8), goal, progress))
    rows.append(_search("resnet152", flat_cluster(1024), 20.0, progress))
    for replicas, microbatches, goal in ((32, 64, None), (64, 128, None), (128, 256, 30.0)):
        rows.append(_simulation(8, replicas, microbatches, 20, goal, progress))
    return rows


def _search(model: str, cluster: Cluster, goal: float | None, progress: Progress) -> Timing:
    """Time the search alone, including memory limits; the model's shapes are already computed."""
    devices = len(cluster.devices)
    progress(f"{model} on {cluster.name}")
    catalog = shipped()
    setting = analytic_setting(catalog, cluster, trace_model(model).shapes, catalog.system("stagewright"), "fp32")
    setting.tables("v100-sxm2-16", _SAMPLES)
    begun = time.perf_counter()
    found = make_search(setting, Mode.STALE, _SAMPLES * devices, devices).best()
    seconds = time.perf_counter() - begun
    shape = "nothing fits" if found is None else "-".join(map(str, found.sizes))
    return Timing(f"search {model}", cluster.name, seconds, goal, shape if len(shape) < 20 else f"{shape[:17]}...")


def _simulation(
    stages: int, replicas: int, microbatches: int, batches: int, goal: float | None, progress: Progress
) -> Timing:
    size = f"{stages} stages x {replicas}, M {microbatches}"
    progress(f"simulating {size}")
    placement = tuple(
        tuple(Device(0, stage * replicas + index) for index in range(replicas)) for stage in range(stages)
    )
    plan = make_plan(placement, batch=microbatches, microbatches=microbatches, mode=Mode.STALE)
    begun = time.perf_counter()
    timeline = simulate(plan, balanced_costs(plan), range(batches * microbatches))
    seconds = time.perf_counter() - begun
    return Timing(f"simulate {batches} batches", size, seconds, goal, f"{len(timeline.spans)} spans")


def describe(rows: list[Timing]) -> dict[str, Any]:
    return {"rows": [asdict(row) for row in rows]}


def show(console: Console, rows: list[Timing]) -> None:
    table = plain_table("work", "size", "seconds", "goal", "result", left=("work", "size", "result"))
    for column in table.columns:
        column.no_wrap, column.overflow = column.header != "result", "fold"
    for row in rows:
        goal = "" if row.goal is None else f"{row.goal:g}{'' if row.seconds <= row.goal else ' missed'}"
        table.add_row(row.work, row.size, f"{row.seconds:.3f}", goal, row.result)
    console.print(table)
