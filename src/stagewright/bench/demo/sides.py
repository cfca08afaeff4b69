"""How each side trains one rank's part of a job: stock DistributedDataParallel, and Stagewright itself.

Both train the same model on the same samples.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from stagewright.bench.demo.process import Runner
from stagewright.data.sources import only_pair
from stagewright.events import BatchLosses, Event
from stagewright.metrics import Span
from stagewright.runtime.comm.channel import Network
from stagewright.runtime.comm.device import Device, open_device
from stagewright.runtime.comm.nccl import open_network
from stagewright.runtime.comm.transport import Place
from stagewright.runtime.job import Job
from stagewright.runtime.precision import precision_of
from stagewright.runtime.process.assemble import assemble, open_data, open_model
from stagewright.runtime.process.rank import wait_for
from stagewright.runtime.process.session import Session
from stagewright.runtime.process.torch_flags import keep_freed_memory, set_flags
from stagewright.runtime.stage.optimizer import stock_optimizer
from stagewright.runtime.stage.recorder import make_recorder
from stagewright.runtime.status_file import status_path

_STEPS_KEPT = 512  # whose times DDP keeps
_DDP_SPANS = (("compute", "F"), ("compute", "B"), ("wait", "R"), ("compute", "U"))


def stock_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy, of text at each position."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def open_store(meeting: Path, world: int) -> dist.Store:
    """The store through which the ranks of one side meet; each side has its own folder."""
    return dist.FileStore(str(meeting / "store"), world)


class Ddp(Runner):
    """DistributedDataParallel: every rank trains its share of the batch; on GPUs with the fastest stock options."""

    def __init__(self, job: Job, rank: int, meeting: Path) -> None:
        world, self._precision = job.plan.world, precision_of(job.config)
        assert job.plan.microbatches == world, "DDP runs one microbatch per rank"
        set_flags(job.config)
        device = open_device(job.config.run.device, rank, share=True).device
        dist.init_process_group("gloo", store=open_store(meeting, world), rank=rank, world_size=world)
        self._inputs, self._labels = self.samples(job, rank, device)
        model = open_model(job.config, device)
        self._module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._optimizer = stock_optimizer(job.config.optimizer, self._module.parameters())
        is_cosine = job.config.schedule.kind == "cosine"
        self._rates = CosineAnnealingLR(self._optimizer, job.batches) if is_cosine else None
        self.rank = rank
        self._moments: deque[tuple[int, tuple[float, ...]]] = deque(maxlen=_STEPS_KEPT)
        self._computed = 0.0  # when backward had the last gradient: sums may still be under way
        if device.type == "cpu":
            first = next(model.parameters())
            first.register_post_accumulate_grad_hook(self._note_computed)  # type: ignore[no-untyped-call]

    def samples(self, job: Job, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """This rank's part of every batch, one row each."""
        inputs, labels = batches(job)
        own = slice(rank * job.plan.samples, (rank + 1) * job.plan.samples)
        return inputs[:, own], labels[:, own]

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
        return {} if self.rank else dict(self._module.module.state_dict())

    def spans(self) -> Sequence[Span]:
        """On CPU: forward, backward, the sums that backward did not hide, and the update of the last batches."""
        found: list[Span] = []
        for batch, moments in self._moments:
            names = f"0F{batch}@{batch}", f"0B{batch}@{batch}", f"0R@{batch}", f"0U@{batch}"
            for (lane, kind), name, start, end in zip(_DDP_SPANS, names, moments, moments[1:], strict=False):
                found.append(Span(self.rank, lane, kind, name, start, max(start, end)))
        return found


def batches(job: Job) -> tuple[Tensor, Tensor]:
    """All the data in memory, one row per batch, in the order in which Stagewright reads it."""
    source = open_data(job.config, job.config.data.source)
    count = len(source) // job.plan.batch
    inputs, labels = only_pair(source.batch(torch.arange(count * job.plan.batch).numpy()), source.targets)
    shape = (count, job.plan.batch)
    return inputs.view(*shape, *inputs.shape[1:]), labels.view(*shape)


class Stagewright(Runner):
    """One rank of a job with the worker that `stagewright train` runs, trained in segments."""

    def __init__(self, job: Job, rank: int, meeting: Path) -> None:
        self.rank, self._plan = rank, job.plan
        position = status_path(meeting, rank)
        position.parent.mkdir(exist_ok=True)
        set_flags(job.config)
        keep_freed_memory()  # as a rank of `train` does
        self.device = device = open_device(
            job.config.run.device, job.plan.devices[rank].index, share=job.config.run.share_gpu
        )
        self.recorder = make_recorder(position, device)
        network = self.network(job, meeting, device)
        self.worker = assemble(job, rank, network, self._receive, self.recorder, device)
        self._session = Session(job, [self.worker], wait_for)

    def train(self, first: int, steps: int) -> None:
        """Train some batches, from empty pipeline to empty pipeline."""
        span = range(self._plan.boundary(first), self._plan.boundary(first + steps))
        self._session.finish(lambda worker: worker.train(span))

    def weights(self) -> dict[str, Tensor]:
        return self._session.weights()

    def spans(self) -> Sequence[Span]:
        return self.recorder.spans()

    def network(self, job: Job, meeting: Path, device: Device) -> Network:
        store, place = open_store(meeting, job.plan.world), Place.of(job.plan, self.rank)
        return open_network(job.config, store, self.rank, place, job.config.run.timeout, device)

    def _receive(self, event: Event) -> None:
        if isinstance(event, BatchLosses):
            self.loss = sum(total for _, total, _ in event.losses) / sum(count for _, _, count in event.losses)
