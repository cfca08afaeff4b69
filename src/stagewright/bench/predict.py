"""What a configuration needs and how fast it would be, without running it.

`Capacity` says whether a configuration fits a machine: its GPUs, their memory, the memory of its processes.
`predict_config` simulates it on a cluster of the catalog with Stagewright's own efficiency, and `published_rows` puts
the published runs of the same models and clusters next to what the simulator predicts for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from stagewright.bench.result import PublishedRow, Row
from stagewright.bench.suite import devices_of
from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import Placement, parse_placement
from stagewright.cluster.specs import Catalog
from stagewright.cluster.topology import ANYWHERE, Cluster, Machine
from stagewright.config.sections import Config
from stagewright.errors import counted
from stagewright.metrics import MIB
from stagewright.model.cut import Chain
from stagewright.plan.estimate import Estimate
from stagewright.plan.make import default_microbatches
from stagewright.plan.plan import Mode, Plan
from stagewright.plan.search import best_cuts
from stagewright.planning.build import plan_at, stage_numbers
from stagewright.planning.calibrate import calibrate, published_runs
from stagewright.planning.planner import choose_lag
from stagewright.planning.predict import Prediction, predict
from stagewright.planning.setting import config_setting, trace_model, unconnected_cluster

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
        model = trace_model(config.model.name, config.model.classes, config.data.image)
        placement = parse_placement(config.plan.placement, ANYWHERE)
        shares = [len(devices) for devices in placement]
        plan = _plan_of(config, model.chain, placement, lambda: model.chain.by_shares(shares))
    except ValueError:
        return []
    estimate = Estimate(plan, config_setting(config, unconnected_cluster(plan), shipped()))
    return [int(estimate.memory(rank).total) for rank in range(plan.world)]


def predict_config(config: Config, catalog: Catalog, cluster: Cluster, *, loads: bool) -> Prediction:
    """Simulate the plan that a configuration describes; `loads` includes the time to load and decode real data."""
    model = trace_model(config.model.name, config.model.classes, config.data.image)
    setting = config_setting(config, cluster, catalog, loads=loads)
    options = config.plan
    placement = parse_placement(options.placement, cluster)

    def fastest() -> tuple[str, ...]:
        count = options.microbatches or default_microbatches(options.batch, [len(devices) for devices in placement])
        return best_cuts(setting, placement, Mode(options.mode), options.batch, count)

    plan = _plan_of(config, model.chain, placement, fastest)
    if options.versions is None:
        plan = choose_lag(plan, setting, options.staleness)
    return predict(plan, setting)


def published_rows(rows: Iterable[Row], progress: Callable[[str], None]) -> tuple[PublishedRow, ...]:
    """One row per published run of a predicted model, cluster and precision.

    The calibration is fitted again, so that each run can also be predicted from the other runs alone.
    """
    wanted = [(row.model, row.cluster, row.precision) for row in rows if row.kind == "predicted"]
    if not any((run.model, run.cluster, run.precision) in wanted for run in published_runs()):
        return ()
    found = []
    for row in calibrate(progress).rows:
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


def _plan_of(config: Config, chain: Chain, placement: Placement, default_cuts: Callable[[], tuple[str, ...]]) -> Plan:
    """The plan of a configuration on a placement; `default_cuts` is asked where the configuration gives no cut."""
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
            cuts = default_cuts() if shares is None else chain.by_shares(shares)
    return plan_at(options, placement, cuts)
