"""Stock PyTorch's sides: what a user would run instead, on the same work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from stagewright.model.units import Piece
from stagewright.runtime.assemble import open_data, open_pieces, set_up
from stagewright.runtime.device import open_device
from stagewright.runtime.job import Job
from stagewright.runtime.precision import make_precision
from stagewright.runtime.worker import Emit

_CPU = torch.device("cpu")


def static_batch(job: Job, device: torch.device) -> tuple[Tensor, Tensor]:
    """One microbatch that stays on the device, as every side of a heat on GPUs has it."""
    image, classes = job.config.data.image, job.config.model.classes
    assert image is not None and classes is not None
    generator = torch.Generator(device).manual_seed(0)
    inputs = torch.randn(job.plan.samples, 3, image, image, device=device, generator=generator)
    labels = torch.randint(classes, (job.plan.samples,), device=device, generator=generator)
    return inputs.contiguous(memory_format=torch.channels_last), labels


class _Side:
    """What stock sides have in common: they tell nothing of when the GPU worked."""

    loss: float | None = None

    def busy(self, start: float, end: float) -> float | None:
        return None


def open_store(meeting: Path, world: int) -> dist.Store:
    """Where the ranks of one side find each other; each side has a folder of its own."""
    return dist.FileStore(str(meeting / "store"), world)


class OneFOneB(_Side):
    """torch.distributed.pipelining: one stage a rank, Schedule1F1B, shapes known from the start."""

    def __init__(self, job: Job, rank: int, meeting: Path, emit: Emit) -> None:
        world = job.plan.world
        dist.init_process_group("gloo", store=open_store(meeting, world), rank=rank, world_size=world)
        self._inputs, self._labels = _batches(job)
        self._is_first, self._is_last = rank == 0, rank == world - 1
        module = as_sequential(open_pieces(job.config, job.plan.cuts)[rank])
        values = [self._inputs[0, : job.plan.samples], *_boundaries(job)]
        stage = PipelineStage(module, rank, world, _CPU, input_args=values[rank], output_args=values[rank + 1])
        self._schedule = Schedule1F1B(stage, job.plan.microbatches, nn.functional.cross_entropy)
        self._optimizer = _optimizer(job, module)

    def train(self, first: int, steps: int) -> None:
        """Train some batches; each drains before its update."""
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


class Ddp(_Side):
    """DistributedDataParallel: every rank its share of the batch; on GPUs as fast as stock options make it."""

    def __init__(self, job: Job, rank: int, meeting: Path, emit: Emit) -> None:
        world, self._precision = job.plan.world, make_precision(job.config.run.precision, job.config.run.device)
        assert job.plan.microbatches == world, "DDP runs one microbatch a rank"
        set_up(job.config)
        device = open_device(job.config.run.device, rank, share=True).device
        dist.init_process_group("gloo", store=open_store(meeting, world), rank=rank, world_size=world)
        if device.type == "cuda":
            inputs, labels = static_batch(job, device)
            self._inputs, self._labels = inputs[None], labels[None]
        else:
            inputs, labels = _batches(job)
            own = slice(rank * job.plan.samples, (rank + 1) * job.plan.samples)
            self._inputs, self._labels = inputs[:, own], labels[:, own]
        (piece,) = open_pieces(job.config, (), device)
        self._module = DistributedDataParallel(piece.training, gradient_as_bucket_view=True)
        self._optimizer = _optimizer(job, self._module)

    def train(self, first: int, steps: int) -> None:
        for batch in range(first, first + steps):
            index = batch % len(self._inputs)
            self._optimizer.zero_grad()
            with self._precision.forward_context():
                loss = nn.functional.cross_entropy(self._module(self._inputs[index]), self._labels[index])
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        self.loss = float(loss.detach())


class Plain(_Side):
    """One process on one GPU: the loop that everybody writes, compiled, with torch's own loss scaling in fp16."""

    def __init__(self, job: Job, rank: int, meeting: Path, emit: Emit) -> None:
        self._precision = make_precision(job.config.run.precision, job.config.run.device)
        set_up(job.config)
        device = open_device(job.config.run.device, 0, share=True).device
        self._inputs, self._labels = static_batch(job, device)
        (piece,) = open_pieces(job.config, (), device)
        self._optimizer = _optimizer(job, piece.training)
        self._model = torch.compile(piece.training, dynamic=False) if job.config.run.compile else piece.training
        self._scaler = torch.amp.GradScaler(device.type, enabled=self._precision.is_scaled)

    def train(self, first: int, steps: int) -> None:
        for _ in range(steps):
            self._optimizer.zero_grad()
            with self._precision.forward_context():
                loss = nn.functional.cross_entropy(self._model(self._inputs), self._labels)
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self.loss = float(loss.detach())


def as_sequential(piece: Piece) -> nn.Module:
    """A piece of a plain chain as a user would write it: its layers one after another, without a graph."""
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
    """All the data in memory, a row a batch, in the order in which Stagewright reads it."""
    source = open_data(job.config, job.config.data.source)
    count = len(source) // job.plan.batch
    inputs, labels = source.batch(torch.arange(count * job.plan.batch).numpy())
    shape = (count, job.plan.batch)
    return inputs.view(*shape, *inputs.shape[1:]), labels.view(*shape)


def _boundaries(job: Job) -> list[Tensor]:
    """Examples of what leaves each stage."""
    shapes: list[Any] = [value.shape for (value,) in job.training.cuts]
    return [torch.empty(shape, requires_grad=True) for shape in [*shapes, job.training.output]]


def _optimizer(job: Job, module: nn.Module) -> torch.optim.Optimizer:
    """Fused, as Stagewright's is: the fastest that torch has."""
    config = job.config.optimizer
    return torch.optim.SGD(module.parameters(), config.lr, config.momentum, fused=True)
