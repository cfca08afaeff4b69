"""The boundaries of a stage: the values that cross them as messages, and a replica's channels across them.

A `Boundary` says which values cross and in which messages. An `Exchange` is a replica's side of its two boundaries: its
channels, and the activations and gradients of the microbatches on this side of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from stagewright.model.probe import Value
from stagewright.plan.plan import Plan, Stage
from stagewright.runtime.comm.channel import Inbox, Outbox
from stagewright.runtime.comm.message import Field, MessageFormat
from stagewright.runtime.comm.transport import Pending
from stagewright.schedule.action import Action, Op

SCALE = "scale"
FIGURES = "figures"


@dataclass(slots=True)
class Activations:
    """The activations of one microbatch at a boundary, in the order of the boundary, and fields of its samples."""

    tensors: Sequence[Tensor]
    fields: Mapping[str, Tensor]
    release: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Gradients:
    """The gradients of one microbatch's activations, in the order of the boundary.

    With the loss scale that they contain, and figures of the microbatch: how many targets its loss is a total of, where
    it is one, and the loss, where it is reported to all stages.
    """

    tensors: Sequence[Tensor]
    scale: Tensor | None = None
    figures: Tensor | None = None
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """How messages hold values; the same on all ranks."""

    channels_last: bool = False
    scaled: bool = False  # gradients travel with their loss scale
    counted: bool = False  # gradients travel with the count of their loss
    reported: bool = False  # gradients travel with their loss

    @property
    def figures(self) -> int:
        """How many figures of its microbatch a gradient travels with."""
        return self.counted + self.reported


@dataclass(frozen=True, slots=True)
class Boundary:
    """The values between two stages, and the formats of the messages that carry them."""

    values: tuple[Value, ...]
    activations: MessageFormat
    gradients: MessageFormat
    tensors: tuple[int, ...]  # positions of the tensors among the values
    differentiable: tuple[int, ...]  # positions of those that get a gradient
    fields: tuple[str, ...]  # of the samples, which only the last stage reads

    @staticmethod
    def of(values: Sequence[Value], fields_read: Sequence[Value], options: FormatOptions) -> Boundary:
        """The boundary that these values cross, and the fields that the last stage reads and are not among them."""
        tensors = tuple(index for index, value in enumerate(values) if value.dtype is not None)
        differentiable = tuple(index for index in tensors if values[index].requires_grad)
        fields = {}
        for index, value in enumerate(values):
            if value.dtype is not None:
                channels_last = options.channels_last and len(value.shape) == 4  # a batch of images
                fields[index] = Field(value.name, value.shape, getattr(torch, value.dtype), channels_last)
        crossing = {value.field for value in values}
        carried = [value for value in fields_read if value.name not in crossing]
        others = [Field(value.name, value.shape, getattr(torch, value.dtype or "")) for value in carried]
        scale = [Field(SCALE, (1,), torch.float32)] if options.scaled else []
        figures = [Field(FIGURES, (options.figures,), torch.float64)] if options.figures else []
        return Boundary(
            tuple(values),
            MessageFormat([*(fields[index] for index in tensors), *others]),
            MessageFormat([*(fields[index] for index in differentiable), *scale, *figures]),
            tensors,
            differentiable,
            tuple(value.name for value in carried),
        )

    def gradients_in(self, message: Sequence[Tensor], release: Callable[[], None]) -> Gradients:
        """The gradients that a message brought."""
        count = len(self.differentiable)
        others = {field.name: one for field, one in zip(self.gradients.fields[count:], message[count:], strict=True)}
        return Gradients(message[:count], others.get(SCALE), others.get(FIGURES), release)

    def activations_in(self, message: Sequence[Tensor], release: Callable[[], None]) -> Activations:
        """The activations that a message brought."""
        count = len(self.tensors)
        fields = dict(zip(self.fields, message[count:], strict=True))
        for index, tensor in zip(self.tensors, message, strict=False):
            if (name := self.values[index].field) is not None:
                fields[name] = tensor
        return Activations(message[:count], fields, release)


@dataclass(slots=True)
class Exchange:
    """A replica's channels by the rank at the other end, and its microbatches' values on this side of them.

    previous stage ─► inputs ─► forward ─► outputs ─► next stage
                   ◄─ input_gradients ◄─ backward ◄─ output_gradients ◄─
    """

    activations_from: dict[int, Inbox] = field(default_factory=dict)
    activations_to: dict[int, Outbox] = field(default_factory=dict)
    gradients_from: dict[int, Inbox] = field(default_factory=dict)
    gradients_to: dict[int, Outbox] = field(default_factory=dict)
    inputs: dict[int, Activations] = field(default_factory=dict)
    outputs: dict[int, Activations] = field(default_factory=dict)
    output_gradients: dict[int, Gradients] = field(default_factory=dict)
    input_gradients: dict[int, Gradients] = field(default_factory=dict)
    before: Boundary | None = None
    after: Boundary | None = None

    def open(self, before: Boundary | None, after: Boundary | None) -> None:
        """Use these boundaries' message formats from the next message on."""
        self.before, self.after = before, after
        if before is not None:
            for channel in (*self.activations_from.values(), *self.gradients_to.values()):
                channel.open(before.activations if isinstance(channel, Inbox) else before.gradients)
        if after is not None:
            for channel in (*self.activations_to.values(), *self.gradients_from.values()):
                channel.open(after.gradients if isinstance(channel, Inbox) else after.activations)

    def awaits(self, action: Action) -> Pending | None:
        """The message that a receive waits for; None for a send."""
        inboxes = {Op.RECV_ACT: self.activations_from, Op.RECV_GRAD: self.gradients_from}.get(action.op)
        if inboxes is None:
            return None
        assert action.peer is not None
        return inboxes[action.peer].next

    def transfer(self, action: Action) -> None:
        """Carry out a send or a receive."""
        microbatch, peer = action.microbatch, action.peer
        assert microbatch is not None and peer is not None
        if action.op is Op.SEND_ACT:
            output = self.outputs.pop(microbatch)
            assert self.after is not None
            fields = (output.fields[name] for name in self.after.fields)
            self.activations_to[peer].send(microbatch, (*output.tensors, *fields))
        elif action.op is Op.SEND_GRAD:
            gradients = self.input_gradients.pop(microbatch)
            others = (number for number in (gradients.scale, gradients.figures) if number is not None)
            self.gradients_to[peer].send(microbatch, (*gradients.tensors, *others))
        else:
            is_forward = action.op is Op.RECV_ACT
            inbox = (self.activations_from if is_forward else self.gradients_from)[peer]
            message = inbox.receive(microbatch)
            release = partial(inbox.release, message)
            if is_forward:
                assert self.before is not None
                self.inputs[microbatch] = self.before.activations_in(message.tensors, release)
            else:
                assert self.after is not None
                self.output_gradients[microbatch] = self.after.gradients_in(message.tensors, release)

    def flush(self) -> None:
        """Wait until every message has been sent, and every received number compared."""
        for channels in (self.activations_to, self.gradients_to, self.activations_from, self.gradients_from):
            for channel in channels.values():
                channel.flush()


def expect(
    inboxes: Mapping[int, Inbox],
    rank: int,
    stage: Stage,
    plan: Plan,
    neighbour: int,
    span: range,
    limit: Callable[[], int] | None = None,
) -> None:
    """Announce to each inbox the microbatches of a span that both its sender and this rank run."""
    for peer, inbox in inboxes.items():
        inbox.expect(_shared(stage, rank, plan.stages[neighbour], peer, span), limit)


def _shared(stage: Stage, rank: int, other: Stage, peer: int, span: range) -> Iterator[int]:
    return (microbatch for microbatch in stage.own(rank, span) if other.rank_of(microbatch) == peer)
