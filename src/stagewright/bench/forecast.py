"""The plan that a configuration describes, without building its model. Whether a configuration fits this machine: its GPUs, their memory, or the memory of its processes. What a configuration would do on a cluster of the catalogue, by Stagewright's own efficiency. The published runs of the models and clusters that a bench predicts, beside what the simulator says of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stagewright.bench.result import PublishedRow, Row
from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import Placement, parse_placement
from stagewright.cluster.specs import MIB, Catalogue
from stagewright.cluster.topology import Cluster, Device, Machine
from stagewright.config.sections import Config
from stagewright.plan.estimate import Estimate
from stagewright.plan.make import default_microbatches
from stagewright.plan.plan import Mode, Plan
from stagewright.plan.search import best_cuts
from stagewright.planning.build import plan_at, stage_numbers
from stagewright.planning.calibrate import calibrate, published_runs
from stagewright.planning.planner import settle_lag
from stagewright.planning.predict import Prediction, predict
from stagewright.planning.setting import analytic_setting, study

if TYPE_CHECKING:
    from stagewright.model.cut import Chain


_MOST_MACHINES = 1024
ANYWHERE = Cluster((Machine(),) * _MOST_MACHINES, "anywhere")  # for placements whose machines are not looked at


def devices_of(placement: str) -> tuple[Device, ...]:
    """Every device that a placement names, once."""
    return tuple(dict.fromkeys(device for stage in parse_placement(placement, ANYWHERE) for device in stage))


def layout(config: Config, chain: Chain, placement: Placement, otherwise: Callable[[], tuple[str, ...]]) -> Plan:
    """The plan on a placement; `otherwise` says where to cut if the configuration does not."""
    options = config.plan
    mode = Mode(options.mode)
    cuts: tuple[str, ...] = ()
    if mode is Mode.DP:
        placement = (tuple(dict.fromkeys(device for stage in placement for device in stage)),)
    elif len(placement) > 1:
        shares = stage_numbers(options.shares, "shares", ":")
        if options.cut is not None:
            cuts = chain.by_names([name.strip() for name in options.cut.split(",")])
        else:
            cuts = otherwise() if shares is None else chain.by_shares(shares)
    return plan_at(options, placement, cuts)


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
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    smallest = min((torch.cuda.get_device_properties(index).total_memory for index in range(count)), default=0)
    return Room(count, smallest, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def needed_memory(config: Config) -> list[int]:
    """Bytes that each rank is expected to need; nothing is known of a model whose shapes can't be followed."""
    try:
        studied = study(config.model.name, config.model.classes, config.data.image)
        placement = parse_placement(config.plan.placement, ANYWHERE)
        shares = [len(devices) for devices in placement]
        plan = layout(config, studied.chain, placement, lambda: studied.chain.by_shares(shares))
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


def forecast(config: Config, catalogue: Catalogue, cluster: Cluster, *, loads: bool) -> Prediction:
    """Simulate the plan that a configuration describes."""
    studied = study(config.model.name, config.model.classes, config.data.image)
    setting = analytic_setting(
        catalogue,
        cluster,
        studied.shapes,
        catalogue.system("stagewright"),
        config.run.precision,
        optimizer=config.optimizer.name,
        loads=loads,
    )
    options = config.plan
    placement = parse_placement(options.placement, cluster)

    def fastest() -> tuple[str, ...]:
        count = options.microbatches or default_microbatches(options.batch, [len(devices) for devices in placement])
        return best_cuts(setting, placement, Mode(options.mode), options.batch, count)

    plan = layout(config, studied.chain, placement, fastest)
    if options.versions is None:
        plan = settle_lag(plan, setting, options.staleness)
    return predict(plan, setting)


def published_rows(rows: Iterable[Row], tell: Callable[[str], None]) -> tuple[PublishedRow, ...]:
    """One row a published run; the calibration is fitted anew, so that each run can be told by the others."""
    wanted = [(row.model, row.cluster, row.precision) for row in rows if row.kind == "predicted"]
    if not any((run.model, run.cluster, run.precision) in wanted for run in published_runs()):
        return ()
    found = []
    for row in calibrate(tell).rows:
        run = row.run
        if (run.model, run.cluster, run.precision) not in wanted:
            continue
        found.append(
            PublishedRow(
                system=run.system,
                model=run.model,
                cluster=f"{run.cluster} x{run.devices}" if run.devices else run.cluster,
                mode=f"{run.mode}, {run.scheduling}" if run.scheduling else run.mode,
                data="real" if run.data == "imagenet" else run.data,
                precision=run.precision,
                batch=f"{run.global_batch}" if run.global_batch else f"{run.microbatch} each",
                predicted=row.predicted,
                published=run.rate,
                told=row.error,
                is_alone=row.is_alone,
                memory=tuple(row.memory),
                published_memory=tuple(run.memory_mib),
                epochs=tuple(run.epoch_seconds),
            )
        )
    order = list(dict.fromkeys(model for model, _, _ in wanted))
    return tuple(sorted(found, key=lambda row: order.index(row.model)))
