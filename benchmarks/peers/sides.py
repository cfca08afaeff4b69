"""How each side trains one rank's part of a job: stock PyTorch as a user would run it, and a bound.

Every class is a `Runner`. All sides train the same model on the same samples; on GPUs on one microbatch that stays
there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from stagewright.bench.demo import sides
from stagewright.bench.demo.process import Runner
from stagewright.bench.demo.sides import batches, open_store, stock_loss
from stagewright.data.sources import Fields
from stagewright.model.pieces import Piece
from stagewright.model.probe import Value
from stagewright.runtime.comm.channel import ChannelName, Inbox, Network, Outbox
from stagewright.runtime.comm.device import Device, open_device
from stagewright.runtime.comm.memory import MemoryTransport
from stagewright.runtime.comm.message import Message, MessageFormat
from stagewright.runtime.comm.transport import Collective, Done, Pending, Solo, Transport
from stagewright.runtime.job import Job
from stagewright.runtime.precision import precision_of
from stagewright.runtime.process.assemble import open_model, open_pieces
from stagewright.runtime.process.torch_flags import set_flags
from stagewright.runtime.stage.optimizer import stock_optimizer

_CPU = torch.device("cpu")
_MIDDLE = (0.25, 0.85)  # of a segment: where the pipeline neither fills nor drains


class _OnDevice(Runner):
    """What sides do on a GPU as well: wait for it, and give back memory that the next side may need."""

    def timed(self, first: int, steps: int, at: float) -> dict[str, Any]:
        result = super().timed(first, steps, at)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            result["end"] = time.monotonic()
        return result

    def rest(self) -> None:
        torch.cuda.empty_cache()


class Ddp(_OnDevice, sides.Ddp):
    """DistributedDataParallel: on GPUs with the fastest stock options."""

    def samples(self, job: Job, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if device.type == "cpu":
            return super().samples(job, rank, device)
        inputs, labels = static_batch(job, device)
        return inputs[None], labels[None]


class Stagewright(_OnDevice, sides.Stagewright):
    """One rank of a job, which knows how busy it was."""

    def __init__(self, job: Job, rank: int, meeting: Path) -> None:
        super().__init__(job, rank, meeting)
        device = self.device.device
        if device.type == "cuda" and self.worker.loader is not None:
            self.worker.loader.close()
            names = job.training.inputs[0].name, job.training.fields[0].name
            self.worker.loader = _Static(*static_batch(job, device), names)

    def timed(self, first: int, steps: int, at: float) -> dict[str, Any]:
        result = super().timed(first, steps, at)
        return result | {"busy": self._busy(at, result["end"])}

    def _busy(self, start: float, end: float) -> float:
        """The share of a segment's middle that compute spans cover."""
        low, high = (start + share * (end - start) for share in _MIDDLE)
        spans = [span for span in self.recorder.spans() if span.lane == "compute"]
        inside = sum(max(0.0, min(span.end, high) - max(span.start, low)) for span in spans)
        return inside / (high - low)


@dataclass(frozen=True, slots=True)
class _Static:
    """A loader that always returns the same microbatch, which stays on the device."""

    inputs: Tensor
    labels: Tensor
    names: tuple[str, str]
    targets: tuple[str, ...] = ()

    def microbatch(self, number: int) -> Fields:
        return dict(zip(self.names, (self.inputs, self.labels), strict=True))

    def close(self) -> None:
        pass


def static_batch(job: Job, device: torch.device) -> tuple[Tensor, Tensor]:
    """One microbatch that stays on the device; on GPUs every side trains on it again and again."""
    (inputs,), (target,) = job.training.inputs, job.training.fields
    generator = torch.Generator(device).manual_seed(0)
    return _random(inputs, job, device, generator), _random(target, job, device, generator)


def _random(field: Value, job: Job, device: torch.device, generator: torch.Generator) -> Tensor:
    """Real numbers, or whole ones below the number of classes."""
    classes, shape = job.config.model.classes, field.shape
    assert classes is not None and field.dtype is not None
    if not getattr(torch, field.dtype).is_floating_point:
        return torch.randint(classes, shape, device=device, generator=generator)
    made = torch.randn(shape, device=device, generator=generator)
    return made.contiguous(memory_format=torch.channels_last) if made.dim() == 4 else made


class OneFOneB(_OnDevice):
    """torch.distributed.pipelining: one stage per rank, Schedule1F1B, shapes known from the start."""

    def __init__(self, job: Job, rank: int, meeting: Path) -> None:
        world = job.plan.world
        dist.init_process_group("gloo", store=open_store(meeting, world), rank=rank, world_size=world)
        self._inputs, self._labels = batches(job)
        self._is_first, self._is_last = rank == 0, rank == world - 1
        module = as_sequential(open_pieces(job)[rank])
        values = [self._inputs[0, : job.plan.samples], *_boundaries(job)]
        stage = PipelineStage(module, rank, world, _CPU, input_args=values[rank], output_args=values[rank + 1])
        self._schedule = Schedule1F1B(stage, job.plan.microbatches, nn.functional.cross_entropy)
        self._optimizer = stock_optimizer(job.config.optimizer, module.parameters())

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


class Plain(_OnDevice):
    """The usual training loop in one process on one GPU, compiled, with torch's own loss scaling in fp16."""

    def __init__(self, job: Job, rank: int, meeting: Path) -> None:
        self._precision = precision_of(job.config)
        set_flags(job.config)
        device = open_device(job.config.run.device, 0, share=True).device
        self._inputs, self._labels = static_batch(job, device)
        model = open_model(job.config, device)
        self._optimizer = stock_optimizer(job.config.optimizer, model.parameters())
        self._model = torch.compile(model, dynamic=False) if job.config.run.compile else model
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
        device = self.device.device
        for replica in self.worker.replicas.values():
            own = replica.exchange
            own.activations_from = {peer: _NoInbox(inbox, device) for peer, inbox in own.activations_from.items()}
            own.gradients_from = {peer: _NoInbox(inbox, device) for peer, inbox in own.gradients_from.items()}
            own.activations_to = {peer: _NoOutbox(outbox) for peer, outbox in own.activations_to.items()}
            own.gradients_to = {peer: _NoOutbox(outbox) for peer, outbox in own.gradients_to.items()}

    def network(self, job: Job, meeting: Path, device: Device) -> Network:
        return _NoNetwork()


class _NoNetwork(Network):
    """A network without other ranks."""

    store = dist.HashStore()
    posted_ahead = 1

    def transport(self, name: ChannelName, window: int) -> Transport:
        return MemoryTransport()

    def connect(self, name: str, ranks: Sequence[int]) -> Collective:
        return Solo()

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
