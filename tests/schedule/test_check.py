"""The checker finds what would hang, mix up messages or break the plan's bounds, and says where."""

import re
from dataclasses import replace

import pytest

from stagewright.cluster.placement import parse_placement
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode, Plan, TiedParameter
from stagewright.schedule.action import Action
from stagewright.schedule.check import ScheduleError, check, check_programs, execution_order, representative_span
from stagewright.schedule.lower import program
from stagewright.schedule.requires import requires
from tests.actions import parse_action, parse_program

SPAN = range(12)


def plan(placement: str, microbatches: int, **choices: object) -> Plan:
    return make_plan(
        parse_placement(placement),
        batch=microbatches,
        microbatches=microbatches,
        **choices,  # type: ignore[arg-type]
    )


TIED = plan("0:0-1.0:2.0:3", 4, mode=Mode.STALE, tied=[TiedParameter(("w",), (0, 2))])  # K 3, 2, 3
STALE = plan("0:0-1.0:2", 4, mode=Mode.STALE)
SHARED = plan("0:0-1.0:0-1", 4)


def programs_of(plan: Plan, span: range) -> dict[int, list[Action]]:
    return {rank: list(program(plan, rank, span)) for rank in range(plan.world)}


def fault(plan: Plan, rank: int, right: str, wrong: str, span: range = SPAN) -> str:
    """What the checker says when one rank's program has other actions in one place."""
    programs = programs_of(plan, span)
    text = " ".join(map(str, programs[rank]))
    assert text.count(right) == 1, f"'{right}' stands once in {text}"
    with pytest.raises(ScheduleError) as error:
        check_programs(plan, programs | {rank: parse_program(text.replace(right, wrong), rank)}, span)
    return str(error.value)


def test_right_programs_pass() -> None:
    for right in (STALE, SHARED):
        check_programs(right, programs_of(right, SPAN), SPAN)


def test_the_span_that_is_checked_has_a_fill_a_period_and_a_drain() -> None:
    # Rank and batch repeat every lcm(M, r) microbatches; the fill is K rounds or all replicas at full depth.
    assert len(representative_span(STALE)) >= 2 * 4 + 4 + 4
    assert len(representative_span(plan("0:0-6.0:7", 4))) >= 3 * 7 + 28
    unequal = plan("0:0-2.0:3-4", 4, mode=Mode.PIPEDREAM)
    assert representative_span(unequal).stop % unequal.alignment == 0


# --- Messages --------------------------------------------------------------------------------------------------------


def test_swapped_sends() -> None:
    message = fault(STALE, 0, "0SA0>2 0F2@0 0SA2>2", "0F2@0 0SA2>2 0SA0>2")
    assert message.startswith("stage 0 SEND_ACT from rank 0 to rank 2: sent 2, 0")
    assert "received 0, 2" in message


def test_swapped_sends_late_in_the_span_are_shown_too() -> None:
    message = fault(STALE, 0, "0SA8>2 0RG4<2 0B4@0 0F10@1 0SA10>2", "0RG4<2 0B4@0 0F10@1 0SA10>2 0SA8>2")
    assert "stage 0 SEND_ACT from rank 0 to rank 2" in message
    assert "after 4 that agree, sent 10, 8 but received 8, 10" in message


def test_a_missing_receive() -> None:
    message = fault(STALE, 2, "1RA2<0 ", "")
    assert message.startswith("stage 0 SEND_ACT from rank 0 to rank 2: after 1 that agree, sent 2, 4")
    assert "received 4" in message


def test_a_receive_from_the_wrong_rank() -> None:
    message = fault(STALE, 0, "0RG2<2", "0RG2<1")
    assert re.match("stage 1 SEND_GRAD from rank [12] to rank 0: after", message)  # both channels are wrong


# --- Work ------------------------------------------------------------------------------------------------------------


def names(message: str, rank: int, *ways: str) -> bool:
    """Whether a message names the rank of the fault, and in one of some ways the action."""
    return f"rank {rank}" in message and any(way in message for way in ways)


def test_a_wrong_version() -> None:
    # The rank that has the fault is named, not one of those that wait for it.
    assert names(fault(STALE, 2, "1F5@1 1B5@1", "1F5@0 1B5@0"), 2, "1F5@0", "(5, 0)")


def test_a_backward_on_another_version_than_its_forward() -> None:
    assert names(fault(STALE, 0, "0B8@1", "0B8@0"), 0, "0B8@0", "(8, 0)")


def test_a_missing_backward() -> None:
    assert names(fault(STALE, 2, "1B5@1 ", ""), 2, "1B5@1", "(5, 1)")


