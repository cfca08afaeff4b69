"""The batches that a script brings itself: taken from any iterable as they are needed, or given one at a time.

Every rank of the script brings the same batches. The first stage trains on its own ones; all others only look at them,
to know how many there are and to tell the supervisor what they look like (`fingerprint`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stagewright.data.formats.fields import Fields, cast
from stagewright.data.own import fields_of
from stagewright.errors import UserError
from stagewright.runtime.job import Job

_SAMPLED = 64  # numbers of each field that a fingerprint is made of
Told = Callable[[int, str], None]


class Batches:
    """Batches by number, from the first that is given; `has` is what a `ScriptGate` asks."""

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
