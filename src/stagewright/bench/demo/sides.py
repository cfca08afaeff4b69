"""How each side trains one rank's part of a job: stock DistributedDataParallel, and Stagewright itself.

Every class is a `Runner` of `process`. All sides train the same model on the same samples.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from stagewright.data.sources import Fields, only_pair
from stagewright.events import BatchLosses, Event
from stagewright.metrics import Span
from stagewright.model.probe import Value
from stagewright.runtime.comm.channel import Network
from stagewright.runtime.comm.device import Device, open_device
from stagewright.runtime.comm.nccl import open_network
from stagewright.runtime.comm.transport import Place
from stagewright.runtime.job import Job
from stagewright.runtime.precision import precision_of
from stagewright.runtime.process.assemble import assemble, open_data, open_pieces
from stagewright.runtime.process.rank import wait_for
from stagewright.runtime.process.session import Session
from stagewright.runtime.process.torch_flags import keep_freed_memory, set_flags
from stagewright.runtime.stage.recorder import make_recorder
from stagewright.runtime.status_file import status_path

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


def stock_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy, of text at each position."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


class Stock:
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


class Ddp(Stock):
    """DistributedDataParallel: every rank trains its share of the batch; on GPUs with the fastest stock options."""

    def __init__(self, job: Job, rank: int, meeting: Path) -> None:
        world, self._precision = job.plan.world, precision_of(job.config)
        assert job.plan.microbatches == world, "DDP runs one microbatch per rank"
        set_flags(job.config)
        device = open_device(job.config.run.device, rank, share=True).device
        dist.init_process_group("gloo", store=open_store(meeting, world), rank=rank, world_size=world)
        if device.type == "cuda":
            inputs, labels = static_batch(job, device)
            self._inputs, self._labels = inputs[None], labels[None]
        else:
            inputs, labels = batches(job)
            own = slice(rank * job.plan.samples, (rank + 1) * job.plan.samples)
            self._inputs, self._labels = inputs[:, own], labels[:, own]
        (piece,) = open_pieces(job.config, (), device=device)
        self._module = DistributedDataParallel(piece.training, gradient_as_bucket_view=True)
        self._optimizer = fused_optimizer(job, self._module)
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
                loss = stock_loss(self._module(self._inputs[index]), self._labels[index])
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


def batches(job: Job) -> tuple[Tensor, Tensor]:
    """All the data in memory, one row per batch, in the order in which Stagewright reads it."""
    source = open_data(job.config, job.config.data.source)
    count = len(source) // job.plan.batch
    inputs, labels = only_pair(source.batch(torch.arange(count * job.plan.batch).numpy()), source.targets)
    shape = (count, job.plan.batch)
    return inputs.view(*shape, *inputs.shape[1:]), labels.view(*shape)


def fused_optimizer(job: Job, module: nn.Module) -> torch.optim.Optimizer:
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
        worker = assemble(job, rank, network, self._receive, self.recorder, device)
        self._session = Session(job, [worker], wait_for)
        if self._device.type == "cuda" and worker.loader is not None:
            worker.loader.close()
            names = job.training.inputs[0].name, job.training.fields[0].name
            worker.loader = _Static(*static_batch(job, self._device), names)

    def train(self, first: int, steps: int) -> None:
        """Train some batches, from empty pipeline to empty pipeline."""
        span = range(self._plan.boundary(first), self._plan.boundary(first + steps))
        self._session.finish(lambda worker: worker.train(span))

    def busy(self, start: float, end: float) -> float | None:
        """The share of a segment's middle that compute spans cover."""
        low, high = (start + share * (end - start) for share in _MIDDLE)
        spans = [span for span in self.recorder.spans() if span.lane == "compute"]
        inside = sum(max(0.0, min(span.end, high) - max(span.start, low)) for span in spans)
        return inside / (high - low)

    def weights(self) -> dict[str, Tensor]:
        return self._session.weights()

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
