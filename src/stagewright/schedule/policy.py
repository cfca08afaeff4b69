"""The order of a rank's computes: one rule that gives 1F1B, GPipe and interleaved stages, and never deadlocks.

Every task of a rank gets a key, and a rank's program is its tasks in the order of their keys. Keys are positions in
one order of the whole pipeline that respects every dependency, so no two ranks can wait for each other:

    position j:  B(j) of stages S-1 ... 0 | REDUCE, TIE, AGREE, UPDATE that end with j | F(i) that B(j) lets in

Forward of microbatch i at stage s is let in as soon as every microbatch below `barrier(i)` is backward there: early
enough to fill the depth, late enough for its version to exist. With depth 1 at the last stage that is 1F1B; with a
depth of a whole batch it is GPipe; where a rank carries several stages their tasks interleave by the same keys."""

from __future__ import annotations

from enum import IntEnum

from stagewright.plan.plan import Plan, Stage, Tie
from stagewright.schedule.action import Action, Op

Key = tuple[int, int, int, int]


class Phase(IntEnum):
    """What comes first at one position of the order."""

    BACKWARD = 0
    REDUCE = 1
    TIE = 2
    AGREE = 3
    UPDATE = 4
    FORWARD = 5


def barrier(plan: Plan, stage: Stage, microbatch: int) -> int:
    """Every microbatch below this number is backward at `stage` before forward of `microbatch` begins.

    Two things hold a forward back: the version it uses must exist, and a replica holds no more than its depth. What
    holds a stage back holds the stages behind it back as well, since they are fed by it.
    """
    return max(
        max(fed_by.version_of(microbatch) * fed_by.round, microbatch - fed_by.depth * fed_by.replicas + 1)
        for fed_by in plan.stages[: stage.index + 1]
    )


def forward_key(plan: Plan, stage: Stage, microbatch: int, start: int) -> Key:
    return (max(start, barrier(plan, stage, microbatch)) - 1, Phase.FORWARD, microbatch, stage.index)


def backward_key(stage: Stage, microbatch: int) -> Key:
    return (microbatch, Phase.BACKWARD, -stage.index, 0)


def reduce_key(plan: Plan, stage: Stage, rank: int, update: int) -> Key:
    """After the backward that it overlaps with, otherwise at the end of the round."""
    overlapped = overlapped_backward(plan, stage, rank, update)
    position = (update + 1) * stage.round - 1 if overlapped is None else overlapped
    return (position, Phase.REDUCE, -stage.index, 0)


def tie_key(plan: Plan, tie: Tie, update: int) -> Key:
    """At the end of the round, which is the same in every home, and on every rank."""
    first = plan.stages[tie.stages[0]]
    return ((update + 1) * first.round - 1, Phase.TIE, -first.index, 0)


def sum_order(plan: Plan, action: Action) -> tuple[int, int, int]:
    """The place of a reduce or tie in the one order of the whole pipeline: by the end of its round, ties last."""
    assert action.version is not None
    stage = plan.stages[action.stage]
    tie = plan.tie_of(stage) if action.op is Op.TIE else None
    index, phase = (stage.index, Phase.REDUCE) if tie is None else (tie.stages[0], Phase.TIE)
    return ((action.version + 1) * stage.round, phase, -index)


def overlaps(plan: Plan, stage: Stage, rank: int) -> bool:
    """Whether a rank starts to reduce a stage's gradient while backward is still filling it, bucket by bucket.

    A rank of several stages does not: it issues its reduces in the one global order, by the end of the round, then by
    stage descending.
    """
    return stage.replicas > 1 and len(plan.stages_of(rank)) == 1


def overlapped_backward(plan: Plan, stage: Stage, rank: int, update: int) -> int | None:
    """The microbatch whose backward on a rank overlaps with the reduce of an update: its last of the round, or none."""
    own = stage.own(rank, range(update * stage.round, (update + 1) * stage.round))
    return own[-1] if own and overlaps(plan, stage, rank) else None


def agree_key(plan: Plan, update: int) -> Key:
    return ((update + 1) * plan.microbatches - 1, Phase.AGREE, 0, 0)


def tie_agree_key(plan: Plan, tie: Tie, update: int, span: range) -> Key:
    """Before the first update of a home, which needs the norms of all."""
    homes = [plan.stages[index] for index in tie.stages]
    position = min(update_key(plan, home, rank, update, span)[0] for home in homes for rank in home.ranks)
    return (position, Phase.AGREE, -tie.stages[0], 0)


def flag_key(plan: Plan, stage: Stage, update: int, span: range) -> Key:
    """Before the first update that needs it, which is this stage's or that of a stage before it.

    A stage passes its flag on to the stage before it. So positions fall from stage to stage, as flags travel.
    """
    position = min(
        update_key(plan, fed_by, rank, update, span)[0]
        for fed_by in plan.stages[: stage.index + 1]
        for rank in fed_by.ranks
    )
    return (position, Phase.AGREE, -stage.index, 0)


def update_key(plan: Plan, stage: Stage, rank: int, update: int, span: range) -> Key:
    """As late as it can be where a reduce is to be hidden, otherwise at once.

    The latest is before the first forward that needs the new version, and before the first backward or reduce that
    needs this update's gradient buffer again.
    """
    if stage.num_gradients == 1:
        return ((update + 1) * stage.round - 1, Phase.UPDATE, -stage.index, 0)
    forwards = stage.own(rank, range((update + stage.versions) * stage.round, span.stop))
    backwards = stage.own(rank, range((update + stage.num_gradients) * stage.round, span.stop))
    position = min(span.stop, (update + stage.num_gradients + 1) * stage.round - 1)
    if len(forwards):
        position = min(position, barrier(plan, stage, forwards[0]))
    if len(backwards):
        position = min(position, backwards[0])
    return (position - 1, Phase.UPDATE, -stage.index, 0)
