"""What the design says of every schedule, held over many shapes.

The rules stand here in the design's own words: nothing asks `Stage`, `requires` or the checker, save the last test.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.cluster.topology import Device
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode, Plan, TiedParameter
from stagewright.schedule.action import Action, Op
from stagewright.schedule.check import check
from stagewright.schedule.lower import program
from tests.marks import IS_NIGHTLY

many = settings(max_examples=250 if IS_NIGHTLY else 100, derandomize=True, deadline=None)


@dataclass(frozen=True)
class Case:
    """A plan, a span of its microbatches, and what the design says of both."""

    plan: Plan
    placement: tuple[tuple[Device, ...], ...]
    lags: list[int]  # K of each stage
    depths: list[int]
    span: range
    ties: tuple[tuple[int, ...], ...] = ()  # the stages of each

    @cached_property
    def programs(self) -> list[list[Action]]:
        return [list(program(self.plan, rank, self.span)) for rank in range(self.plan.world)]

    @cached_property
    def ranks(self) -> list[list[int]]:
        """The ranks of each stage, in replica order."""
        devices = sorted({device for devices in self.placement for device in devices})
        return [[devices.index(device) for device in stage] for stage in self.placement]

    @property
    def stages(self) -> range:
        return range(len(self.placement))

    def round(self, stage: int) -> int:
        return len(self.placement[stage]) if self.plan.mode is Mode.PIPEDREAM else self.plan.microbatches

    def rank(self, stage: int, microbatch: int) -> int:
        return self.ranks[stage][microbatch % len(self.ranks[stage])]

    def version(self, stage: int, microbatch: int) -> int:
        return max(0, microbatch // self.round(stage) + 1 - self.lags[stage])

    def updates(self, stage: int) -> list[int]:
        return list(range(self.span.start // self.round(stage), self.span.stop // self.round(stage)))

    def joins(self, stage: int, rank: int) -> tuple[int, ...]:
        """The stages of the tie that a rank joins under this stage: the first one of the tie that it runs."""
        tie = next((tie for tie in self.ties if stage in tie), ())
        return tie if [other for other in tie if rank in self.ranks[other]][:1] == [stage] else ()

    def tied_ranks(self, tie: tuple[int, ...]) -> set[int]:
        return {rank for stage in tie for rank in self.ranks[stage]}

    def replicas(self) -> Iterator[tuple[int, int, list[Action]]]:
        """Each replica's stage, its rank, and what it does there."""
        for stage in self.stages:
            for rank in self.ranks[stage]:
                yield stage, rank, [action for action in self.programs[rank] if action.stage == stage]


