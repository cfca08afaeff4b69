"""Literal programs: what each rank does, in order."""

import pytest

from stagewright.cluster.placement import parse_placement
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode, Plan
from stagewright.schedule.action import SENDS, TRANSFERS, Op
from stagewright.schedule.lower import evaluation_program, program
from stagewright.schedule.policy import overlapped_backward, overlaps
from tests.actions import parse_program

FOUR_STAGES = "0:0.0:1.0:2.0:3"


def plan(placement: str, microbatches: int, **choices: object) -> Plan:
    return make_plan(
        parse_placement(placement),
        batch=microbatches,
        microbatches=microbatches,
        **choices,  # type: ignore[arg-type]
    )


def texts(plan: Plan, span: range) -> list[str]:
    """The program of every rank."""
    return [" ".join(map(str, program(plan, rank, span))) for rank in range(plan.world)]


def computes(plan: Plan, span: range) -> list[str]:
    """The forwards and backwards of every rank, without versions."""
    return [
        " ".join(f"{a.op}{a.microbatch}" for a in program(plan, rank, span) if a.op in (Op.FORWARD, Op.BACKWARD))
        for rank in range(plan.world)
    ]


# --- One replica a stage ---------------------------------------------------------------------------------------------


def test_1f1b_is_a_triangle() -> None:
    assert computes(plan(FOUR_STAGES, 4, depths=[4, 3, 2, 1]), range(4)) == [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_depths_of_a_whole_batch_are_gpipe() -> None:
    assert computes(plan(FOUR_STAGES, 4, depths=[4, 4, 4, 4]), range(4)) == ["F0 F1 F2 F3 B0 B1 B2 B3"] * 4


def test_depth_one_everywhere_is_one_microbatch_at_a_time() -> None:
    assert computes(plan(FOUR_STAGES, 3, depths=[1, 1, 1, 1]), range(3)) == ["F0 B0 F1 B1 F2 B2"] * 4


def test_what_holds_the_first_stage_back_holds_those_behind_it_back() -> None:
    # The last stage could hold three, but gets no more than the two that the first lets in.
    assert computes(plan("0:0.0:1", 4, depths=[2, 3]), range(4)) == ["F0 F1 B0 F2 B1 F3 B2 B3"] * 2


def test_transfers_stand_around_the_computes() -> None:
    assert texts(plan("0:0.0:1.0:2", 2, depths=[3, 2, 1]), range(2)) == [
        "0F0@0 0SA0>1 0F1@0 0SA1>1 0RG0<1 0B0@0 0RG1<1 0B1@0 0U@0",
        "1RA0<0 1F0@0 1SA0>2 1RA1<0 1F1@0 1SA1>2 1RG0<2 1B0@0 1SG0>0 1RG1<2 1B1@0 1SG1>0 1U@0",
        "2RA0<1 2F0@0 2B0@0 2SG0>1 2RA1<1 2F1@0 2B1@0 2SG1>1 2U@0",
    ]


def test_sync_drains_between_batches() -> None:
    assert texts(plan("0:0.0:1", 2), range(4)) == [
        "0F0@0 0SA0>1 0F1@0 0SA1>1 0RG0<1 0B0@0 0RG1<1 0B1@0 0U@0 "
        "0F2@1 0SA2>1 0F3@1 0SA3>1 0RG2<1 0B2@1 0RG3<1 0B3@1 0U@1",
        "1RA0<0 1F0@0 1B0@0 1SG0>0 1RA1<0 1F1@0 1B1@0 1SG1>0 1U@0 "
        "1RA2<0 1F2@1 1B2@1 1SG2>0 1RA3<0 1F3@1 1B3@1 1SG3>0 1U@1",
    ]


def test_agreement_stands_between_the_last_backward_and_the_update() -> None:
    assert texts(plan("0:0.0:1-2", 2, agree=True, depths=[2, 1]), range(2)) == [
        "0F0@0 0SA0>1 0F1@0 0SA1>2 0RG0<1 0B0@0 0RG1<2 0B1@0 0A@0 0U@0",
        "1RA0<0 1F0@0 1B0@0 1SG0>0 1R@0 1A@0 1U@0",
        "1RA1<0 1F1@0 1B1@0 1SG1>0 1R@0 1A@0 1U@0",
    ]


# --- Unequal stages and lag ------------------------------------------------------------------------------------------


def test_two_replicas_feed_one_and_lag_by_an_update() -> None:
    # Three in flight a replica. Batches 0 and 1 run on version 0, batch 2 on version 1, which update 0 makes just
    # before the first forward that needs it; nothing needs the later updates, so they come when all else is done.
    assert texts(plan("0:0-1.0:2", 4, mode=Mode.STALE), range(12)) == [
        "0F0@0 0SA0>2 0F2@0 0SA2>2 0F4@0 0SA4>2 0RG0<2 0B0@0 0F6@0 0SA6>2 0RG2<2 0B2@0 0R@0 0U@0 "
        "0F8@1 0SA8>2 0RG4<2 0B4@0 0F10@1 0SA10>2 0RG6<2 0B6@0 0R@1 "
        "0RG8<2 0B8@1 0RG10<2 0B10@1 0R@2 0U@1 0U@2",
        "0F1@0 0SA1>2 0F3@0 0SA3>2 0F5@0 0SA5>2 0RG1<2 0B1@0 0F7@0 0SA7>2 0RG3<2 0B3@0 0R@0 0U@0 "
        "0F9@1 0SA9>2 0RG5<2 0B5@0 0F11@1 0SA11>2 0RG7<2 0B7@0 0R@1 "
        "0RG9<2 0B9@1 0RG11<2 0B11@1 0R@2 0U@1 0U@2",
        "1RA0<0 1F0@0 1B0@0 1SG0>0 1RA1<1 1F1@0 1B1@0 1SG1>1 1RA2<0 1F2@0 1B2@0 1SG2>0 1RA3<1 1F3@0 1B3@0 1SG3>1 1U@0 "
        "1RA4<0 1F4@1 1B4@1 1SG4>0 1RA5<1 1F5@1 1B5@1 1SG5>1 1RA6<0 1F6@1 1B6@1 1SG6>0 1RA7<1 1F7@1 1B7@1 1SG7>1 1U@1 "
        "1RA8<0 1F8@2 1B8@2 1SG8>0 1RA9<1 1F9@2 1B9@2 1SG9>1 1RA10<0 1F10@2 1B10@2 1SG10>0 "
        "1RA11<1 1F11@2 1B11@2 1SG11>1 1U@2",
    ]


def test_lag_continues_after_a_pause() -> None:
    # Batch 2 begins in an empty pipeline with versions 1 and 2 at hand, and still runs on version 1.
    assert texts(plan("0:0.0:1", 2, mode=Mode.STALE), range(4, 6)) == [
        "0F4@1 0SA4>1 0F5@1 0SA5>1 0RG4<1 0B4@1 0RG5<1 0B5@1 0U@2",
        "1RA4<0 1F4@2 1B4@2 1SG4>0 1RA5<0 1F5@2 1B5@2 1SG5>0 1U@2",
    ]


def test_pipedream_updates_every_round() -> None:
    # A round of stage 0 is two microbatches and lags by one; a round of stage 1 is one microbatch and does not lag.
    assert texts(plan("0:0-1.0:2", 4, mode=Mode.PIPEDREAM), range(6)) == [
        "0F0@0 0SA0>2 0F2@0 0SA2>2 0RG0<2 0B0@0 0R@0 0U@0 0F4@1 0SA4>2 0RG2<2 0B2@0 0R@1 0RG4<2 0B4@1 0R@2 0U@1 0U@2",
        "0F1@0 0SA1>2 0F3@0 0SA3>2 0RG1<2 0B1@0 0R@0 0U@0 0F5@1 0SA5>2 0RG3<2 0B3@0 0R@1 0RG5<2 0B5@1 0R@2 0U@1 0U@2",
        "1RA0<0 1F0@0 1B0@0 1SG0>0 1U@0 1RA1<1 1F1@1 1B1@1 1SG1>1 1U@1 "
        "1RA2<0 1F2@2 1B2@2 1SG2>0 1U@2 1RA3<1 1F3@3 1B3@3 1SG3>1 1U@3 "
        "1RA4<0 1F4@4 1B4@4 1SG4>0 1U@4 1RA5<1 1F5@5 1B5@5 1SG5>1 1U@5",
    ]


def test_a_replica_without_a_microbatch_still_reduces() -> None:
    # Two microbatches a batch for three replicas: rank 2 sits out batch 0, rank 1 batch 1, rank 0 batch 2.
    assert texts(plan("0:0-2", 2, mode=Mode.DP), range(6)) == [
        "0F0@0 0B0@0 0R@0 0U@0 0F3@1 0B3@1 0R@1 0U@1 0R@2 0U@2",
        "0F1@0 0B1@0 0R@0 0U@0 0R@1 0U@1 0F4@2 0B4@2 0R@2 0U@2",
        "0R@0 0U@0 0F2@1 0B2@1 0R@1 0U@1 0F5@2 0B5@2 0R@2 0U@2",
    ]


# --- Ranks of several stages -----------------------------------------------------------------------------------------


def test_a_reduce_overlaps_with_the_last_backward_of_the_round_on_a_rank_of_one_stage() -> None:
    two_and_one, four = plan("0:0-1.0:2", 3), plan("0:0-3", 3)
    first, last = two_and_one.stages
    # Microbatches 3, 4 and 5 are those of update 1; with three a batch, replicas take turns in having the last.
    assert [overlapped_backward(two_and_one, first, rank, 0) for rank in (0, 1)] == [2, 1]
    assert [overlapped_backward(two_and_one, first, rank, 1) for rank in (0, 1)] == [4, 5]
    assert overlapped_backward(two_and_one, last, 2, 0) is None, "one replica has nothing to reduce"
    assert [overlapped_backward(four, four.stages[0], rank, 0) for rank in range(4)] == [0, 1, 2, None]


def test_reduces_of_a_rank_of_several_stages_overlap_with_no_backward() -> None:
    partly = plan("0:0-1.0:1-2", 4)
    assert [[overlaps(partly, stage, rank) for rank in stage.ranks] for stage in partly.stages] == [
        [True, False],
        [False, True],
    ]
    assert [overlapped_backward(partly, partly.stages[0], rank, 0) for rank in (0, 1)] == [2, None]


def test_stages_on_the_same_ranks_hand_over_locally() -> None:
    assert texts(plan("0:0-1.0:0-1", 4), range(4)) == [
        "0F0@0 1F0@0 0F2@0 1B0@0 0B0@0 1F2@0 1B2@0 0B2@0 1R@0 0R@0 1U@0 0U@0",
        "0F1@0 1F1@0 0F3@0 1B1@0 0B1@0 1F3@0 1B3@0 0B3@0 1R@0 0R@0 1U@0 0U@0",
    ]


def test_stages_that_share_some_ranks_hand_over_where_they_can() -> None:
    # Microbatch 0 stays on rank 0; microbatch 1 comes from rank 1 and goes back there.
    assert texts(plan("0:0-1.0:0", 2, depths=[1, 1]), range(2)) == [
        "0F0@0 1F0@0 1B0@0 0B0@0 1RA1<1 1F1@0 1B1@0 1SG1>1 0R@0 1U@0 0U@0",
        "0F1@0 0SA1>0 0RG1<0 0B1@0 0R@0 0U@0",
    ]


# --- Evaluation, and programs without end ----------------------------------------------------------------------------


def test_evaluation_only_goes_forward() -> None:
    unequal = plan("0:0-1.0:2", 4, mode=Mode.STALE)
    assert [" ".join(map(str, evaluation_program(unequal, rank, range(3)))) for rank in range(3)] == [
        "0F0 0SA0>2 0F2 0SA2>2",
        "0F1 0SA1>2",
        "1RA0<0 1F0 1RA1<1 1F1 1RA2<0 1F2",
    ]


def test_a_program_is_made_as_it_is_needed() -> None:
    for mode in (Mode.SYNC, Mode.STALE, Mode.PIPEDREAM):
        endless = plan("0:0-1.0:2", 4, mode=mode)
        begins = [str(next(program(endless, rank, range(10**9)))) for rank in range(3)]
        assert begins == ["0F0@0", "0F1@0", "1RA0<0"]


def test_a_program_reads_back_from_its_text() -> None:
    stale = plan("0:0-1.0:2", 4, mode=Mode.STALE)
    for rank, text in enumerate(texts(stale, range(12))):
        assert parse_program(text, rank) == list(program(stale, rank, range(12)))


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.STALE, Mode.PIPEDREAM])
@pytest.mark.parametrize("placement", ["0:0.0:1", "0:0-1.0:2-3.0:4"])
def test_more_microbatches_hold_no_more_memory_and_cost_no_more_messages_each(placement: str, mode: Mode) -> None:
    made = [make_plan(parse_placement(placement), batch=4 * m, microbatches=m, mode=mode) for m in (16, 32, 64)]
    assert len({tuple(stage.depth for stage in one.stages) for one in made}) == 1
    assert len({tuple(stage.versions for stage in one.stages) for one in made}) == 1
    messages = [
        sum(action.op in TRANSFERS for rank in range(one.world) for action in program(one, rank, range(64)))
        for one in made
    ]
    assert messages == [64 * 4 * (len(made[0].stages) - 1)] * 3  # sent and received, forward and back, at each cut


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.STALE, Mode.PIPEDREAM])
def test_no_rank_sends_more_for_a_microbatch_as_stages_and_replicas_are_doubled(mode: Mode) -> None:
    for replicas in (1, 2, 4):
        for stages in (2, 4, 8):
            devices = [f"0:{stage * replicas}-{(stage + 1) * replicas - 1}" for stage in range(stages)]
            made = make_plan(parse_placement(".".join(devices)), batch=64, microbatches=64, mode=mode)
            for rank in range(made.world):
                actions = [action.op for action in program(made, rank, range(64))]
                (stage,) = made.stages_of(rank)
                neighbours = 1 if stage.index in (0, stages - 1) else 2  # of the stage, whatever the replicas
                assert sum(op in SENDS for op in actions) == neighbours * actions.count(Op.FORWARD)
