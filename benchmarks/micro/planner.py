"""`planner`: how long `plan` takes, and search and simulator alone; sizes double, so that the growth shows."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.outcome import Outcome, new_outcome
from benchmarks.timed_command import stagewright
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


def _flat_cluster(devices: int) -> Cluster:
    """All GPUs behind one switch."""
    return Cluster((_machine(devices, "pcie3-pix"),), f"{devices} flat")


def _machines_cluster(machines: int, each: int) -> Cluster:
    """Machines with GPUs connected by NVLink, on one network."""
    return Cluster((_machine(each, "nvlink2"),) * machines, f"{machines}x{each}", shipped().links["net-100g"])


def _machine(devices: int, link: str) -> Machine:
    return Machine(devices, "v100-sxm2-16", (Level(shipped().links[link], (tuple(range(devices)),)),))


def measure(voice: Voice) -> Outcome:
    """Time every size once: the command `plan` whole, and the search and the simulator alone."""
    sizes = ((2, 5.0), (4, None), (8, None), (16, 15.0), (32, None), (64, None), (128, 60.0), (1024, None))
    flat, joined = ((16, 0.1), (32, None), (64, None)), ((2, 2.0), (8, None), (32, None), (128, 20.0))
    rows = (
        *(_plan("resnet50", machines, 8, goal, voice) for machines, goal in sizes),
        *(_search("resnet50", _flat_cluster(devices), goal, voice) for devices, goal in flat),
        *(_search("resnet152", _machines_cluster(machines, 8), goal, voice) for machines, goal in joined),
        *(_simulation(8, replicas, goal, voice) for replicas, goal in ((32, None), (64, None), (128, 30.0))),
    )
    return new_outcome("planner", "Seconds of plan, the search and the simulator", 1, unit="s", rows=rows)


def _plan(model: str, machines: int, each: int, goal: float | None, voice: Voice) -> Row:
    """Time `stagewright plan` in a process of its own, from its start to its answer."""
    voice.progress(f"plan {model} on {machines}x{each}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        file.write_text(_CLUSTER.format(machines=machines, each=each))
        options = f"--cluster {file} --batch {_SAMPLES * machines * each} --json"
        begun = time.perf_counter()
        with subprocess.Popen(stagewright("plan", model, *options.split()), stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            printed = child.stdout.read()
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - begun
    if child.returncode:
        return Row(f"plan {model}", f"{machines}x{each}", kind="failed", reason=f"exit code {child.returncode}")
    found = json.loads(printed)
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


def _simulation(stages: int, replicas: int, goal: float | None, voice: Voice) -> Row:
    microbatches, batches = 2 * replicas, 20
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
