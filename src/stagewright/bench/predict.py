"""What a configuration needs and how fast it would be, without running it.

`Capacity` says whether a configuration fits a machine: its GPUs, their memory, the memory of its processes.
`predict_config` simulates it on a cluster of the catalog with Stagewright's own efficiency.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from stagewright.bench.suite import devices_of
from stagewright.cluster.specs import Catalog
from stagewright.cluster.topology import ANYWHERE, Cluster, Machine
from stagewright.config.sections import Config
from stagewright.errors import UserError, counted
from stagewright.metrics import MIB
from stagewright.plan.estimate import Estimate
from stagewright.planning.build import build_plan
from stagewright.planning.predict import Prediction, predict
from stagewright.planning.run_setting import config_setting, memory_setting
from stagewright.planning.traced import chain_of_config

_MEMORY_MARGIN = 1.15  # the memory model is accurate to 15 %: what may fit is tried


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a machine has to run configurations on."""

    gpus: int
    gpu_memory: int  # bytes of the smallest
    memory: int  # bytes of the machine

    @property
    def cluster(self) -> Cluster:
        """Its GPUs as devices for stages; without GPUs, as many processes as there are cores."""
        count = self.gpus or len(os.sched_getaffinity(0))
        return Cluster((Machine(count),), "this machine")

    def shortage(self, config: Config) -> str | None:
        """Why a configuration does not fit, in a few words; None where it does."""
        devices = devices_of(config.plan.placement)
        machines = {device.machine for device in devices}
        if config.run.device == "cuda":
            if len(machines) > 1:
                return f"needs {len(machines)} machines with GPUs, this is 1"
            needed = 1 + max(device.index for device in devices)
            if not self.gpus or (needed > self.gpus and not config.run.share_gpu):
                return f"needs {counted(needed, 'GPU')}, this machine has {self.gpus}"
        needs = needed_memory(config)
        where, most, has = "of memory", sum(needs), self.memory
        if config.run.device == "cuda":
            held = [sum(needs[gpu :: self.gpus]) for gpu in range(self.gpus)]
            where, most, has = "on a GPU", max(held), self.gpu_memory
        if most <= has * _MEMORY_MARGIN:
            return None
        return f"needs about {most / MIB:,.0f} MiB {where}, this machine has {has / MIB:,.0f}"


def local_capacity() -> Capacity:
    """The capacity of this machine."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    smallest = min((torch.cuda.get_device_properties(index).total_memory for index in range(count)), default=0)
    return Capacity(count, smallest, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def needed_memory(config: Config) -> list[int]:
    """Predicted bytes per rank; empty for a model whose shapes cannot be traced."""
    try:
        # Without a setting: by operations, with the largest lag.
        plan = build_plan(config.plan, ANYWHERE, chain_of_config(config))
    except UserError:
        return []
    estimate = Estimate(plan, memory_setting(config, plan))
    return [int(memory.total) for memory in estimate.memories]


def predict_config(config: Config, catalog: Catalog, cluster: Cluster, *, loads: bool) -> Prediction:
    """Simulate the plan that a configuration describes; `loads` includes the time to load and decode real data."""
    setting = config_setting(config, cluster, catalog=catalog, loads=loads)
    plan = build_plan(config.plan, cluster, chain_of_config(config), lambda placement: setting)
    return predict(plan, setting)
