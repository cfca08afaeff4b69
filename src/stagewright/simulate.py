"""Times a schedule with a cost model: the same programs that ranks run, on lanes instead of devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from stagewright.metrics import Span, Timeline
from stagewright.plan.plan import Plan
from stagewright.schedule.action import Action, Op
from stagewright.schedule.check import representative_span
from stagewright.schedule.lower import program
from stagewright.schedule.requires import requires

COMPUTES = (Op.FORWARD, Op.BACKWARD, Op.UPDATE)
_TRANSFERS = (Op.SEND_ACT, Op.SEND_GRAD, Op.REDUCE)


class Costs(Protocol):
    """How long an action takes once it runs."""

    def seconds(self, action: Action) -> float: ...


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Fixed times by stage; what is not named is free."""

    forward: Sequence[float]
    backward: Sequence[float]
    transfer: float = 0.0
    reduce: float = 0.0

    def seconds(self, action: Action) -> float:
        if action.op is Op.FORWARD:
            return self.forward[action.stage]
        if action.op is Op.BACKWARD:
            return self.backward[action.stage]
        if action.op is Op.REDUCE:
            return self.reduce
        return self.transfer if action.op in (Op.SEND_ACT, Op.SEND_GRAD) else 0.0


def balanced_costs(plan: Plan) -> StageCosts:
    """What a plan means to be: every stage takes as long as it has replicas, backward twice a forward."""
    return StageCosts([float(stage.replicas) for stage in plan.stages], [2.0 * stage.replicas for stage in plan.stages])


def simulate(plan: Plan, costs: Costs, span: range) -> Timeline:
    """The timeline of a span: each rank runs its program in order, on a compute lane and a transfer lane."""
    programs = {rank: list(program(plan, rank, span)) for rank in range(plan.world)}
    ends = _end_times(plan, costs, programs, span.start)
    return Timeline(
        tuple(
            Span(rank, "compute" if action.op in COMPUTES else "transfer", str(action.op), str(action), *ends[action])
            for rank, actions in programs.items()
            for action in actions
            if action.op in COMPUTES or (action.op in _TRANSFERS and ends[action][0] < ends[action][1])
        )
    )


def _end_times(
    plan: Plan, costs: Costs, programs: Mapping[int, Sequence[Action]], start: int
) -> dict[Action, tuple[float, float]]:
    """When each action begins and ends, in one pass: a rank goes on until what it needs has no time yet."""
    times: dict[Action, tuple[float, float]] = {}
    position = dict.fromkeys(programs, 0)
    compute: dict[int, float] = defaultdict(float)
    transfer: dict[int, float] = defaultdict(float)
    waiting: dict[Action, list[int]] = defaultdict(list)
    runnable = list(programs)
    while runnable:
        rank = runnable.pop()
        while position[rank] < len(programs[rank]):
            action = programs[rank][position[rank]]
            needed = list(requires(plan, action, start))
            missing = next((other for other in needed if other not in times), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            lane = transfer if action.op in _TRANSFERS else compute
            begin = max([lane[rank], compute[rank], *(times[other][1] for other in needed)])
            end = begin + costs.seconds(action)
            times[action] = (begin, end)
            lane[rank] = end
            position[rank] += 1
            runnable += waiting.pop(action, ())
    assert all(position[rank] == len(actions) for rank, actions in programs.items()), "the schedule deadlocks"
    return times


def steady_bubble(plan: Plan, costs: Costs) -> float:
    """Share of the ranks' time that is not compute, once the pipeline is full."""
    period = representative_span(plan)
    timeline = simulate(plan, costs, range(3 * period.stop))
    last_stage = plan.stages[-1].index
    ends = {
        int(span.name.partition("B")[2].partition("@")[0]): span.end
        for span in timeline.spans
        if span.kind == "B" and span.name.startswith(f"{last_stage}B")
    }
    return timeline.bubble(range(plan.world), ends[period.stop - 1], ends[2 * period.stop - 1])
