"""`planner`: how long `plan` takes, and search and simulator alone; sizes double, so that the growth shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.outcome import Outcome, new_outcome
from stagewright.bench.result import Row, measured_row
from stagewright.cluster.catalog import shipped
from stagewright.cluster.topology import Cluster, Device, Level, Machine
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode
from stagewright.plan.search import make_search
from stagewright.planning.setting import make_setting
from stagewright.planning.simulate import balanced_costs, simulate
from stagewright.planning.traced import trace_model
from stagewright.voice import Voice

_SAMPLES = 32  # of the batch per device
_CLUSTER = """[cluster.made]
network = "net-100g"
[[cluster.made.machines]]
count = {machines}
device = "v100-sxm2-16"
devices = {each}
levels = [{{ link = "nvlink2", lanes = 6 }}]
"""


def flat_cluster(devices: int) -> Cluster:
    """All GPUs behind one switch."""
    level = Level(shipped().links["pcie3-pix"], (tuple(range(devices)),))
    return Cluster((Machine(devices, "v100-sxm2-16", (level,)),), f"{devices} flat")


def machines_cluster(machines: int, each: int) -> Cluster:
    """Machines with GPUs connected by NVLink, on one network."""
    level = Level(shipped().links["nvlink2"], (tuple(range(each)),))
    machine = Machine(each, "v100-sxm2-16", (level,))
    return Cluster((machine,) * machines, f"{machines}x{each}", shipped().links["net-100g"])


def measure(voice: Voice) -> Outcome:
    """Time every size once: the command `plan` whole, and the search and the simulator alone."""
    rows = []
    sizes = ((2, 5.0), (4, None), (8, None), (16, 15.0), (32, None), (64, None), (128, 60.0), (1024, None))
    for machines, goal in sizes:
        rows.append(_plan("resnet50", machines, 8, goal, voice))
    for devices, goal in ((16, 0.1), (32, None), (64, None)):
        rows.append(_search("resnet50", flat_cluster(devices), goal, voice))
    for machines, goal in ((2, 2.0), (8, None), (32, None), (128, 20.0)):
        rows.append(_search("resnet152", machines_cluster(machines, 8), goal, voice))
    for replicas, microbatches, goal in ((32, 64, None), (64, 128, None), (128, 256, 30.0)):
        rows.append(_simulation(8, replicas, microbatches, 20, goal, voice))
    return new_outcome("planner", "Seconds of plan, the search and the simulator", 1, unit="s", rows=tuple(rows))


def _plan(model: str, machines: int, each: int, goal: float | None, voice: Voice) -> Row:
    """Time `stagewright plan` in a process of its own, from its start to its answer."""
    voice.progress(f"plan {model} on {machines}x{each}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        file.write_text(_CLUSTER.format(machines=machines, each=each))
        batch = _SAMPLES * machines * each
        command = [sys.executable, "-m", "stagewright", "plan", model, "--cluster", str(file), "--batch", str(batch)]
        with (Path(folder) / "out").open("w") as out:
            begun = time.perf_counter()
            child = subprocess.Popen([*command, "--json"], stdout=out)
            _, status, used = os.wait4(child.pid, 0)
            seconds = time.perf_counter() - begun
        child.returncode = os.waitstatus_to_exitcode(status)
        found = json.loads((Path(folder) / "out").read_text()) if child.returncode == 0 else None
    if found is None:
        return Row(f"plan {model}", f"{machines}x{each}", kind="failed", reason=f"exit code {child.returncode}")
    best = found["candidates"][found["best"]]["plan"]
    result = f"{best['mode']}, {len(best['versions'])} stages; {used.ru_maxrss / 1024:,.0f} MiB"
    return _row(f"plan {model}", f"{machines}x{each}", seconds, goal, result)


def _search(model: str, cluster: Cluster, goal: float | None, voice: Voice) -> Row:
    """Time the search alone, including memory limits; the model's shapes are already computed."""
    devices = len(cluster.devices)
    voice.progress(f"{model} on {cluster.name}")
    setting = make_setting(trace_model(model).shapes, cluster, "fp32")
    setting.tables("v100-sxm2-16", _SAMPLES)
    begun = time.perf_counter()
    found = make_search(setting, Mode.STALE, _SAMPLES * devices, devices).best()
    seconds = time.perf_counter() - begun
    shape = "nothing fits" if found is None else "-".join(map(str, found.sizes))
    return _row(f"search {model}", cluster.name, seconds, goal, shape if len(shape) < 20 else f"{shape[:17]}...")


def _simulation(stages: int, replicas: int, microbatches: int, batches: int, goal: float | None, voice: Voice) -> Row:
    size = f"{stages} stages x {replicas}, M {microbatches}"
    voice.progress(f"simulating {size}")
    placement = tuple(
        tuple(Device(0, stage * replicas + index) for index in range(replicas)) for stage in range(stages)
    )
    plan = make_plan(placement, batch=microbatches, microbatches=microbatches, mode=Mode.STALE)
    begun = time.perf_counter()
    timeline = simulate(plan, balanced_costs(plan), range(batches * microbatches))
    seconds = time.perf_counter() - begun
    return _row(f"simulate {batches} batches", size, seconds, goal, f"{len(timeline.spans)} spans")


def _row(work: str, size: str, seconds: float, goal: float | None, result: str) -> Row:
    reached = "" if goal is None else f"goal {goal:g}: {'met' if seconds <= goal else 'missed'}; "
    return measured_row(work, size, [seconds], note=f"{reached}{result}")
