"""Stagewright's side: the worker that `stagewright train` runs, over the same channels, span after span."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from stagewright.bench.peers import open_store, static_batch
from stagewright.runtime.assemble import assemble, set_up
from stagewright.runtime.channels import Inbox, MemoryTransport, Outbox
from stagewright.runtime.device import Device, open_device
from stagewright.runtime.job import Job
from stagewright.runtime.messages import Layout, Message
from stagewright.runtime.nccl import open_network
from stagewright.runtime.network import ChannelName, DictBulletin, Network
from stagewright.runtime.pending import Done, Pending, Transport
from stagewright.runtime.place import Place
from stagewright.runtime.recorder import make_recorder
from stagewright.runtime.reduce import Alone, Collective
from stagewright.runtime.sight import position_file
from stagewright.runtime.worker import Emit

_MIDDLE = (0.25, 0.85)  # of a segment: the pipeline neither fills nor drains


class Stagewright:
    """One rank of a job, trained in segments."""

    def __init__(self, job: Job, rank: int, meeting: Path, emit: Emit) -> None:
        self.loss: float | None = None  # of the last batch, on ranks of the last stage
        self._emit = emit
        self._plan = job.plan
        position = position_file(meeting, rank)
        position.parent.mkdir(exist_ok=True)
        set_up(job.config)
        device = open_device(job.config.run.device, job.plan.devices[rank].index, share=job.config.run.share_gpu)
        self.recorder = make_recorder(position, device)
        network = self._network(job, rank, meeting, device)
        self._worker = assemble(job, rank, network, self._hear, self.recorder, device)
        if device.device.type == "cuda" and self._worker.loader is not None:
            self._worker.loader.close()
            self._worker.loader = _Static(*static_batch(job, device.device))

    def train(self, first: int, steps: int) -> None:
        """Train some batches, from empty pipeline to empty pipeline."""
        span = range(self._plan.boundary(first), self._plan.boundary(first + steps))
        for pending in self._worker.train(span):
            pending.wait()

    def busy(self, start: float, end: float) -> float | None:
        """The share of a segment's middle that lies under a compute."""
        low, high = (start + share * (end - start) for share in _MIDDLE)
        spans = [span for span in self.recorder.spans() if span[0] == "compute"]
        inside = sum(max(0.0, min(stop, high) - max(begin, low)) for *_, begin, stop in spans)
        return inside / (high - low)

    def _network(self, job: Job, rank: int, meeting: Path, device: Device) -> Network:
        return open_network(
            job.config, open_store(meeting, job.plan.world), rank, Place(), job.config.run.timeout, device
        )

    def _hear(self, event: dict[str, Any]) -> None:
        if event["kind"] == "losses":
            self.loss = fmean(loss for _, loss in event["losses"])
        self._emit(event)


@dataclass(frozen=True, slots=True)
class _Static:
    """One microbatch on the device, again and again: every side has its samples there."""

    inputs: Tensor
    labels: Tensor

    def microbatch(self, number: int) -> tuple[Tensor, Tensor]:
        return self.inputs, self.labels

    def close(self) -> None:
        pass


class Unconnected(Stagewright):
    """The same ranks and kernels without a message or a sum: as fast as this layout could ever be here."""

    def __init__(self, job: Job, rank: int, meeting: Path, emit: Emit) -> None:
        super().__init__(job, rank, meeting, emit)
        device = self._worker.loader.inputs.device if isinstance(self._worker.loader, _Static) else torch.device("cuda")
        for replica in self._worker.replicas.values():
            own = replica.exchange
            own.activations_from = {peer: _NoInbox(inbox, device) for peer, inbox in own.activations_from.items()}
            own.gradients_from = {peer: _NoInbox(inbox, device) for peer, inbox in own.gradients_from.items()}
            own.activations_to = {peer: _NoOutbox(outbox) for peer, outbox in own.activations_to.items()}
            own.gradients_to = {peer: _NoOutbox(outbox) for peer, outbox in own.gradients_to.items()}

    def _network(self, job: Job, rank: int, meeting: Path, device: Device) -> Network:
        return _Nobody()


class _Nobody:
    """A network without other ranks."""

    bulletin = DictBulletin({})
    posted_ahead = 1

    @property
    def host(self) -> Network:
        return self

    def transport(self, name: ChannelName, window: int) -> Transport:
        return MemoryTransport()

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        return Alone()

    def message(self, layout: Layout) -> Message:
        raise AssertionError("nobody sends and nobody receives")


class _NoOutbox(Outbox):
    """Sends nothing."""

    def __init__(self, real: Outbox) -> None:
        super().__init__(real.name, MemoryTransport(), _Nobody.bulletin, 1)

    def send(self, microbatch: int, tensors: Sequence[Tensor]) -> None:
        pass


class _NoInbox(Inbox):
    """Has something of the right shape whenever it is asked."""

    def __init__(self, real: Inbox, device: torch.device) -> None:
        super().__init__(real.name, MemoryTransport(), _Nobody.bulletin, 1)
        self._device = device
        self._message: Any = None

    def open(self, layout: Layout) -> bool:
        self._message = _Noise(layout, self._device)
        return False

    def expect(self, numbers: Iterator[int]) -> None:
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
    """A message that nobody sent: small random numbers, and labels of class 0."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.tensors = layout.views(torch.zeros(layout.bytes, dtype=torch.uint8, device=device))
        for tensor in self.tensors:
            if tensor.is_floating_point():
                tensor.normal_(0.0, 0.01)
