"""How each side trains one rank's part of a job: stock PyTorch as a user would run it, and a bound.

Every class is a `Runner` of `stagewright.bench.demo.process`. All sides train the same model on the same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from stagewright.bench.demo.sides import (
    Stagewright,
    Stock,
    batches,
    fused_optimizer,
    open_store,
    static_batch,
    stock_loss,
)
from stagewright.model.pieces import Piece
from stagewright.runtime.comm.channel import ChannelName, Inbox, Network, Outbox
from stagewright.runtime.comm.device import Device, open_device
from stagewright.runtime.comm.memory import MemoryTransport
from stagewright.runtime.comm.message import Message, MessageFormat
from stagewright.runtime.comm.transport import Alone, Collective, Done, Pending, Transport
from stagewright.runtime.job import Job
from stagewright.runtime.precision import precision_of
from stagewright.runtime.process.assemble import open_pieces
from stagewright.runtime.process.torch_flags import set_flags

_CPU = torch.device("cpu")


class OneFOneB(Stock):
    """torch.distributed.pipelining: one stage per rank, Schedule1F1B, shapes known from the start."""

    def __init__(self, job: Job, rank: int, meeting: Path) -> None:
        world = job.plan.world
        dist.init_process_group("gloo", store=open_store(meeting, world), rank=rank, world_size=world)
        self._inputs, self._labels = batches(job)
        self._is_first, self._is_last = rank == 0, rank == world - 1
        module = as_sequential(open_pieces(job.config, job.plan.cuts, job.training.inputs)[rank])
        values = [self._inputs[0, : job.plan.samples], *_boundaries(job)]
        stage = PipelineStage(module, rank, world, _CPU, input_args=values[rank], output_args=values[rank + 1])
        self._schedule = Schedule1F1B(stage, job.plan.microbatches, nn.functional.cross_entropy)
        self._optimizer = fused_optimizer(job, module)

    def train(self, first: int, steps: int) -> None:
        """Train some batches; the pipeline drains before each update."""
        losses: list[Tensor] = []
        for batch in range(first, first + steps):
            index = batch % len(self._inputs)
            self._optimizer.zero_grad()
            self._schedule.step(
                *([self._inputs[index]] if self._is_first else []),
                target=self._labels[index] if self._is_last else None,
                losses=losses if self._is_last else None,
                return_outputs=False,
            )
            self._optimizer.step()
        self.loss = float(torch.stack(losses).mean()) if losses else None


class Plain(Stock):
    """The usual training loop in one process on one GPU, compiled, with torch's own loss scaling in fp16."""

    def __init__(self, job: Job, rank: int, meeting: Path) -> None:
        self._precision = precision_of(job.config)
        set_flags(job.config)
        device = open_device(job.config.run.device, 0, share=True).device
        self._inputs, self._labels = static_batch(job, device)
        (piece,) = open_pieces(job.config, (), device=device)
        self._optimizer = fused_optimizer(job, piece.training)
        self._model = torch.compile(piece.training, dynamic=False) if job.config.run.compile else piece.training
        self._scaler = torch.amp.GradScaler(device.type, enabled=self._precision.is_scaled)

    def train(self, first: int, steps: int) -> None:
        for _ in range(steps):
            self._optimizer.zero_grad()
            with self._precision.forward_context():
                loss = stock_loss(self._model(self._inputs), self._labels)
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self.loss = float(loss.detach())


def as_sequential(piece: Piece) -> nn.Module:
    """A piece of a plain chain as a user would write it: an nn.Sequential of its layers, not a graph."""
    assert isinstance(piece.training, fx.GraphModule)
    layers: list[nn.Module] = []
    for node in piece.training.graph.nodes:
        if node.op == "call_module":
            layers.append(piece.training.get_submodule(node.target))
        elif node.op == "call_function":
            assert node.target is torch.flatten, node
            layers.append(nn.Flatten(*node.args[1:]))
    return layers[0] if len(layers) == 1 else nn.Sequential(*layers)


def _boundaries(job: Job) -> list[Tensor]:
    """Example outputs of each stage."""
    shapes: list[Any] = [value.shape for (value,) in job.training.cuts]
    return [torch.empty(shape, requires_grad=True) for shape in [*shapes, *job.training.outputs]]


class Unconnected(Stagewright):
    """The same ranks and kernels without messages or all-reduces: the fastest that this plan could ever be here."""

    def __init__(self, job: Job, rank: int, meeting: Path) -> None:
        super().__init__(job, rank, meeting)
        for replica in self._session.workers[0].replicas.values():
            own = replica.exchange
            own.activations_from = {peer: _NoInbox(inbox, self._device) for peer, inbox in own.activations_from.items()}
            own.gradients_from = {peer: _NoInbox(inbox, self._device) for peer, inbox in own.gradients_from.items()}
            own.activations_to = {peer: _NoOutbox(outbox) for peer, outbox in own.activations_to.items()}
            own.gradients_to = {peer: _NoOutbox(outbox) for peer, outbox in own.gradients_to.items()}

    def _network(self, job: Job, rank: int, meeting: Path, device: Device) -> Network:
        return _NoNetwork()


class _NoNetwork(Network):
    """A network without other ranks."""

    store = dist.HashStore()
    posted_ahead = 1

    def transport(self, name: ChannelName, window: int) -> Transport:
        return MemoryTransport()

    def connect(self, name: str, ranks: Sequence[int]) -> Collective:
        return Alone()

    def message(self, message_format: MessageFormat) -> Message:
        raise AssertionError("without a network nothing is sent or received")


class _NoOutbox(Outbox):
    """Sends nothing."""

    def __init__(self, real: Outbox) -> None:
        super().__init__(_NoNetwork(), real.name, 1)

    def send(self, microbatch: int, tensors: Sequence[Tensor]) -> None:
        pass


class _NoInbox(Inbox):
    """Always has a message of the right shape."""

    def __init__(self, real: Inbox, device: torch.device) -> None:
        super().__init__(_NoNetwork(), real.name, 1)
        self._device = device
        self._message: Any = None

    def open(self, message_format: MessageFormat) -> bool:
        self._message = _Noise(message_format, self._device)
        return False

    def expect(self, numbers: Iterator[int], limit: Callable[[], int] | None = None) -> None:
        pass

    @property
    def next(self) -> Pending:
        return Done()

    def receive(self, microbatch: int) -> Message:
        message: Message = self._message
        return message

    def release(self, message: Message) -> None:
        pass


class _Noise:
    """A message that was never sent: small random numbers, and labels of class 0."""

    def __init__(self, message_format: MessageFormat, device: torch.device) -> None:
        self.tensors = message_format.views(torch.zeros(message_format.bytes, dtype=torch.uint8, device=device))
        for tensor in self.tensors:
            if tensor.is_floating_point():
                tensor.normal_(0.0, 0.01)
