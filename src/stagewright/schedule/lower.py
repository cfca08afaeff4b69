"""From the order of computes to the whole program: versions, transfers, reductions, agreement and updates."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import NamedTuple

from stagewright.plan.plan import Plan, Stage, Tie
from stagewright.schedule import policy
from stagewright.schedule.action import Action, Op


class Task(NamedTuple):
    """Actions that belong together, at their place in the order."""

    key: policy.Key
    actions: tuple[Action, ...]


Limit = Callable[[], int]


def program(plan: Plan, rank: int, span: range, limit: Limit | None = None) -> Iterator[Action]:
    """One rank's actions to train a span of microbatches, generated as they are needed.

    A span begins and ends with an empty pipeline, at multiples of `plan.alignment`. `limit` may cut it short on the
    way: at any time it tells such a multiple, from which on microbatches are left out if none of them has begun.
    """
    for task in heapq.merge(*streams(plan, rank, span, limit), key=itemgetter(0)):
        if limit is None or last_of(plan, task.actions[0]) < limit():
            yield from task.actions


def last_of(plan: Plan, action: Action) -> int:
    """The last microbatch that an action is for: its own, or the last one of its update."""
    if action.microbatch is not None:
        return action.microbatch
    assert action.version is not None
    return (action.version + 1) * plan.stages[action.stage].round - 1


def streams(plan: Plan, rank: int, span: range, limit: Limit | None = None) -> list[Iterator[Task]]:
    """The tasks of a rank as ordered streams, whose merge by key is the static program.

    Dynamic scheduling takes the head of any stream that can run instead.
    """
    if limit is not None:
        return [_until(plan, stream, limit) for stream in streams(plan, rank, span)]
    stages = plan.stages_of(rank)
    sums = [_reduces(plan, stage, rank, span) for stage in stages if stage.replicas > 1]
    ties = [tie for tie in plan.ties if rank in plan.ranks_of(tie.stages)]
    sums += [_ties(plan, tie, rank, span) for tie in ties]
    return [
        *(_forwards(plan, stage, rank, span) for stage in stages),
        *(_backwards(plan, stage, rank, span) for stage in stages),
        *(_updates(plan, stage, rank, span) for stage in stages),
        heapq.merge(*sums, key=itemgetter(0)),  # one stream: reduces and ties keep one order on every rank
        *([_agreements(plan, rank, span)] if plan.agree else []),
        *((_flags(plan, stage, rank, span) for stage in stages) if plan.flags else []),
        *((_tie_agreements(plan, tie, rank, span) for tie in ties) if plan.ties_agree else []),
    ]


def _until(plan: Plan, stream: Iterator[Task], limit: Limit) -> Iterator[Task]:
    """A stream's tasks before the limit; a stream is ordered, so the first task beyond the limit ends it."""
    for task in stream:
        if last_of(plan, task.actions[0]) >= limit():
            return
        yield task


def evaluation_program(plan: Plan, rank: int, pieces: range) -> Iterator[Action]:
    """One rank's forward-only actions over pieces of the evaluation data; they use the masters, not a version."""
    stages = plan.stages_of(rank)
    for microbatch in pieces:
        for stage in stages:
            if stage.rank_of(microbatch) == rank:
                yield from forward_actions(plan, stage, microbatch, None)


def forward_actions(plan: Plan, stage: Stage, microbatch: int, version: int | None) -> tuple[Action, ...]:
    """Forward of a microbatch with the transfers around it; stages on one rank hand over locally."""
    rank = stage.rank_of(microbatch)
    actions = [Action(Op.FORWARD, rank, stage.index, microbatch, version)]
    if not stage.is_first and (source := plan.stages[stage.index - 1].rank_of(microbatch)) != rank:
        actions.insert(0, Action(Op.RECV_ACT, rank, stage.index, microbatch, None, source))
    if not stage.is_last and (target := plan.stages[stage.index + 1].rank_of(microbatch)) != rank:
        actions.append(Action(Op.SEND_ACT, rank, stage.index, microbatch, None, target))
    return tuple(actions)


def backward_actions(plan: Plan, stage: Stage, microbatch: int) -> tuple[Action, ...]:
    """Backward of a microbatch, on forward's version, with the transfers around it."""
    rank = stage.rank_of(microbatch)
    actions = [Action(Op.BACKWARD, rank, stage.index, microbatch, stage.version_of(microbatch))]
    if not stage.is_last and (source := plan.stages[stage.index + 1].rank_of(microbatch)) != rank:
        actions.insert(0, Action(Op.RECV_GRAD, rank, stage.index, microbatch, None, source))
    if not stage.is_first and (target := plan.stages[stage.index - 1].rank_of(microbatch)) != rank:
        actions.append(Action(Op.SEND_GRAD, rank, stage.index, microbatch, None, target))
    return tuple(actions)


def _forwards(plan: Plan, stage: Stage, rank: int, span: range) -> Iterator[Task]:
    for microbatch in stage.own(rank, span):
        key = policy.forward_key(plan, stage, microbatch, span.start)
        yield Task(key, forward_actions(plan, stage, microbatch, stage.version_of(microbatch)))


def _backwards(plan: Plan, stage: Stage, rank: int, span: range) -> Iterator[Task]:
    for microbatch in stage.own(rank, span):
        yield Task(policy.backward_key(stage, microbatch), backward_actions(plan, stage, microbatch))


def updates_in(stage: Stage, span: range) -> range:
    """The updates a stage makes in a span."""
    return range(span.start // stage.round, span.stop // stage.round)


def _reduces(plan: Plan, stage: Stage, rank: int, span: range) -> Iterator[Task]:
    for update in updates_in(stage, span):
        action = Action(Op.REDUCE, rank, stage.index, None, update)
        yield Task(policy.reduce_key(plan, stage, rank, update), (action,))


def _ties(plan: Plan, tie: Tie, rank: int, span: range) -> Iterator[Task]:
    """One sum per update over all ranks of all homes; a rank joins it once, for all homes that it runs."""
    stage = plan.tied_stage(tie, rank)
    for update in updates_in(stage, span):
        yield Task(policy.tie_key(plan, tie, update), (Action(Op.TIE, rank, stage.index, None, update),))


def _updates(plan: Plan, stage: Stage, rank: int, span: range) -> Iterator[Task]:
    for update in updates_in(stage, span):
        action = Action(Op.UPDATE, rank, stage.index, None, update)
        yield Task(policy.update_key(plan, stage, rank, update, span), (action,))


def _agreements(plan: Plan, rank: int, span: range) -> Iterator[Task]:
    """One agreement of all ranks per batch; it prints under the first stage of its rank."""
    stage = plan.stages_of(rank)[0]
    for update in updates_in(stage, span):
        yield Task(policy.agree_key(plan, update), (Action(Op.AGREE, rank, stage.index, None, update),))


def _tie_agreements(plan: Plan, tie: Tie, rank: int, span: range) -> Iterator[Task]:
    """One exchange of norms per update between all ranks of a tie, under the first of its stages that a rank runs."""
    stage = plan.tied_stage(tie, rank)
    for update in updates_in(stage, span):
        key = policy.tie_agree_key(plan, tie, update, span)
        yield Task(key, (Action(Op.AGREE, rank, stage.index, None, update),))


def _flags(plan: Plan, stage: Stage, rank: int, span: range) -> Iterator[Task]:
    """Each stage's overflow flag, passed on to the stage before it."""
    for update in updates_in(stage, span):
        action = Action(Op.AGREE, rank, stage.index, None, update)
        yield Task(policy.flag_key(plan, stage, update, span), (action,))
