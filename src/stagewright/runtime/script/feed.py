"""Where the samples of a script's loop come from: a data set, an epoch at a time, or batches that it brings itself.

These are taken from any iterable as they are needed, or given one at a time. Every rank of the script brings the same.
The first stage trains on its own ones; all others only look at them, to know how many there are and to tell the
supervisor what they look like (`fingerprint`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stagewright.data.formats.fields import Fields, cast
from stagewright.data.formats.tensors import is_target
from stagewright.data.loader import Loader, make_loaders
from stagewright.data.order import AugmentSeed, EvaluationSampler, Indices, Order, ReplicaSlice
from stagewright.data.own import fields_of
from stagewright.data.sources import Source
from stagewright.errors import UserError
from stagewright.runtime.job import Job
from stagewright.runtime.precision import precision_of
from stagewright.runtime.process.assemble import loader_options
from stagewright.runtime.process.session import Session
from stagewright.runtime.stage.worker import Worker

_SAMPLED = 64  # numbers of each field that a fingerprint is made of
Told = Callable[[int, str], None]


class Batches:
    """Batches by number, from the first that is given; `has` is what a gate asks."""

    def __init__(
        self,
        job: Job,
        first: int,
        source: Iterable[Any] | None = None,
        *,
        loads: bool = True,
        tell: Told = lambda *_: None,
    ) -> None:
        """`source`: where batches come from, else from `give`; `loads`: this process has ranks that train on them.

        `tell` hears of each batch and its fingerprint.
        """
        self._job = job
        self._source: Iterator[Any] | None = None if source is None else iter(source)
        self._tell = tell
        self._next = first  # the number of the next batch
        self._held: dict[int, Fields] = {}
        self._loads = loads
        self._kept = 1 + max(stage.versions for stage in job.plan.stages)  # batches: replicas may be that far apart
        self._is_over = False
        self.left_out = 0  # samples of a last batch that is not whole

    def has(self, batch: int) -> bool | None:
        while self._source is not None and batch >= self._next and not self._is_over:
            try:
                found = next(self._source)
            except StopIteration:
                self._is_over = True
                break
            fields = fields_of(found, "a batch")
            samples = len(next(iter(fields.values())))
            if samples < self._job.plan.batch and self._next:
                self.left_out, self._is_over = samples, True
                break
            self._add(fields)
        if batch < self._next:
            return True
        return False if self._is_over else None

    def give(self, batch: Any) -> None:
        """The next batch."""
        self._add(fields_of(batch, "a batch"))

    def end(self) -> None:
        """No further batch will be given."""
        self._is_over = True

    def microbatch(self, number: int) -> Fields:
        """One microbatch; batches long before it are forgotten."""
        batch, piece = divmod(number, self._job.plan.microbatches)
        self._held = {held: fields for held, fields in self._held.items() if held + self._kept > batch}
        size = self._job.plan.samples
        return {name: tensor[piece * size : (piece + 1) * size] for name, tensor in self._held[batch].items()}

    def _add(self, fields: Fields) -> None:
        self._require(fields)
        self._tell(self._next, fingerprint(fields))
        if self._loads:
            self._held[self._next] = fields
        self._next += 1

    def _require(self, fields: Fields) -> None:
        """An error where a batch is not as those that the run was prepared with."""
        size, expected = self._job.plan.batch, self._job.training
        for name, tensor in fields.items():
            if len(tensor) != size:
                raise UserError(
                    f"batch {self._next} has {len(tensor)} samples in '{name}' but the run's batches have {size}; give "
                    "batches of one size (drop_last=True)"
                )
        known = {value.name: value for value in (*expected.inputs, *expected.fields)}
        for name, value in known.items():
            if name not in fields:
                raise UserError(f"batch {self._next} has no field '{name}', which batches had before: {list(fields)}")
            if tuple(fields[name].shape[1:]) != tuple(value.shape[1:]):
                raise UserError(
                    f"field '{name}' of batch {self._next} is {list(fields[name].shape)}, a batch of the run "
                    f"{[size, *value.shape[1:]]}; give batches of one shape (pad them)"
                )


@dataclass(frozen=True, slots=True)
class EpochSampler:
    """The microbatches of one epoch of a script, in the order that `stagewright train` would have for it."""

    order: Order
    epoch: int
    first: int  # the number of its first batch in the whole run
    microbatches: int

    @property
    def size(self) -> int:
        return self.order.batch // self.microbatches

    def indices(self, number: int) -> Indices:
        within = number - self.first * self.microbatches
        return self.order.microbatch(self.epoch * self.order.batches * self.microbatches + within, self.microbatches)

    def augment_seed(self, number: int) -> AugmentSeed:
        return AugmentSeed(self.order.seed, self.epoch)


def epoch_loader(session: Session, source: Source, sampler: EpochSampler, last: int) -> Loader | None:
    """What loads an epoch of a source up to batch `last`; None where no rank of this process does."""
    return _loader(session, source, sampler, session.plan.boundary(last))


def evaluation_loader(session: Session, source: Source) -> Loader | None:
    """What loads every sample of a source once."""
    samples = session.plan.samples
    return _loader(session, source, EvaluationSampler(len(source), samples), -(-len(source) // samples))


def batch_loader(session: Session, batches: Batches) -> Loader | None:
    """What loads a script's own batches."""
    worker = loading_worker(session)
    if worker is None:
        return None
    targets = tuple(value.name for value in session.job.training.fields if is_target(value.name))
    return BatchLoader(batches, targets, precision_of(session.job.config).weights, worker.device)


def loading_worker(session: Session) -> Worker | None:
    """The first worker of this process whose rank is of the first stage, if there is one."""
    return next((worker for worker in session.workers if worker.rank in session.plan.stages[0].ranks), None)


def _loader(session: Session, source: Source, sampler: EpochSampler | EvaluationSampler, stop: int) -> Loader | None:
    worker = loading_worker(session)
    if worker is None:
        return None
    # One loader serves every emulated rank, so it takes each microbatch, not each r-th.
    step = session.plan.stages[0].replicas if len(session.workers) == 1 else 1
    options = loader_options(session.job, worker.rank, worker.emit, worker.device)
    return make_loaders(options, (source, ReplicaSlice(sampler, step, stop)))[0]


class BatchLoader:
    """The loader of a rank of the first stage, over batches of the script."""

    def __init__(self, batches: Batches, targets: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.targets = targets
        self._batches = batches
        self._dtype = dtype
        self._device = device

    def microbatch(self, number: int) -> Fields:
        fields = self._batches.microbatch(number)
        return cast({name: tensor.to(self._device) for name, tensor in fields.items()}, self.targets, self._dtype)

    def close(self) -> None:
        pass


def fingerprint(fields: Mapping[str, Tensor]) -> str:
    """A few numbers of every field, hashed: batches of other samples, or in another order, have another one."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(fields.items()):
        flat = tensor.detach().reshape(-1)
        few = flat[:: max(1, len(flat) // _SAMPLED)].cpu().contiguous()
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(few.view(torch.uint8).numpy().tobytes() if few.numel() else b"")
    return digest.hexdigest()
