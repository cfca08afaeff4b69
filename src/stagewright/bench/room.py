"""Whether a configuration fits this machine: its GPUs, their memory, or the memory of its processes."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

from stagewright.bench.layout import ANYWHERE, devices_of, layout
from stagewright.catalog import shipped
from stagewright.catalog.values import MIB
from stagewright.cluster import Cluster, Machine, parse_placement
from stagewright.config.sections import Config
from stagewright.plan.estimate import Estimate
from stagewright.predict import analytic_setting, study

_SURE = 1.15  # the memory model is good for 15 %: what may fit is tried
_ANY_GPU = "h200"  # whose memory does not matter here, and which has every precision


@dataclass(frozen=True, slots=True)
class Room:
    """What this machine has."""

    gpus: int
    gpu_memory: int  # bytes of the smallest
    memory: int

    @property
    def cluster(self) -> Cluster:
        """Its GPUs as devices to place stages on; without any, processes, as many as there are cores."""
        count = self.gpus or len(os.sched_getaffinity(0))
        return Cluster((Machine(count),), "this machine")

    def lacks(self, config: Config) -> str | None:
        """What keeps a configuration from running here, in a few words."""
        devices = devices_of(config.plan.placement)
        machines = {device.machine for device in devices}
        if config.run.device == "cuda":
            if len(machines) > 1:
                return f"needs {len(machines)} machines of GPUs, this is one"
            needed = 1 + max(device.index for device in devices)
            if not self.gpus or (needed > self.gpus and not config.run.share_gpu):
                return f"needs {needed} GPU{'s' if needed > 1 else ''}, this machine has {self.gpus}"
        return self._lacks_memory(config)

    def _lacks_memory(self, config: Config) -> str | None:
        needs = needed_memory(config)
        if config.run.device != "cuda":
            total = sum(needs)
            return _too_much("of memory", total, self.memory) if total > self.memory * _SURE else None
        held: Counter[int] = Counter()
        for rank, need in enumerate(needs):
            held[rank % self.gpus] += need
        most = max(held.values(), default=0)
        return _too_much("on a GPU", most, self.gpu_memory) if most > self.gpu_memory * _SURE else None


def _too_much(where: str, needs: int, has: int) -> str:
    return f"needs about {needs / MIB:,.0f} MiB {where}, this machine has {has / MIB:,.0f}"


def here() -> Room:
    """The machine that this runs on."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    smallest = min((torch.cuda.get_device_properties(index).total_memory for index in range(count)), default=0)
    return Room(count, smallest, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def needed_memory(config: Config) -> list[int]:
    """Bytes that each rank is expected to need; nothing is known of a model whose shapes can't be followed."""
    try:
        studied = study(config.model.name, config.model.classes, config.data.image)
        placement = parse_placement(config.plan.placement, ANYWHERE)
        shares = [len(devices) for devices in placement]
        plan = layout(config, studied.chain, placement, lambda: studied.chain.by_weights(shares))
    except ValueError:
        return []
    count = 1 + max(device.index for device in plan.devices)
    machines = 1 + max(device.machine for device in plan.devices)
    cluster = Cluster((Machine(count, _ANY_GPU),) * machines, "anywhere")
    software = shipped().system("stagewright")
    setting = analytic_setting(
        shipped(), cluster, studied.shapes, software, config.run.precision, optimizer=config.optimizer.name
    )
    estimate = Estimate(plan, setting)
    return [int(estimate.memory(rank).total) for rank in range(plan.world)]
