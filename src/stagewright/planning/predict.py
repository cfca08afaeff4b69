"""Predictions: what a plan would do in a setting, as images per second, memory and bubble, before it runs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from stagewright.metrics import MIB, Timeline
from stagewright.plan import cost
from stagewright.plan.estimate import Estimate, Setting, with_own_ties, with_whole_batches
from stagewright.plan.memory import Memory
from stagewright.plan.plan import Plan
from stagewright.planning.simulate import ClusterCosts, Steady, reduce_seconds, steady, steady_state

IMAGENET = 1_281_167  # training images
_MOST_ROUNDS = 64
_MOST_LINKS = 8


@dataclass(frozen=True, slots=True, repr=False)
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

    def __repr__(self) -> str:
        most = max(memory.total for memory in self.memory) / MIB
        return (
            f"Prediction({self.plan.mode} {self.plan.shape}: {self.images_per_second:,.0f} images/s, devices wait "
            f"{self.steady.bubble:.1%}, up to {most:,.0f} MiB{'' if self.fits else ', does not fit'})"
        )

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
            "memory_by_part_mib": [
                {name: size / MIB for name, size in asdict(memory).items()} for memory in self.memory
            ],
            "traffic": self.traffic,
            "bound": self.bound,
            "fits": self.fits,
        }


def predict(plan: Plan, setting: Setting, *, draws: bool = False) -> Prediction:
    """Simulate a plan in a setting; one stage has a closed form, and a timeline only where it is to be drawn."""
    plan = with_own_ties(with_whole_batches(plan, setting.software), setting)
    estimate = Estimate(plan, setting)
    if len(plan.stages) > 1:
        found = steady_state(estimate, draws=draws)
        if found.batch_seconds < estimate.floor:  # what was simulated was not yet at its steady pace
            found = replace(found, batch_seconds=estimate.floor)
    elif draws or any(machine.is_shared for machine in setting.cluster.machines):
        found = steady(plan, ClusterCosts(estimate), draws=draws)
    else:
        found = one_stage(estimate)
    rate = plan.batch / found.batch_seconds
    bound = _bound(estimate, found)
    if setting.loader is not None:
        machines = {plan.devices[rank].machine for rank in plan.stages[0].ranks}
        loader = setting.loader * len(machines)
        if loader < rate:
            bound = "loading data"
        rate = cost.loaded_rate(rate, loader)
    memory = estimate.memories
    limits = tuple(estimate.limit(rank) for rank in range(plan.world))
    return Prediction(plan, rate, found, memory, limits, traffic(estimate), bound)


def one_stage(estimate: Estimate) -> Steady:
    """What `steady` finds for a plan of one stage, without simulating it: every round ends with its slowest rank.

    Where microbatches do not divide evenly, the ranks that run one more take turns from round to round.
    """
    plan, stage = estimate.plan, estimate.plan.stages[0]
    each, more = divmod(stage.round, stage.replicas)
    alike: dict[str, tuple[float, float]] = {}
    for rank in range(plan.world):
        kind = estimate.kind(rank)
        if kind not in alike:
            alike[kind] = (estimate.forward(0, rank) + estimate.backward(0, rank), estimate.update(0, rank))
    costs = [alike[estimate.kind(rank)] for rank in stage.ranks]
    seconds, updates = (np.array(column) for column in zip(*costs, strict=True))
    exposed = reduce_seconds(estimate, stage, stage.ranks[0])
    slowest, rounds = 0.0, stage.replicas // math.gcd(more, stage.replicas) if more else 1
    tried = min(rounds, _MOST_ROUNDS) if len(alike) > 1 else 1
    for turn in range(tried):
        extra = np.zeros(stage.replicas)
        extra[(np.arange(more) + turn * more) % stage.replicas] = 1
        slowest += float((seconds * (each + extra) + updates).max()) / tried
    whole = (slowest + exposed) * plan.microbatches / stage.round
    busy = (seconds * stage.round / stage.replicas + updates) * plan.microbatches / stage.round / whole
    shares = dict(zip(stage.ranks, (float(share) for share in busy), strict=True))
    return Steady(whole, tuple(shares[rank] for rank in range(plan.world)), Timeline(()), (0.0, whole))


def traffic(estimate: Estimate) -> float:
    """Bytes that devices send each other for one batch."""
    plan = estimate.plan
    total = 0.0
    for stage in plan.stages:
        rounds = plan.microbatches / stage.round
        total += 2 * (stage.replicas - 1) * estimate.own_parameters(stage.index) * cost.GRADIENT_BYTES * rounds
        if not stage.is_last:
            both = sum(estimate.boundary(stage.index, backward=backward) for backward in (False, True))
            behind = plan.stages[stage.index + 1]
            shared = set(stage.ranks) & set(behind.ranks)
            apart = plan.microbatches
            if shared:
                apart = sum(stage.rank_of(number) != behind.rank_of(number) for number in range(plan.microbatches))
            total += both * apart
    for tie in plan.ties:
        rounds = plan.microbatches / plan.stages[tie.stages[0]].round
        for tied in tie.parameters:
            total += 2 * (len(plan.ranks_of(tied.homes)) - 1) * tied.size * cost.GRADIENT_BYTES * rounds
    return total


def stage_costs(prediction: Prediction, setting: Setting) -> list[dict[str, Any]]:
    """What one microbatch and one update cost in every stage, on its slowest rank: seconds and bytes."""
    estimate = Estimate(prediction.plan, setting)
    found = []
    for stage in prediction.plan.stages:
        slowest = max(stage.ranks, key=lambda rank: estimate.forward(stage.index, rank))
        found.append(
            {
                "stage": stage.index,
                "replicas": stage.replicas,
                "lag": stage.versions - 1,
                "depth": stage.depth,
                "forward": estimate.forward(stage.index, slowest),
                "backward": estimate.backward(stage.index, slowest),
                "update": estimate.update(stage.index, slowest),
                "reduction": estimate.reduction(stage.index),
                "exposed": estimate.exposed(stage.index),
                "sends": 0.0 if stage.is_last else estimate.boundary(stage.index, backward=False),
                "busy": sum(prediction.steady.busy[rank] for rank in stage.ranks) / stage.replicas,
            }
        )
    return found


def link_use(prediction: Prediction, setting: Setting) -> list[tuple[str, float, float]]:
    """The busiest links: what each is, seconds of a batch's messages over it, and their share of the batch."""
    estimate = Estimate(prediction.plan, setting)
    whole = prediction.steady.batch_seconds
    found = [(name, seconds, seconds / whole) for name, seconds in estimate.edge_seconds().items()]
    return sorted(found, key=lambda entry: -entry[1])[:_MOST_LINKS]


def _bound(estimate: Estimate, found: Steady) -> str:
    """What limits the speed, in a few words."""
    plan = estimate.plan
    exposed = max(
        reduce_seconds(estimate, stage, stage.ranks[0]) * plan.microbatches / stage.round for stage in plan.stages
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
