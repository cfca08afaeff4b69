"""Actions as text, and text as actions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.schedule.action import Action, Op, parse_action, parse_program

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


@pytest.mark.parametrize("text", ["", "F3@2", "0X3@2", "0F3@", "0F3 @2", "0f3@2", "-1F3@2", "0F3@2x", "0SA3>"])
def test_what_is_no_action_at_all(text: str) -> None:
    with pytest.raises(ValueError, match=f"^'{text}' is not an action; an action looks like 0F3@2"):
        parse_action(text, rank=0)


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("0F@2", "FORWARD"),
        ("0B3", "BACKWARD"),
        ("0F3@2>1", "FORWARD"),
        ("0SA3", "SEND_ACT"),
        ("0SA3<7", "SEND_ACT"),
        ("0RA3>7", "RECV_ACT"),
        ("0SG3@1>7", "SEND_GRAD"),
        ("0RG<7", "RECV_GRAD"),
        ("0U", "UPDATE"),
        ("0R3@1", "REDUCE"),
        ("0A@1<2", "AGREE"),
    ],
)
def test_an_action_with_the_wrong_parts(text: str, op: str) -> None:
    with pytest.raises(ValueError, match=f"^'{text}' has the wrong parts for {op}; compare"):
        parse_action(text, rank=0)


def test_a_long_text_is_quoted_in_part() -> None:
    with pytest.raises(ValueError) as error:
        parse_action("0F" + "x" * 5000, rank=0)
    assert len(str(error.value)) < 120
