"""How each side trains one rank's part of a job: stock PyTorch as a user would run it, and Stagewright itself.

Every class is a `Runner` of `peers.process`. All sides train the same model on the same samples.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from stagewright.data.sources import Fields, only_pair
from stagewright.events import BatchLosses, Event
from stagewright.metrics import Span
from stagewright.model.cut import Piece
from stagewright.model.probe import Value
from stagewright.runtime.comm.channel import ChannelName, Inbox, Network, Outbox
from stagewright.runtime.comm.device import Device, open_device
from stagewright.runtime.comm.memory import MemoryTransport
from stagewright.runtime.comm.message import Message, MessageFormat
from stagewright.runtime.comm.nccl import open_network
from stagewright.runtime.comm.transport import Alone, Collective, Done, Pending, Place, Transport
from stagewright.runtime.job import Job
from stagewright.runtime.process.assemble import assemble, open_data, open_pieces
from stagewright.runtime.process.torch_flags import keep_freed_memory, set_flags
from stagewright.runtime.stage.precision import make_precision
from stagewright.runtime.stage.recorder import make_recorder
from stagewright.runtime.status_file import status_path

_CPU = torch.device("cpu")
_STEPS_KEPT = 512  # whose times DDP keeps
_DDP_SPANS = (("compute", "F"), ("compute", "B"), ("wait", "R"), ("compute", "U"))
_MIDDLE = (0.25, 0.85)  # of a segment: where the pipeline neither fills nor drains


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


def _stock_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy, of text at each position."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


class _Stock:
    """What stock sides have in common: they do not know when the GPU computed."""

    loss: float | None = None

    def busy(self, start: float, end: float) -> float | None:
        return None

    def weights(self) -> dict[str, Tensor]:
        raise NotImplementedError(f"{type(self).__name__} does not save its weights")

    def spans(self) -> Sequence[Span]:
        return ()


def open_store(meeting: Path, world: int) -> dist.Store:
    """The store through which the ranks of one side meet; each side has its own folder."""
    return dist.FileStore(str(meeting / "store"), world)


class OneFOneB(_Stock):
    """torch.distributed.pipelining: one stage per rank, Schedule1F1B, shapes known from the start."""

    def __init__(self, job: Job, rank: int, meeting: Path) -> None:
        world = job.plan.world
        dist.init_process_group("gloo", store=open_store(meeting, world), rank=rank, world_size=world)
        self._inputs, self._labels = _batches(job)
        self._is_first, self._is_last = rank == 0, rank == world - 1
        module = as_sequential(open_pieces(job.config, job.plan.cuts, job.training.inputs)[rank])
        values = [self._inputs[0, : job.plan.samples], *_boundaries(job)]
        stage = PipelineStage(module, rank, world, _CPU, input_args=values[rank], output_args=values[rank + 1])
        self._schedule = Schedule1F1B(stage, job.plan.microbatches, nn.functional.cross_entropy)
        self._optimizer = _optimizer(job, module)

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


class Ddp(_Stock):
    """DistributedDataParallel: every rank trains its share of the batch; on GPUs with the fastest stock options."""

    def __init__(self, job: Job, rank: int, meeting: Path) -> None:
        world, self._precision = job.plan.world, make_precision(job.config.run.precision, job.config.run.device)
        assert job.plan.microbatches == world, "DDP runs one microbatch per rank"
        set_flags(job.config)
        device = open_device(job.config.run.device, rank, share=True).device
        dist.init_process_group("gloo", store=open_store(meeting, world), rank=rank, world_size=world)
        if device.type == "cuda":
            inputs, labels = static_batch(job, device)
            self._inputs, self._labels = inputs[None], labels[None]
        else:
            inputs, labels = _batches(job)
            own = slice(rank * job.plan.samples, (rank + 1) * job.plan.samples)
            self._inputs, self._labels = inputs[:, own], labels[:, own]
        (piece,) = open_pieces(job.config, (), device=device)
        self._module = DistributedDataParallel(piece.training, gradient_as_bucket_view=True)
        self._optimizer = _optimizer(job, self._module)
        is_cosine = job.config.schedule.kind == "cosine"
        self._rates = CosineAnnealingLR(self._optimizer, job.batches) if is_cosine else None
        self._rank = rank
        self._moments: deque[tuple[int, tuple[float, ...]]] = deque(maxlen=_STEPS_KEPT)
        self._computed = 0.0  # when backward had the last gradient: sums may still be under way
        if device.type == "cpu":
            first = next(piece.training.parameters())
            first.register_post_accumulate_grad_hook(self._note_computed)  # type: ignore[no-untyped-call]

    def _note_computed(self, parameter: Tensor) -> None:
        self._computed = time.monotonic()

    def train(self, first: int, steps: int) -> None:
        for batch in range(first, first + steps):
            index = batch % len(self._inputs)
            began = time.monotonic()
            self._optimizer.zero_grad()
            with self._precision.forward_context():
                loss = _stock_loss(self._module(self._inputs[index]), self._labels[index])
            forward = time.monotonic()
            loss.backward()  # type: ignore[no-untyped-call]
            backward = time.monotonic()
            self._optimizer.step()
            if self._rates is not None:
                self._rates.step()
            self._moments.append((batch, (began, forward, self._computed, backward, time.monotonic())))
        self.loss = float(loss.detach())

    def weights(self) -> dict[str, Tensor]:
        return {} if self._rank else dict(self._module.module.state_dict())

    def spans(self) -> Sequence[Span]:
        """On CPU: forward, backward, the sums that backward did not hide, and the update of the last batches."""
        found: list[Span] = []
        for batch, moments in self._moments:
            names = f"0F{batch}@{batch}", f"0B{batch}@{batch}", f"0R@{batch}", f"0U@{batch}"
            for (lane, kind), name, start, end in zip(_DDP_SPANS, names, moments, moments[1:], strict=False):
                found.append(Span(self._rank, lane, kind, name, start, max(start, end)))
        return found


class Plain(_Stock):
    """The usual training loop in one process on one GPU, compiled, with torch's own loss scaling in fp16."""

    def __init__(self, job: Job, rank: int, meeting: Path) -> None:
        self._precision = make_precision(job.config.run.precision, job.config.run.device)
        set_flags(job.config)
        device = open_device(job.config.run.device, 0, share=True).device
        self._inputs, self._labels = static_batch(job, device)
        (piece,) = open_pieces(job.config, (), device=device)
        self._optimizer = _optimizer(job, piece.training)
        self._model = torch.compile(piece.training, dynamic=False) if job.config.run.compile else piece.training
        self._scaler = torch.amp.GradScaler(device.type, enabled=self._precision.is_scaled)

    def train(self, first: int, steps: int) -> None:
        for _ in range(steps):
            self._optimizer.zero_grad()
            with self._precision.forward_context():
                loss = _stock_loss(self._model(self._inputs), self._labels)
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


