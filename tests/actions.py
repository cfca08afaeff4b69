"""Actions and programs from their text, in which tests are written."""

import re

from stagewright.schedule.action import Action, Op

_ACTION = re.compile(r"([0-9]+)([A-Z]{1,2})([0-9]+)?(?:@([0-9]+))?(?:[<>]([0-9]+))?")


def parse_action(text: str, rank: int) -> Action:
    """One action of a rank, which prints as this text."""
    match = _ACTION.fullmatch(text)
    assert match is not None, f"'{text}' is not an action"
    stage, op, *others = match.groups()
    microbatch, version, peer = (None if part is None else int(part) for part in others)
    action = Action(Op(op), rank, int(stage), microbatch, version, peer)
    assert str(action) == text
    return action


def parse_program(text: str, rank: int) -> list[Action]:
    """One rank's program: actions between spaces."""
    return [parse_action(word, rank) for word in text.split()]