def test_a_microbatch_twice() -> None:
    assert names(fault(STALE, 2, "1F5@1", "1F5@1 1F5@1"), 2, "1F5@1", "(5, 1)")


def test_updates_out_of_order() -> None:
    assert names(fault(STALE, 0, "0U@1 0U@2", "0U@2 0U@1"), 0, "0U@2", "(None, 2), (None, 1)")


def test_a_missing_update() -> None:
    assert names(fault(STALE, 0, "0U@1 0U@2", "0U@1"), 0, "0U@2", "(None, 2)")


def test_a_replica_that_leaves_out_a_reduce() -> None:
    message = fault(STALE, 0, "0R@1 ", "")
    assert names(message, 0, "0U@1", "(None, 1)")


def test_reduces_in_the_wrong_order() -> None:
    message = fault(SHARED, 0, "1R@0 0R@0", "0R@0 1R@0", range(4))
    assert message == "rank 0 issues reduces out of order: 0R@0, 1R@0"


def test_a_rank_that_leaves_out_the_sum_of_a_tie() -> None:
    for rank, text in ((0, "0T@1 "), (1, "0T@1 "), (3, "2T@1 ")):
        message = fault(TIED, rank, text, "", range(16))
        assert f"stage {text[0]} on rank {rank}: TIE" in message and "(None, 1)" in message


def test_an_update_that_waits_for_no_tie() -> None:
    programs = programs_of(TIED, range(16))
    late = parse_action("0T@1", 0)
    programs[0].remove(late)
    programs[0].append(late)  # behind the update that needs it
    with pytest.raises(ScheduleError, match="waits for ever: rank 0 at 0U@1"):
        execution_order(TIED, programs, 0)


def test_ties_and_reduces_in_another_order_on_one_rank() -> None:
    message = fault(TIED, 1, "0R@1 0T@1", "0T@1 0R@1", range(16))
    assert message.startswith("rank 1 issues reduces out of order: 0R@0, 0T@0, 0T@1, 0R@1")


def test_homes_with_other_versions() -> None:
    stages = (TIED.stages[0], TIED.stages[1], replace(TIED.stages[2], versions=1))
    wrong = replace(TIED, stages=stages)
    with pytest.raises(ScheduleError, match="stages 0, 2 share 'w', but microbatch 4 has version 0 in stage 0 and 1"):
        check(wrong)
    later = (TIED.stages[0], TIED.stages[1], replace(TIED.stages[2], origin=1))
    with pytest.raises(ScheduleError, match="share 'w'"):
        check(replace(TIED, stages=later))


def test_a_home_that_does_not_know_of_its_tie() -> None:
    stages = (TIED.stages[0], TIED.stages[1], replace(TIED.stages[2], is_tied=False))
    with pytest.raises(ScheduleError, match="the ties name stages 0, 2"):
        check(replace(TIED, stages=stages))


def test_too_many_in_flight() -> None:
    shallow, deep = (plan("0:0.0:1", 4, depths=depths) for depths in ([1, 1], [2, 1]))
    with pytest.raises(ScheduleError) as error:
        check_programs(shallow, programs_of(deep, range(4)), range(4))
    assert str(error.value) == "rank 0 holds 2 microbatches of stage 0 at 0F1@0; its depth is 1"


# --- Waiting ---------------------------------------------------------------------------------------------------------


def test_two_ranks_that_wait_for_each_other() -> None:
    message = fault(plan("0:0.0:1", 1), 0, "0SA0>1 0RG0<1", "0RG0<1 0SA0>1", range(1))
    assert message == (
        "the schedule waits for ever: rank 0 at 0RG0<1, step 2 of 5, with 2 of 2 ranks stuck (0: 0RG0<1, 1: 1RA0<0)"
    )


def test_an_update_before_a_reduce_that_waits_for_it() -> None:
    # Rank 0 joins the reduce of stage 0 only after an update that needs rank 1, and rank 1 the other way round.
    programs = programs_of(SHARED, range(4))
    for rank, order in ((0, "1R@0 1U@0 0R@0 0U@0"), (1, "0R@0 0U@0 1R@0 1U@0")):
        programs[rank][-4:] = parse_program(order, rank)
    with pytest.raises(ScheduleError, match=r"waits for ever: rank 0 at 1U@0.*2 of 2 ranks stuck") as error:
        execution_order(SHARED, programs, 0)
    assert "1: 0U@0" in str(error.value)


def test_execution_order_runs_all_and_breaks_no_dependency() -> None:
    programs = programs_of(STALE, range(8, 20))
    order = execution_order(STALE, programs, start=8)
    place = {action: at for at, action in enumerate(order)}
    for rank, actions in programs.items():
        assert [action for action in order if action.rank == rank] == actions
    for action in order:
        assert all(place[needed] < place[action] for needed in requires(STALE, action, 8))


