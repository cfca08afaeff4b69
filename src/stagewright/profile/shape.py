"""What a unit does to one sample, whatever runs it: operations, bytes and the geometry of its convolution."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Units that hardware runs differently."""

    CONVOLUTION = "convolution"
    LINEAR = "linear"
    NORM = "norm"
    POOL = "pool"
    POINTWISE = "pointwise"
    VIEW = "view"  # no work: shapes, flattening
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Convolution:
    """The geometry that decides which algorithm runs a convolution."""

    kernel: int  # taps: height x width
    stride: int
    groups: int
    channels: int
    filters: int


@dataclass(frozen=True, slots=True)
class Shape:
    """One unit, for one sample; elements, not bytes, so that any precision can read it."""

    name: str
    kind: Kind
    operations: float  # of forward, two a multiply-add
    inputs: int
    outputs: int
    parameters: int
    saved: float  # elements kept for backward, 8-byte indices counted twice
    live: int
    live_gradient: int
    input_gradient: bool  # whether backward goes on to what is before it
    inplace: bool = False
    convolution: Convolution | None = None
