"""Proves a plan's programs right before anything runs: matched in order, free of deadlock, within lag and depth.

It looks at fill, one period and drain, since everything later repeats them: sends match receives in order, nothing
waits forever, each microbatch runs once per stage on its version, lag and depth stay in bounds, all ranks issue their
reduces and ties in one order, and the homes of a tied parameter use one version.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from stagewright.errors import UserError
from stagewright.plan.plan import Plan, Stage
from stagewright.schedule.action import SENDS, SUMS, Action, Op
from stagewright.schedule.lower import program, updates_in
from stagewright.schedule.policy import sum_order
from stagewright.schedule.requires import requires

_Channel = tuple[Op, int, int | None, int | None]  # operation, stage and rank that send, rank that receives
MOST_SPAN = 2**20  # microbatches whose programs are checked
_SENT_BY = {Op.RECV_ACT: Op.SEND_ACT, Op.RECV_GRAD: Op.SEND_GRAD}


class ScheduleError(RuntimeError):
    """A program that would hang, mix up messages or break the plan's bounds."""


def representative_span(plan: Plan, *, bounded: bool = True) -> range:
    """Fill, one period and drain: everything later repeats this; an error if it is too long to look through."""
    period = math.lcm(plan.microbatches, plan.alignment, *(stage.replicas for stage in plan.stages))
    fill = max(max(stage.versions * stage.round, stage.depth * stage.replicas) + stage.round for stage in plan.stages)
    stop = -(-(fill + period) // plan.alignment) * plan.alignment + plan.alignment
    if bounded and stop > MOST_SPAN:
        raise UserError(
            f"the plan repeats only after {stop} microbatches, and more than {MOST_SPAN} can't be looked through; "
            "give fewer --microbatches, --versions or --depths, or stages whose numbers of replicas divide each other"
        )
    return range(stop)


def check(plan: Plan, span: range | None = None) -> None:
    """Raise ScheduleError unless every rank's program over the span is right."""
    span = span or representative_span(plan)
    check_programs(plan, {rank: list(program(plan, rank, span)) for rank in range(plan.world)}, span)


def check_programs(plan: Plan, programs: Mapping[int, Sequence[Action]], span: range) -> None:
    """Raise ScheduleError unless the given programs are right."""
    _check_ties(plan, span)
    for rank, actions in programs.items():
        _check_work(plan, rank, actions, span)
        _check_depth(plan, actions)
    _check_reduces(plan, programs)
    _check_channels(programs)
    execution_order(plan, programs, span.start)


def execution_order(plan: Plan, programs: Mapping[int, Sequence[Action]], start: int) -> list[Action]:
    """Run every rank's program in order as far as it goes; raise if they do not all end."""
    done: set[Action] = set()
    order: list[Action] = []
    position = dict.fromkeys(programs, 0)
    waiting: dict[Action, list[int]] = defaultdict(list)
    runnable = list(programs)
    while runnable:
        rank = runnable.pop()
        actions = programs[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            missing = next((needed for needed in requires(plan, action, start) if needed not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            done.add(action)
            order.append(action)
            position[rank] += 1
            runnable += waiting.pop(action, ())
    stuck = {rank: programs[rank][position[rank]] for rank in programs if position[rank] < len(programs[rank])}
    if stuck:
        first = min(stuck)
        raise ScheduleError(
            f"the schedule waits for ever: rank {first} at {stuck[first]}, step {position[first] + 1} of "
            f"{len(programs[first])}, with {len(stuck)} of {len(programs)} ranks stuck "
            f"({_some(f'{rank}: {action}' for rank, action in sorted(stuck.items()))})"
        )
    return order


def _some(texts: Iterable[str], most: int = 4) -> str:
    texts = list(texts)
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")


def _difference(one: str, found: Sequence[object], other: str, expected: Sequence[object]) -> str:
    """Two lists from where they first differ."""
    pairs = itertools.zip_longest(found, expected)
    first = next(index for index, (left, right) in enumerate(pairs) if left != right)
    skipped = f"after {first} that agree, " if first else ""
    return (
        f"{skipped}{one} {_some(map(str, found[first:])) or 'nothing'} "
        f"but {other} {_some(map(str, expected[first:])) or 'nothing'}"
    )


def _check_channels(programs: Mapping[int, Sequence[Action]]) -> None:
    """Every channel (boundary, direction, pair of ranks) sends and receives the same microbatches in the same order."""
    sent: dict[_Channel, list[int | None]] = defaultdict(list)
    received: dict[_Channel, list[int | None]] = defaultdict(list)
    for rank, actions in programs.items():
        for action in actions:
            if action.op in SENDS:
                sent[action.op, action.stage, rank, action.peer].append(action.microbatch)
            elif action.op in _SENT_BY:
                source = action.stage + (-1 if action.op is Op.RECV_ACT else 1)
                received[_SENT_BY[action.op], source, action.peer, rank].append(action.microbatch)
    for channel in [*sent, *(channel for channel in received if channel not in sent)]:
        if sent[channel] != received[channel]:
            op, stage, source_rank, target = channel
            raise ScheduleError(
                f"stage {stage} {op.name} from rank {source_rank} to rank {target}: "
                f"{_difference('sent', sent[channel], 'received', received[channel])}"
            )


def _check_work(plan: Plan, rank: int, actions: Sequence[Action], span: range) -> None:
    """Each of the rank's microbatches runs forward and backward once per stage, on its version; updates in order."""
    for stage in plan.stages_of(rank):
        own = list(stage.own(rank, span))
        versions = [stage.version_of(microbatch) for microbatch in own]
        updates = list(updates_in(stage, span))
        wanted: dict[Op, list[tuple[int | None, int | None]]] = {
            Op.FORWARD: list(zip(own, versions, strict=True)),
            Op.BACKWARD: list(zip(own, versions, strict=True)),
            Op.REDUCE: [(None, update) for update in updates] if stage.replicas > 1 else [],
            Op.TIE: [(None, update) for update in updates] if _joins_under(plan, stage, rank) else [],
            Op.UPDATE: [(None, update) for update in updates],
        }
        for op, expected in wanted.items():
            found = [(a.microbatch, a.version) for a in actions if a.op is op and a.stage == stage.index]
            if found != expected:
                raise ScheduleError(
                    f"stage {stage.index} on rank {rank}: {op.name} "
                    f"{_difference('runs', found, 'the plan says', expected)}"
                )


def _joins_under(plan: Plan, stage: Stage, rank: int) -> bool:
    """Whether a rank joins the sums of a tie under this stage."""
    tie = plan.tie_of(stage)
    return tie is not None and plan.tied_stage(tie, rank) is stage


def _check_ties(plan: Plan, span: range) -> None:
    """The homes of a tied parameter use one version for one microbatch, and make their updates of the same ones."""
    tied = [index for tie in plan.ties for index in tie.stages]
    if sorted(tied) != [stage.index for stage in plan.stages if stage.is_tied]:
        raise ScheduleError(
            f"the ties name stages {_some(map(str, tied))}, which are not those that are tied, once each"
        )
    for tie in plan.ties:
        first, *others = (plan.stages[index] for index in tie.stages)
        for other in others:
            for microbatch in range(span.start, span.stop, first.round):
                own, theirs = (
                    (stage.update_of(microbatch), stage.version_of(microbatch), stage.round) for stage in (first, other)
                )
                if own != theirs:
                    raise ScheduleError(
                        f"{tie}, but microbatch {microbatch} has version {own[1]} in stage {first.index} and "
                        f"{theirs[1]} in stage {other.index}, in rounds of {own[2]} and {theirs[2]}"
                    )


def _check_depth(plan: Plan, actions: Sequence[Action]) -> None:
    held: Counter[int] = Counter()
    for action in actions:
        held[action.stage] += (action.op is Op.FORWARD) - (action.op is Op.BACKWARD)
        depth = plan.stages[action.stage].depth
        if held[action.stage] > depth:
            raise ScheduleError(
                f"rank {action.rank} holds {held[action.stage]} microbatches of stage {action.stage} at {action}; "
                f"its depth is {depth}"
            )


def _check_reduces(plan: Plan, programs: Mapping[int, Sequence[Action]]) -> None:
    """Every rank issues its reduces and ties in one global order: by the round's end, then by stage descending."""
    for rank, actions in programs.items():
        reduces = [action for action in actions if action.op in SUMS]
        if reduces != sorted(reduces, key=partial(sum_order, plan)):
            raise ScheduleError(f"rank {rank} issues reduces out of order: {_some(map(str, reduces))}")