def test_notices_a_missing_rank() -> None:
    programs = programs_of(STALE, SPAN)
    del programs[0]
    with pytest.raises(ScheduleError, match="waits for ever"):
        execution_order(STALE, programs, 0)


# --- What an action waits for ----------------------------------------------------------------------------------------


def needs(plan: Plan, rank: int, text: str, start: int = 0) -> list[str]:
    """What an action requires, as `rank/action`."""
    return sorted(f"{needed.rank}/{needed}" for needed in requires(plan, parse_action(text, rank), start))


def test_a_forward_needs_its_input_and_its_version() -> None:
    assert needs(STALE, 0, "0F4@0") == []
    assert needs(STALE, 0, "0F8@1") == ["0/0U@0"]
    assert needs(STALE, 2, "1F4@1") == ["2/1RA4<0", "2/1U@0"]
    assert needs(SHARED, 1, "1F1@0") == ["1/0F1@0"]  # handed over on the rank


def test_what_came_before_the_span_is_there() -> None:
    assert needs(STALE, 0, "0F8@1", start=8) == []
    assert needs(STALE, 0, "0F12@2", start=8) == []
    assert needs(STALE, 0, "0F16@3", start=8) == ["0/0U@2"]
    assert needs(STALE, 0, "0U@2", start=8) == ["0/0R@2", "1/0R@2"]


def test_a_backward_needs_its_forward_its_gradient_and_a_free_buffer() -> None:
    assert needs(STALE, 0, "0B4@0") == ["0/0F4@0", "0/0RG4<2"]
    assert needs(STALE, 0, "0B8@1") == ["0/0F8@1", "0/0RG8<2", "0/0U@0"]  # batch 0 had the first of two buffers
    assert needs(STALE, 2, "1B4@1") == ["2/1F4@1", "2/1U@0"]  # the only buffer
    assert needs(SHARED, 1, "0B1@0") == ["1/0F1@0", "1/1B1@0"]


def test_a_transfer_needs_the_compute_or_the_other_side() -> None:
    assert needs(STALE, 0, "0SA8>2") == ["0/0F8@1"]
    assert needs(STALE, 2, "1SG8>0") == ["2/1B8@2"]
    assert needs(STALE, 2, "1RA8<0") == ["0/0SA8>2"]
    assert needs(STALE, 0, "0RG8<2") == ["2/1SG8>0"]


def test_an_update_needs_the_one_before_and_every_replica() -> None:
    assert needs(STALE, 1, "0R@1") == ["1/0B5@0", "1/0B7@0"]
    assert needs(STALE, 1, "0U@1") == ["0/0R@1", "1/0R@1", "1/0U@0"]
    assert needs(STALE, 2, "1U@0") == ["2/1B0@0", "2/1B1@0", "2/1B2@0", "2/1B3@0"]


def test_an_agreement_needs_the_gradients_and_the_update_all_agreements() -> None:
    agreeing = plan("0:0.0:1-2", 2, agree=True)
    assert needs(agreeing, 0, "0A@0") == ["0/0B0@0", "0/0B1@0"]
    assert needs(agreeing, 1, "1A@0") == ["1/1R@0", "2/1R@0"]
    assert needs(agreeing, 0, "0U@0") == ["0/0A@0", "0/0B0@0", "0/0B1@0", "1/1A@0", "2/1A@0"]


def test_an_update_of_a_home_needs_the_sum_of_its_tie_on_every_rank() -> None:
    assert needs(TIED, 0, "0T@1") == ["0/0B4@0", "0/0B6@0"]
    assert needs(TIED, 3, "2T@2") == ["3/2B10@0", "3/2B11@0", "3/2B8@0", "3/2B9@0", "3/2U@0"]  # two buffers
    assert needs(TIED, 3, "2U@0") == ["0/0T@0", "1/0T@0", "3/2B0@0", "3/2B1@0", "3/2B2@0", "3/2B3@0", "3/2T@0"]
    assert needs(TIED, 2, "1U@0") == ["2/1B0@0", "2/1B1@0", "2/1B2@0", "2/1B3@0"]
    both = plan("0:0.0:1.0:0", 2, tied=[TiedParameter(("w",), (0, 2))])
    assert needs(both, 0, "0T@0") == ["0/0B0@0", "0/0B1@0", "0/2B0@0", "0/2B1@0"]  # once, for both homes


def test_check_proves_a_plan() -> None:
    for right in (STALE, SHARED, plan("0:0-6.0:7", 16), plan("0:0-2.0:1-2.0:3", 5, mode=Mode.PIPEDREAM)):
        check(right)
        check(right, range(3 * right.alignment, 5 * right.alignment))
