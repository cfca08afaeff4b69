"""One step of one rank, as a value that prints as text."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    """What an action does; the value is its mark in the text."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_ACT = "SA"
    RECV_ACT = "RA"
    SEND_GRAD = "SG"
    RECV_GRAD = "RG"
    REDUCE = "R"
    TIE = "T"
    AGREE = "A"
    UPDATE = "U"


PASSES = (Op.FORWARD, Op.BACKWARD)  # of one microbatch
COMPUTES = (*PASSES, Op.UPDATE)
SENDS = (Op.SEND_ACT, Op.SEND_GRAD)
RECEIVES = (Op.RECV_ACT, Op.RECV_GRAD)
TRANSFERS = SENDS + RECEIVES
SUMS = (Op.REDUCE, Op.TIE)  # over ranks; started, and complete once all have joined


class Action(NamedTuple):
    """`0F3@2`: stage 0, forward, microbatch 3, version 2.

    A forward of an evaluation has no version: it uses the newest weights. Transfers name the other rank (`0SA3>7`,
    `1RA3<0`). REDUCE, TIE, AGREE and UPDATE belong to an update, whose number stands where a compute has its
    version (`0U@4` makes version 5 from version 4). A rank joins the TIE of several stages that it runs once, under the
    first of them.
    """

    op: Op
    rank: int
    stage: int
    microbatch: int | None = None
    version: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        version = "" if self.version is None else f"@{self.version}"
        arrow = ">" if self.op in SENDS else "<"
        peer = "" if self.peer is None else f"{arrow}{self.peer}"
        return f"{self.stage}{self.op}{microbatch}{version}{peer}"