def _batches(job: Job) -> tuple[Tensor, Tensor]:
    """All the data in memory, one row per batch, in the order in which Stagewright reads it."""
    source = open_data(job.config, job.config.data.source)
    count = len(source) // job.plan.batch
    inputs, labels = only_pair(source.batch(torch.arange(count * job.plan.batch).numpy()), source.targets)
    shape = (count, job.plan.batch)
    return inputs.view(*shape, *inputs.shape[1:]), labels.view(*shape)


def _boundaries(job: Job) -> list[Tensor]:
    """Example outputs of each stage."""
    shapes: list[Any] = [value.shape for (value,) in job.training.cuts]
    return [torch.empty(shape, requires_grad=True) for shape in [*shapes, *job.training.outputs]]


def _optimizer(job: Job, module: nn.Module) -> torch.optim.Optimizer:
    """Fused, like Stagewright's: the fastest that torch has."""
    config = job.config.optimizer
    if config.name == "adamw":
        betas = (config.beta1, config.beta2)
        return torch.optim.AdamW(
            module.parameters(), config.lr, betas, config.eps, weight_decay=config.weight_decay, fused=True
        )
    return torch.optim.SGD(module.parameters(), config.lr, config.momentum, fused=True)


class Stagewright:
    """One rank of a job with the worker that `stagewright train` runs, trained in segments."""

    def __init__(self, job: Job, rank: int, meeting: Path) -> None:
        self.loss: float | None = None  # of the last batch, on ranks of the last stage
        self._plan = job.plan
        position = status_path(meeting, rank)
        position.parent.mkdir(exist_ok=True)
        set_flags(job.config)
        keep_freed_memory()  # as a rank of `train` does
        device = open_device(job.config.run.device, job.plan.devices[rank].index, share=job.config.run.share_gpu)
        self._device = device.device
        self.recorder = make_recorder(position, device)
        network = self._network(job, rank, meeting, device)
        self._worker = assemble(job, rank, network, self._receive, self.recorder, device)
        if self._device.type == "cuda" and self._worker.loader is not None:
            self._worker.loader.close()
            names = job.training.inputs[0].name, job.training.fields[0].name
            self._worker.loader = _Static(*static_batch(job, self._device), names)

    def train(self, first: int, steps: int) -> None:
        """Train some batches, from empty pipeline to empty pipeline."""
        span = range(self._plan.boundary(first), self._plan.boundary(first + steps))
        for pending in self._worker.train(span):
            pending.wait()

    def busy(self, start: float, end: float) -> float | None:
        """The share of a segment's middle that compute spans cover."""
        low, high = (start + share * (end - start) for share in _MIDDLE)
        spans = [span for span in self.recorder.spans() if span.lane == "compute"]
        inside = sum(max(0.0, min(span.end, high) - max(span.start, low)) for span in spans)
        return inside / (high - low)

    def weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for state in self._worker.states():
            if isinstance(state, tuple):
                found |= {name: tensor.clone() for name, tensor in state[1].items()}
            else:
                state.wait()
        return found

    def spans(self) -> Sequence[Span]:
        return self.recorder.spans()

    def _network(self, job: Job, rank: int, meeting: Path, device: Device) -> Network:
        store, place = open_store(meeting, job.plan.world), Place.of(job.plan, rank)
        return open_network(job.config, store, rank, place, job.config.run.timeout, device)

    def _receive(self, event: Event) -> None:
        if isinstance(event, BatchLosses):
            self.loss = sum(total for _, total, _ in event.losses) / sum(count for _, _, count in event.losses)


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