def expected_lags(mode: Mode, replicas: list[int], staleness: int) -> list[int]:
    num_stages = len(replicas)
    if mode is Mode.PIPEDREAM:  # ceil(sum of r_t for t >= s, / r_s)
        return [(sum(replicas[s:]) + replicas[s] - 1) // replicas[s] for s in range(num_stages)]
    return [min(num_stages - s, staleness + 1) if mode is Mode.STALE else 1 for s in range(num_stages)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_stages = draw(st.integers(1, 4))
    per_stage = {"min_size": num_stages, "max_size": num_stages}
    # Stages on the same machine may share devices, in any order of replicas.
    machines = draw(st.lists(st.integers(0, 3), **per_stage))
    indices = st.lists(st.integers(0, 8), min_size=1, max_size=7, unique=True)
    placement = tuple(tuple(Device(machine, index) for index in draw(indices)) for machine in machines)
    microbatches = draw(st.integers(1, 9))
    mode = draw(st.sampled_from([Mode.STALE, Mode.PIPEDREAM, Mode.SYNC]))
    versions = draw(st.none() | st.lists(st.integers(1, 4), **per_stage)) if mode is Mode.STALE else None
    staleness = draw(st.integers(0, 4)) if mode is Mode.STALE and versions is None else None
    depths = draw(st.lists(st.integers(1, 5), **per_stage))
    ties = draw_ties(draw, [len(stage) for stage in placement], mode)
    for tie in ties if versions is not None else ():
        versions = [max(versions[s] for s in tie) if stage in tie else k for stage, k in enumerate(versions)]
    lags = versions or expected_lags(mode, [len(stage) for stage in placement], staleness or 0)
    for tie in ties:
        lags = [max(lags[s] for s in tie) if stage in tie else lag for stage, lag in enumerate(lags)]
    agree = mode is not Mode.PIPEDREAM and set(lags) == {1} and draw(st.booleans())
    plan = make_plan(
        placement,
        batch=2 * microbatches,
        microbatches=microbatches,
        mode=mode,
        staleness=staleness,
        versions=versions,
        depths=depths,
        agree=agree,
        tied=[TiedParameter((f"w{number}",), tie) for number, tie in enumerate(ties)],
    )
    length = -(-draw(st.integers(30, 60) | st.integers(1, 60)) // plan.alignment)  # mostly beyond the fill
    start = draw(st.integers(0, 5))
    return Case(plan, placement, lags, depths, range(start * plan.alignment, (start + length) * plan.alignment), ties)


def draw_ties(draw: st.DrawFn, replicas: list[int], mode: Mode) -> tuple[tuple[int, ...], ...]:
    """None in half of the plans, else one or two ties of different stages; in pipedream of as many replicas."""
    ties: list[tuple[int, ...]] = []
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        rest = [stage for stage in range(len(replicas)) if not any(stage in tie for tie in ties)]
        if mode is Mode.PIPEDREAM and rest:
            rest = [stage for stage in rest if replicas[stage] == replicas[rest[0]]]
        if len(rest) > 1:
            ties.append(tuple(sorted(draw(st.lists(st.sampled_from(rest), min_size=2, unique=True)))))
    return tuple(sorted(ties))


def key(action: Action) -> tuple[int | None, int | None]:
    return action.microbatch, action.version


# --- Work ------------------------------------------------------------------------------------------------------------


@many
@given(cases())
def test_each_microbatch_goes_forward_and_backward_once_on_its_replica_and_its_version(case: Case) -> None:
    for stage, rank, actions in case.replicas():
        own = [(i, case.version(stage, i)) for i in case.span if case.rank(stage, i) == rank]
        assert [key(action) for action in actions if action.op is Op.FORWARD] == own
        assert [key(action) for action in actions if action.op is Op.BACKWARD] == own


@many
@given(cases())
def test_a_rank_does_nothing_for_a_stage_it_does_not_carry(case: Case) -> None:
    for rank, actions in enumerate(case.programs):
        assert all(action.rank == rank and rank in case.ranks[action.stage] for action in actions)


@many
@given(cases())
def test_every_replica_makes_every_update_once_and_in_order(case: Case) -> None:
    for stage, _, actions in case.replicas():
        assert [key(a) for a in actions if a.op is Op.UPDATE] == [(None, update) for update in case.updates(stage)]


@many
@given(cases())
def test_an_update_follows_all_that_it_is_made_of(case: Case) -> None:
    for stage, _, actions in case.replicas():
        place = {(action.op, *key(action)): at for at, action in enumerate(actions)}
        for (op, microbatch, version), at in place.items():
            if op is Op.BACKWARD:
                assert microbatch is not None
                made_into = microbatch // case.round(stage)
                sums = [(op, None, made_into) for op in (Op.REDUCE, Op.TIE)]
                assert all(at < place.get(joined, len(actions)) for joined in (*sums, (Op.UPDATE, None, made_into)))
            if op in (Op.REDUCE, Op.TIE, Op.AGREE):
                assert at < place[Op.UPDATE, None, version]


@many
@given(cases())
def test_a_rank_joins_a_tie_once_per_update_after_the_backwards_and_before_the_updates_of_its_homes(case: Case) -> None:
    for stage, rank, actions in case.replicas():
        tie = case.joins(stage, rank)
        assert [key(a) for a in actions if a.op is Op.TIE] == [(None, u) for u in case.updates(stage) if tie]
        place = {(a.op, a.stage, a.microbatch, a.version): at for at, a in enumerate(case.programs[rank])}
        for home in (home for home in tie if rank in case.ranks[home]):
            for update in case.updates(home):
                joined = place[Op.TIE, stage, None, update]
                assert joined < place[Op.UPDATE, home, None, update]
                for i in range(update * case.round(home), (update + 1) * case.round(home)):
                    if case.rank(home, i) == rank:
                        assert place[Op.BACKWARD, home, i, case.version(home, i)] < joined


@many
@given(cases())
def test_a_version_is_there_when_it_is_used(case: Case) -> None:
    for stage, _, actions in case.replicas():
        made = case.span.start // case.round(stage)
        for action in actions:
            made += action.op is Op.UPDATE
            if action.op in (Op.FORWARD, Op.BACKWARD):
                assert action.version is not None
                assert action.version <= made, "not made yet"
                assert made - action.version < case.lags[stage], "its slot has been taken"


@many
@given(cases())
def test_a_gradient_buffer_is_free_when_it_is_used(case: Case) -> None:
    for stage, _, actions in case.replicas():
        is_tied = any(stage in tie for tie in case.ties)
        buffers = 2 if case.lags[stage] > 1 and (len(case.ranks[stage]) > 1 or is_tied) else 1
        made = case.span.start // case.round(stage)
        for action in actions:
            made += action.op is Op.UPDATE
            if action.op is Op.BACKWARD:
                assert action.microbatch is not None
                assert made <= action.microbatch // case.round(stage) < made + buffers
            elif action.op in (
                Op.REDUCE,
                Op.TIE,
            ):  # a replica without a microbatch of the round joins with a buffer of zeros
                assert action.version is not None
                assert made <= action.version < made + buffers


@many
@given(cases())
def test_a_replica_holds_no_more_than_its_depth(case: Case) -> None:
    for stage, _, actions in case.replicas():
        held = 0
        for action in actions:
            held += (action.op is Op.FORWARD) - (action.op is Op.BACKWARD)
            assert 0 <= held <= case.depths[stage]
        assert held == 0


# --- Between ranks ---------------------------------------------------------------------------------------------------


@many
@given(cases())
def test_every_send_has_its_receive_in_the_same_order(case: Case) -> None:
    sent, received = defaultdict(list), defaultdict(list)
    for rank, actions in enumerate(case.programs):
        for op, _, stage, microbatch, _, peer in actions:
            if op is Op.SEND_ACT:
                sent["activations", stage, rank, peer].append(microbatch)
            if op is Op.RECV_ACT:
                received["activations", stage - 1, peer, rank].append(microbatch)
            if op is Op.SEND_GRAD:
                sent["gradients", stage, rank, peer].append(microbatch)
            if op is Op.RECV_GRAD:
                received["gradients", stage + 1, peer, rank].append(microbatch)
    expected = defaultdict(list)
    for i in case.span:
        for before, behind in pairwise(case.stages):
            source, target = case.rank(before, i), case.rank(behind, i)
            if source != target:  # one rank hands over to itself without a message
                expected["activations", before, source, target].append(i)
                expected["gradients", behind, target, source].append(i)
    assert sent == received == expected


@many
@given(cases())
def test_every_replica_joins_every_reduce_in_one_global_order(case: Case) -> None:
    for rank, actions in enumerate(case.programs):
        found = [(a.op is Op.TIE, a.version, a.stage) for a in actions if a.op in (Op.REDUCE, Op.TIE)]
        # By the end of the round; reduces before ties; then by stage descending, of a tie by its first one.
        joined = [
            ((update + 1) * case.round(stage), False, -stage, update, stage)
            for stage in case.stages
            if rank in case.ranks[stage] and len(case.ranks[stage]) > 1
            for update in case.updates(stage)
        ]
        joined += [
            ((update + 1) * case.round(stage), True, -case.joins(stage, rank)[0], update, stage)
            for stage in case.stages
            if rank in case.ranks[stage] and case.joins(stage, rank)
            for update in case.updates(stage)
        ]
        assert found == [(is_tie, update, stage) for _, is_tie, _, update, stage in sorted(joined)]


@many
@given(cases())
def test_all_ranks_agree_once_a_batch_between_its_reduces_and_its_updates(case: Case) -> None:
    for actions in case.programs:
        agreed = -1 + case.span.start // case.plan.microbatches
        for action in actions:
            if action.op is Op.AGREE:
                assert case.plan.agree and action.version == agreed + 1
                agreed += 1
            if case.plan.agree and action.op is Op.UPDATE:
                assert action.version == agreed
            if case.plan.agree and action.op in (Op.REDUCE, Op.TIE):
                assert action.version == agreed + 1


class Execution:
    """Ranks that run their programs in order: sends are buffered, and what is not there yet is waited for."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.position = [0] * case.plan.world
        self.mail: dict[tuple[Op, int, int, int], deque[int]] = defaultdict(deque)
        self.present: set[tuple[Op, int, int]] = set()  # what a stage's replica has at hand: (F|B, stage, microbatch)
        self.joined: Counter[tuple[Op, int, int]] = Counter()

    def run(self) -> None:
        """Let every rank go as far as it can, until none can."""
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(self.case.programs):
                while self.position[rank] < len(actions) and self.step(actions[self.position[rank]]):
                    self.position[rank] += 1
                    moved = True

    @property
    def stuck(self) -> dict[int, str]:
        programs = enumerate(self.case.programs)
        return {rank: str(a[self.position[rank]]) for rank, a in programs if self.position[rank] < len(a)}

    def step(self, action: Action) -> bool:
        """Do the action, or say that it must wait."""
        op, rank, stage, microbatch, version, peer = action
        if op in (Op.FORWARD, Op.BACKWARD):
            self.compute(op, rank, stage, microbatch)
        elif op in (Op.SEND_ACT, Op.SEND_GRAD):
            self.mail[op, stage, rank, peer].append(microbatch)
        elif op in (Op.RECV_ACT, Op.RECV_GRAD):
            is_forward = op is Op.RECV_ACT
            letters = self.mail[
                Op.SEND_ACT if is_forward else Op.SEND_GRAD, stage + (-1 if is_forward else 1), peer, rank
            ]
            if not letters:
                return False
            assert letters.popleft() == microbatch
            self.present.add((Op.FORWARD if is_forward else Op.BACKWARD, stage, microbatch))
        elif op is Op.REDUCE:
            self.joined[op, stage, version] += 1
        elif op is Op.TIE:
            self.joined[op, self.case.joins(stage, rank)[0], version] += 1
        elif op is Op.AGREE:
            return self.meets_all(action)
        elif op is Op.UPDATE:
            return self.is_whole(stage, version)
        return True

    def is_whole(self, stage: int, update: int) -> bool:
        """Whether every rank has joined what completes a stage's gradient."""
        replicas, joined = len(self.case.ranks[stage]), self.joined[Op.REDUCE, stage, update]
        ties = [tie for tie in self.case.ties if stage in tie]
        return (replicas == 1 or joined == replicas) and all(
            self.joined[Op.TIE, tie[0], update] == len(self.case.tied_ranks(tie)) for tie in ties
        )

    def compute(self, op: Op, rank: int, stage: int, microbatch: int) -> None:
        """Use up what the neighbour gave, and hand over where the other neighbour is on this rank."""
        ahead = 1 if op is Op.FORWARD else -1
        source, target = stage - ahead, stage + ahead
        if source in self.case.stages:
            assert (op, stage, microbatch) in self.present, "only this rank could have brought it"
        if target in self.case.stages and self.case.rank(target, microbatch) == rank:
            self.present.add((op, target, microbatch))

    def meets_all(self, action: Action) -> bool:
        """Whether every rank is at this agreement or past it, and its reduces are whole."""
        carried = [stage for stage in self.case.stages if action.rank in self.case.ranks[stage]]
        whole = all(self.is_whole(stage, action.version) for stage in carried)
        there = [
            any(a.op is Op.AGREE and a.version == action.version for a in actions[: self.position[rank] + 1])
            for rank, actions in enumerate(self.case.programs)
        ]
        return whole and all(there)


@many
@given(cases())
def test_no_rank_waits_forever(case: Case) -> None:
    execution = Execution(case)
    execution.run()
    assert execution.stuck == {}
    assert not any(execution.mail.values())


def test_the_execution_above_finds_ranks_that_wait_for_each_other() -> None:
    placement = ((Device(0, 0),), (Device(0, 1),))
    plan = make_plan(placement, batch=1, microbatches=1)
    case = Case(plan, placement, [1, 1], [1, 1], range(1))
    first = case.programs[0]
    first.insert(0, first.pop(2))  # wait for the gradient before the activations are sent
    execution = Execution(case)
    execution.run()
    assert execution.stuck == {0: "0RG0<1", 1: "1RA0<0"}


# --- Pauses and the checker ------------------------------------------------------------------------------------------


@many
@given(cases(), st.data())
def test_a_pause_changes_no_number(case: Case, data: st.DataObject) -> None:
    pause = data.draw(st.sampled_from(range(case.span.start, case.span.stop + 1, case.plan.alignment)))
    parts = range(case.span.start, pause), range(pause, case.span.stop)
    for rank, actions in enumerate(case.programs):
        paused = [action for part in parts for action in program(case.plan, rank, part)]
        # Pausing only moves actions: each stage still does each kind of thing to the same numbers in the same order.
        assert sorted(paused, key=lambda a: (a.stage, a.op)) == sorted(actions, key=lambda a: (a.stage, a.op))


@many
@given(cases(), st.integers(1, 9))
def test_after_a_pause_the_pipeline_fills_as_at_the_beginning(case: Case, times: int) -> None:
    later = times * math.lcm(case.plan.alignment, *(len(ranks) for ranks in case.ranks))
    length = len(case.span)
    for rank in range(case.plan.world):
        first, second = (program(case.plan, rank, range(start, start + length)) for start in (0, later))
        for before, after in zip(first, second, strict=True):
            assert (before.op, before.stage, before.peer) == (after.op, after.stage, after.peer)
            assert before.microbatch is None or after.microbatch == before.microbatch + later


@many
@given(cases())
def test_the_checker_accepts_them_all(case: Case) -> None:
    check(case.plan)
    check(case.plan, case.span)
