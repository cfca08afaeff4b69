"""What each unit of a model does to one sample: operations, elements and the geometry of its convolution.

`trace` finds the shapes of a model; they hold for any device and precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The kinds of units that hardware runs differently."""

    CONVOLUTION = "convolution"
    LINEAR = "linear"
    NORM = "norm"
    LAYER_NORM = "layer norm"
    ATTENTION = "attention"
    POOL = "pool"
    POINTWISE = "pointwise"
    SCALE = "scale"  # a factor for every channel
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
    """One unit on one sample; counted in elements, not bytes, so that it holds for any precision."""

    name: str
    kind: Kind
    operations: float  # of forward; a multiply-add counts as two
    inputs: int
    outputs: int
    parameters: int
    saved: float  # elements kept for backward; 8-byte indices count twice
    live: int
    live_gradient: int
    input_gradient: bool  # whether backward continues to the units before it
    convolution: Convolution | None = None
    scores: int = 0  # elements of attention's score matrices, where they are written out
    begins: bool = True  # whether a stage can begin with it
    frozen: int = 0  # elements of parameters that are not trained