class Unconnected(Stagewright):
    """The same ranks and kernels without messages or all-reduces: the fastest that this plan could ever be here."""

    def __init__(self, job: Job, rank: int, meeting: Path) -> None:
        super().__init__(job, rank, meeting)
        for replica in self._worker.replicas.values():
            own = replica.exchange
            own.activations_from = {peer: _NoInbox(inbox, self._device) for peer, inbox in own.activations_from.items()}
            own.gradients_from = {peer: _NoInbox(inbox, self._device) for peer, inbox in own.gradients_from.items()}
            own.activations_to = {peer: _NoOutbox(outbox) for peer, outbox in own.activations_to.items()}
            own.gradients_to = {peer: _NoOutbox(outbox) for peer, outbox in own.gradients_to.items()}

    def _network(self, job: Job, rank: int, meeting: Path, device: Device) -> Network:
        return _NoNetwork()


class _NoNetwork:
    """A network without other ranks."""

    store = dist.HashStore()
    posted_ahead = 1

    @property
    def host(self) -> Network:
        return self

    def transport(self, name: ChannelName, window: int) -> Transport:
        return MemoryTransport()

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        return Alone()

    def message(self, message_format: MessageFormat) -> Message:
        raise AssertionError("without a network nothing is sent or received")


class _NoOutbox(Outbox):
    """Sends nothing."""

    def __init__(self, real: Outbox) -> None:
        super().__init__(real.name, MemoryTransport(), _NoNetwork.store, 1)

    def send(self, microbatch: int, tensors: Sequence[Tensor]) -> None:
        pass


class _NoInbox(Inbox):
    """Always has a message of the right shape."""

    def __init__(self, real: Inbox, device: torch.device) -> None:
        super().__init__(real.name, MemoryTransport(), _NoNetwork.store, 1)
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
