"""What passes a boundary between stages: values, and the messages that hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stagewright.model.probe import Value
from stagewright.runtime.messages import Field, Layout

LABELS = "labels"
SCALE = "scale"


@dataclass(slots=True)
class Arrival:
    """What a stage is given for one microbatch: tensors in the order of the cut, and the labels."""

    tensors: Sequence[Tensor]
    labels: Tensor
    release: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Returned:
    """The gradients of a microbatch's outputs, in the order of the cut, and what they were multiplied with."""

    tensors: Sequence[Tensor]
    scale: Tensor | None = None
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Form:
    """How values lie in messages, the same on all ranks."""

    channels_last: bool = False
    scaled: bool = False  # gradients come with the scale they were multiplied with


@dataclass(frozen=True, slots=True)
class Cut:
    """The values at one boundary, as messages."""

    values: tuple[Value, ...]
    activations: Layout
    gradients: Layout
    travelling: tuple[int, ...]  # positions of the tensors among the values
    differentiable: tuple[int, ...]  # positions of those that get a gradient

    @staticmethod
    def of(values: Sequence[Value], samples: int, label_shape: Sequence[int], form: Form) -> Cut:
        travelling = tuple(index for index, value in enumerate(values) if value.dtype is not None)
        differentiable = tuple(index for index in travelling if values[index].requires_grad)
        fields = {
            index: Field(value.name, value.shape, getattr(torch, value.dtype), form.channels_last and is_image(value))
            for index, value in enumerate(values)
            if value.dtype is not None
        }
        labels = Field(LABELS, (samples, *label_shape), torch.int64)
        scale = [Field(SCALE, (1,), torch.float32)] if form.scaled else []
        return Cut(
            tuple(values),
            Layout([*(fields[index] for index in travelling), labels]),
            Layout([*(fields[index] for index in differentiable), *scale]),
            travelling,
            differentiable,
        )


def is_image(value: Value) -> bool:
    """Whether a value has the shape of a batch of images."""
    return len(value.shape) == 4
