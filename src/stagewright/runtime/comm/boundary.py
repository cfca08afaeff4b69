"""What passes a boundary between stages: values, and the messages that hold them. What a replica and its neighbours give each other: the channels, what came and what is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stagewright.model.probe import Value
from stagewright.plan.plan import Plan, Stage
from stagewright.runtime.comm.channel import Inbox, Outbox
from stagewright.runtime.comm.message import Field, Layout
from stagewright.runtime.comm.transport import Pending
from stagewright.schedule.action import Action, Op

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


@dataclass(slots=True)
class Exchange:
    """A replica's channels, by the rank at the other end, and its microbatches' values on this end of them.

    stage before ─► arrivals ─► forward ─► outputs ─► stage behind
                 ◄─ gradients ◄─ backward ◄─ returned ◄─
    """

    activations_from: dict[int, Inbox] = field(default_factory=dict)
    activations_to: dict[int, Outbox] = field(default_factory=dict)
    gradients_from: dict[int, Inbox] = field(default_factory=dict)
    gradients_to: dict[int, Outbox] = field(default_factory=dict)
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    outputs: dict[int, Arrival] = field(default_factory=dict)
    returned: dict[int, Returned] = field(default_factory=dict)
    gradients: dict[int, Returned] = field(default_factory=dict)
    before: Cut | None = None
    behind: Cut | None = None

    def open(self, before: Cut | None, behind: Cut | None) -> None:
        """Agree with the neighbours on what messages hold from here on."""
        self.before, self.behind = before, behind
        if before is not None:
            for inbox in self.activations_from.values():
                inbox.open(before.activations)
            for outbox in self.gradients_to.values():
                outbox.open(before.gradients)
        if behind is not None:
            for outbox in self.activations_to.values():
                outbox.open(behind.activations)
            for inbox in self.gradients_from.values():
                inbox.open(behind.gradients)

    def awaits(self, action: Action) -> Pending | None:
        """The message that a receive waits for."""
        inboxes = {Op.RECV_ACT: self.activations_from, Op.RECV_GRAD: self.gradients_from}.get(action.op)
        if inboxes is None:
            return None
        assert action.peer is not None
        return inboxes[action.peer].next

    def carry(self, action: Action) -> None:
        """Do one action of CARRIED."""
        assert action.microbatch is not None and action.peer is not None
        CARRIED[action.op](self, action.microbatch, action.peer)

    def _receive_activations(self, microbatch: int, peer: int) -> None:
        inbox = self.activations_from[peer]
        message = inbox.receive(microbatch)
        *tensors, labels = message.tensors
        self.arrivals[microbatch] = Arrival(tensors, labels, lambda: inbox.release(message))

    def _send_activations(self, microbatch: int, peer: int) -> None:
        output = self.outputs.pop(microbatch)
        self.activations_to[peer].send(microbatch, (*output.tensors, output.labels))

    def _receive_gradients(self, microbatch: int, peer: int) -> None:
        assert self.behind is not None
        inbox = self.gradients_from[peer]
        message = inbox.receive(microbatch)
        count = len(self.behind.differentiable)
        tensors, scale = message.tensors[:count], message.tensors[count:]
        self.returned[microbatch] = Returned(tensors, scale[0] if scale else None, lambda: inbox.release(message))

    def _send_gradients(self, microbatch: int, peer: int) -> None:
        gradients = self.gradients.pop(microbatch)
        scale = () if gradients.scale is None else (gradients.scale,)
        self.gradients_to[peer].send(microbatch, (*gradients.tensors, *scale))

    def flush(self) -> None:
        for outbox in (*self.activations_to.values(), *self.gradients_to.values()):
            outbox.flush()
        for inbox in (*self.activations_from.values(), *self.gradients_from.values()):
            inbox.flush()


CARRIED: Mapping[Op, Callable[[Exchange, int, int], None]] = {
    Op.SEND_ACT: Exchange._send_activations,
    Op.RECV_ACT: Exchange._receive_activations,
    Op.SEND_GRAD: Exchange._send_gradients,
    Op.RECV_GRAD: Exchange._receive_gradients,
}


def expect(inboxes: Mapping[int, Inbox], rank: int, stage: Stage, plan: Plan, neighbour: int, span: range) -> None:
    """Announce to each inbox the microbatches that its sender and this rank both run."""
    for peer, inbox in inboxes.items():
        inbox.expect(_common(stage, rank, plan.stages[neighbour], peer, span))


def _common(stage: Stage, rank: int, other: Stage, peer: int, span: range) -> Iterator[int]:
    return (microbatch for microbatch in stage.own(rank, span) if other.rank_of(microbatch) == peer)
