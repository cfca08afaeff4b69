"""Predictions: what a plan would do in a setting, as images per second, memory and bubble, before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stagewright.metrics import MIB
from stagewright.plan import cost
from stagewright.plan.estimate import Estimate, Setting, with_whole_batches
from stagewright.plan.memory import Memory
from stagewright.plan.plan import Plan
from stagewright.planning.simulate import ClusterCosts, Steady, reduce_seconds, steady

IMAGENET = 1_281_167  # training images


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan would do."""

    plan: Plan
    images_per_second: float
    steady: Steady
    memory: tuple[Memory, ...]  # of each rank
    limits: tuple[int, ...]  # bytes of each rank's device
    traffic: float  # bytes between devices per batch
    bound: str  # what limits the speed

    @property
    def epoch_seconds(self) -> float:
        return IMAGENET / self.images_per_second

    @property
    def fits(self) -> bool:
        return all(memory.total <= limit for memory, limit in zip(self.memory, self.limits, strict=True))

    def describe(self) -> dict[str, Any]:
        """The prediction as JSON has it."""
        return {
            "plan": self.plan.describe(),
            "images_per_second": self.images_per_second,
            "epoch_seconds": self.epoch_seconds,
            "batch_seconds": self.plan.batch / self.images_per_second,
            "bubble": self.steady.bubble,
            "utilisation": list(self.steady.busy),
            "memory_mib": [memory.total / MIB for memory in self.memory],
            "memory_limit_mib": [limit / MIB for limit in self.limits],
            "memory_largest": [memory.largest for memory in self.memory],
            "traffic": self.traffic,
            "bound": self.bound,
            "fits": self.fits,
        }


def predict(plan: Plan, setting: Setting) -> Prediction:
    """Simulate a plan in a setting."""
    plan = with_whole_batches(plan, setting.software)
    estimate = Estimate(plan, setting)
    found = steady(plan, ClusterCosts(estimate))
    rate = plan.batch / found.batch_seconds
    bound = _bound(estimate, found)
    if setting.loader is not None:
        machines = {plan.devices[rank].machine for rank in plan.stages[0].ranks}
        loader = setting.loader * len(machines)
        if loader < rate:
            bound = "loading data"
        rate = cost.loaded_rate(rate, loader)
    memory = tuple(estimate.memory(rank) for rank in range(plan.world))
    limits = tuple(estimate.limit(rank) for rank in range(plan.world))
    return Prediction(plan, rate, found, memory, limits, traffic(estimate), bound)


def traffic(estimate: Estimate) -> float:
    """Bytes that devices send each other for one batch."""
    plan = estimate.plan
    total = 0.0
    for stage in plan.stages:
        rounds = plan.microbatches / stage.round
        total += 2 * (stage.replicas - 1) * estimate.parameters(stage.index) * cost.GRADIENT_BYTES * rounds
        if not stage.is_last:
            both = sum(estimate.boundary(stage.index, backward=backward) for backward in (False, True))
            apart = sum(
                stage.rank_of(microbatch) != plan.stages[stage.index + 1].rank_of(microbatch)
                for microbatch in range(plan.microbatches)
            )
            total += both * apart
    return total


def _bound(estimate: Estimate, found: Steady) -> str:
    """What limits the speed, in a few words."""
    plan = estimate.plan
    exposed = max(
        reduce_seconds(estimate, stage, rank) * plan.microbatches / stage.round
        for stage in plan.stages
        for rank in stage.ranks
    )
    if len(plan.stages) == 1 or plan.is_synchronous:
        share = exposed / found.batch_seconds
        if share > 0.1:
            return f"all-reduce ({share:.0%})"
    busiest = max(range(plan.world), key=lambda rank: found.busy[rank])
    stage = plan.stages_of(busiest)[-1].index
    if found.busy[busiest] > 0.85:
        return "compute" if len(plan.stages) == 1 else f"compute of stage {stage}"
    return "waiting between stages" if len(plan.stages) > 1 else "all-reduce"
