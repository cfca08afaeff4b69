"""What each action waits for, stated once: the checker and the simulator both use it."""

from __future__ import annotations

from collections.abc import Iterator

from stagewright.plan.plan import Plan, Stage
from stagewright.schedule.action import Action, Op


def requires(plan: Plan, action: Action, start: int = 0) -> Iterator[Action]:
    """The actions, on any rank, that must be done before this one can be; `start` is where the span began.

    A send is done when it is issued. A reduce, a tie or an agreement is done on a rank when that rank has joined; the
    update that follows needs every rank's.
    """
    yield from _RULES[action.op](plan, plan.stages[action.stage], action, start)


def _forward(plan: Plan, stage: Stage, action: Action, start: int) -> Iterator[Action]:
    assert action.microbatch is not None and action.version is not None
    if action.version * stage.round > start:
        yield Action(Op.UPDATE, action.rank, stage.index, None, action.version - 1)
    if stage.is_first:
        return
    before = plan.stages[stage.index - 1]
    source = before.rank_of(action.microbatch)
    if source == action.rank:
        yield Action(Op.FORWARD, source, before.index, action.microbatch, before.version_of(action.microbatch))
    else:
        yield Action(Op.RECV_ACT, action.rank, stage.index, action.microbatch, None, source)


def _backward(plan: Plan, stage: Stage, action: Action, start: int) -> Iterator[Action]:
    assert action.microbatch is not None
    yield Action(Op.FORWARD, action.rank, stage.index, action.microbatch, action.version)
    yield from _free_buffer(stage, action.rank, stage.update_of(action.microbatch), start)
    if stage.is_last:
        yield from _skip_decision(plan, action.microbatch, start)
        return
    behind = plan.stages[stage.index + 1]
    source = behind.rank_of(action.microbatch)
    if source == action.rank:
        yield Action(Op.BACKWARD, source, behind.index, action.microbatch, behind.version_of(action.microbatch))
    else:
        yield Action(Op.RECV_GRAD, action.rank, stage.index, action.microbatch, None, source)


def _free_buffer(stage: Stage, rank: int, update: int, start: int) -> Iterator[Action]:
    """The update that used the same gradient buffer before this one."""
    before = update - stage.num_gradients
    if (before + 1) * stage.round > start:
        yield Action(Op.UPDATE, rank, stage.index, None, before)


def _skip_decision(plan: Plan, microbatch: int, start: int) -> Iterator[Action]:
    """What decides the loss scale of a batch: the first stage's overflow flag of an earlier batch."""
    batch = microbatch // plan.microbatches - plan.decision_delay
    if plan.flags and batch * plan.microbatches >= start:
        yield Action(Op.AGREE, plan.stages[0].ranks[0], 0, None, batch)


def _send(plan: Plan, stage: Stage, action: Action, start: int) -> Iterator[Action]:
    assert action.microbatch is not None
    op = Op.FORWARD if action.op is Op.SEND_ACT else Op.BACKWARD
    yield Action(op, action.rank, stage.index, action.microbatch, stage.version_of(action.microbatch))


def _receive(plan: Plan, stage: Stage, action: Action, start: int) -> Iterator[Action]:
    assert action.peer is not None
    op, source = (Op.SEND_ACT, stage.index - 1) if action.op is Op.RECV_ACT else (Op.SEND_GRAD, stage.index + 1)
    yield Action(op, action.peer, source, action.microbatch, None, action.rank)


def _own_backwards(stage: Stage, rank: int, update: int) -> Iterator[Action]:
    for microbatch in stage.own(rank, range(update * stage.round, (update + 1) * stage.round)):
        yield Action(Op.BACKWARD, rank, stage.index, microbatch, stage.version_of(microbatch))


def _reduce(plan: Plan, stage: Stage, action: Action, start: int) -> Iterator[Action]:
    assert action.version is not None
    yield from _free_buffer(stage, action.rank, action.version, start)
    yield from _own_backwards(stage, action.rank, action.version)


def _tie(plan: Plan, stage: Stage, action: Action, start: int) -> Iterator[Action]:
    assert action.version is not None
    tie = plan.tie_of(stage)
    for home in (plan.stages[index] for index in (tie.stages if tie else ())):
        if action.rank in home.ranks:
            yield from _reduce(plan, home, action, start)


def _reduced(plan: Plan, stage: Stage, rank: int, update: int) -> Iterator[Action]:
    """The actions that complete a stage's gradient on a rank."""
    if stage.replicas == 1:
        yield from _own_backwards(stage, rank, update)
    for replica in stage.ranks if stage.replicas > 1 else ():
        yield Action(Op.REDUCE, replica, stage.index, None, update)
    if (tie := plan.tie_of(stage)) is not None:
        for other in plan.ranks_of(tie.stages):
            yield Action(Op.TIE, other, plan.tied_stage(tie, other).index, None, update)


def _agree(plan: Plan, stage: Stage, action: Action, start: int) -> Iterator[Action]:
    assert action.version is not None
    agreeing = plan.stages_of(action.rank)
    if plan.flags:
        agreeing = (stage,)
    elif (tie := plan.tie_of(stage)) is not None and not plan.agree:
        agreeing = tuple(carried for carried in agreeing if carried.index in tie.stages)
    for carried in agreeing:
        yield from _reduced(plan, carried, action.rank, action.version)
    if plan.flags and not stage.is_last:
        behind = plan.stages[stage.index + 1]
        yield Action(Op.AGREE, behind.ranks[0], behind.index, None, action.version)


def _update(plan: Plan, stage: Stage, action: Action, start: int) -> Iterator[Action]:
    assert action.version is not None
    if action.version * stage.round > start:
        yield Action(Op.UPDATE, action.rank, stage.index, None, action.version - 1)
    yield from _reduced(plan, stage, action.rank, action.version)
    for rank in range(plan.world) if plan.agree else ():
        yield Action(Op.AGREE, rank, plan.stages_of(rank)[0].index, None, action.version)
    if plan.flags:
        yield Action(Op.AGREE, action.rank, stage.index, None, action.version)
    if plan.ties_agree and (tie := plan.tie_of(stage)) is not None:
        for rank in plan.ranks_of(tie.stages):
            yield Action(Op.AGREE, rank, plan.tied_stage(tie, rank).index, None, action.version)


_RULES = {
    Op.FORWARD: _forward,
    Op.BACKWARD: _backward,
    Op.SEND_ACT: _send,
    Op.SEND_GRAD: _send,
    Op.RECV_ACT: _receive,
    Op.RECV_GRAD: _receive,
    Op.REDUCE: _reduce,
    Op.TIE: _tie,
    Op.AGREE: _agree,
    Op.UPDATE: _update,
}
