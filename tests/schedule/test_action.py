"""Actions as text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.schedule.action import Action, Op
from tests.actions import parse_action, parse_program

number = st.integers(0, 10**12)
absent = st.none()


def an_action(*ops: Op, microbatch: object = absent, version: object = absent, peer: object = absent) -> object:
    return st.builds(Action, st.sampled_from(ops), number, number, microbatch, version, peer)


actions = st.one_of(
    an_action(Op.FORWARD, Op.BACKWARD, microbatch=number, version=number),
    an_action(Op.SEND_ACT, Op.RECV_ACT, Op.SEND_GRAD, Op.RECV_GRAD, microbatch=number, peer=number),
    an_action(Op.REDUCE, Op.TIE, Op.AGREE, Op.UPDATE, version=number),
)

EXAMPLES = {
    "0F3@2": Action(Op.FORWARD, 5, 0, 3, 2),
    "1B3@2": Action(Op.BACKWARD, 5, 1, 3, 2),
    "0SA3>7": Action(Op.SEND_ACT, 5, 0, 3, None, 7),
    "1RA3<0": Action(Op.RECV_ACT, 5, 1, 3, None, 0),
    "1SG3>0": Action(Op.SEND_GRAD, 5, 1, 3, None, 0),
    "0RG3<7": Action(Op.RECV_GRAD, 5, 0, 3, None, 7),
    "12R@4": Action(Op.REDUCE, 5, 12, None, 4),
    "3T@4": Action(Op.TIE, 5, 3, None, 4),
    "0A@4": Action(Op.AGREE, 5, 0, None, 4),
    "0U@4": Action(Op.UPDATE, 5, 0, None, 4),
}


@pytest.mark.parametrize(("text", "action"), EXAMPLES.items())
def test_examples_of_every_op(text: str, action: Action) -> None:
    assert str(action) == text
    assert parse_action(text, rank=5) == action


def test_every_op_has_an_example() -> None:
    assert {action.op for action in EXAMPLES.values()} == set(Op)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(actions)
def test_any_action_reads_back_as_itself(action: Action) -> None:
    assert parse_action(str(action), action.rank) == action


def test_a_forward_of_an_evaluation_names_no_version() -> None:
    on_the_master = Action(Op.FORWARD, 5, 0, 3)
    assert str(on_the_master) == "0F3"
    assert parse_action("0F3", rank=5) == on_the_master


def test_a_program_is_actions_between_spaces() -> None:
    text = " ".join(EXAMPLES)
    assert parse_program(text, rank=5) == list(EXAMPLES.values())
    assert parse_program(" 0F0@0\n0B0@0 ", rank=1) == [Action(Op.FORWARD, 1, 0, 0, 0), Action(Op.BACKWARD, 1, 0, 0, 0)]
