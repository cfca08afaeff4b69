"""A user's own Dataset: any object with `len` and samples by index, as torch's map-style datasets are.

A sample is a tensor, a pair or tuple of inputs and one target at the end, or a dict of named fields, of which label,
labels, target and targets are targets. What a dataset draws at random for a sample depends on the seed, the epoch and
the sample's index alone: global generators are seeded before every sample. So data are the same for every plan,
for any number of worker processes, and after a resume.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from stagewright.config.sources import SourceOptions
from stagewright.data.formats.fields import Fields, Indices, cast
from stagewright.data.formats.records import DataError, require_limit
from stagewright.data.formats.tensors import is_target
from stagewright.data.order import AugmentSeed, ReplicaSlice
from stagewright.data.pool import LoaderOptions
from stagewright.errors import UserError, counted, first_line
from stagewright.metrics import IMAGES, SAMPLES, ThroughputUnit
from stagewright.objects import load_object

PREFIX = "python"
INPUT, TARGET = "input", "target"
_LOST = "DataLoader worker"  # what torch's error says where one of its processes ended
_LOOKED_AT = 4  # samples, evenly spread, that are looked at before training
Collate = Callable[[list[Any]], Any]


@runtime_checkable
class Samples(Protocol):
    """What a map-style dataset is."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Collated:
    """A dataset, or a function that makes one, with the function that stacks its samples."""

    dataset: Any
    collate_fn: Collate


class DatasetSource:
    """Samples of a user's dataset, each field stacked."""

    vocabulary = 0

    def __init__(
        self,
        dataset: Samples,
        name: str,
        seed: int = 0,
        ignore_index: int | None = None,
        collate: Collate | None = None,
    ) -> None:
        self.name = name
        self.dataset = dataset
        self.has_ignored = ignore_index is not None
        self._seed = seed
        self._ignored = ignore_index
        self._collate = collate or default_collate
        self._length = len(dataset)
        if not self._length:
            raise DataError(f"dataset {name} is empty; give one with samples")
        indices = np.unique(np.linspace(0, self._length - 1, _LOOKED_AT).astype(np.int64))
        few = self._stacked(indices, None)
        self._few = fields_of(few, name, len(indices))
        self.targets = tuple(field for field in self._few if is_target(field))
        self.is_paired = isinstance(few, Sequence) and TARGET in self._few  # samples are pairs or tuples, not dicts

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Indices) -> Fields:
        """Samples as an evaluation sees them."""
        return self.load(indices, None)

    def load(self, indices: Indices, seed: AugmentSeed | None) -> Fields:
        """Samples as a training epoch sees them; without a seed, as an evaluation does."""
        return fields_of(self._stacked(indices, seed), self.name, len(indices))

    def _stacked(self, indices: Indices, seed: AugmentSeed | None) -> Any:
        """Samples as the collate function leaves them."""
        if (length := len(self.dataset)) != self._length:
            raise DataError(
                f"dataset {self.name} had {self._length} samples and has {length} now; a dataset keeps its length "
                "while it is trained on"
            )
        about = f"{self._seed}/evaluation" if seed is None else f"{seed.seed}/{seed.epoch}"
        samples = []
        with _own_generators():
            try:
                for index in indices.tolist():
                    _seed(f"{about}/{index}")
                    samples.append(self.dataset[index])
                return self._collate(samples)
            except Exception as error:  # the user's code may raise anything
                what = f"{type(error).__name__}: {first_line(error, 200)}"
                if (count := len(samples)) < len(indices):
                    raise DataError(f"sample {indices[count]} of dataset {self.name} raised {what}") from error
                raise DataError(
                    f"{count} samples of dataset {self.name} can't be stacked ({what}); give samples of one shape, or "
                    "a collate function"
                ) from error

    @cached_property
    def unit(self) -> ThroughputUnit:
        return IMAGES if any(field.dim() == 4 for field in self._few.values()) else SAMPLES

    @cached_property
    def classes(self) -> int:
        """One more than the largest class number among the few samples that were looked at."""
        largest = -1
        for name in self.targets:
            target = self._few[name]
            if not (target.is_floating_point() or target.is_complex() or target.dtype is torch.bool):
                largest = max((largest, *target[target != self._ignored].flatten().tolist()))
        return largest + 1

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(repr(self._length).encode(), digest_size=16)
        for name, tensor in sorted(self._few.items()):
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class DatasetLoader:
    """Loads a replica's microbatches of a dataset: in this process, or ahead of time in worker processes."""

    def __init__(self, source: DatasetSource, replica_slice: ReplicaSlice, options: LoaderOptions) -> None:
        self.targets = source.targets
        self._name = source.name
        self._microbatches = _Microbatches(source, replica_slice)
        self._slice = replica_slice
        self._options = options
        self._ahead: Iterator[tuple[int, Fields | str]] | None = None
        self._next = -1

    def microbatch(self, number: int) -> Fields:
        fields = self._loaded(number) if self._options.workers else self._microbatches.load(number)
        device = self._options.device
        fields = {name: tensor.to(device, non_blocking=True) for name, tensor in fields.items()}
        return cast(fields, self.targets, self._options.dtype)

    def close(self) -> None:
        self._ahead = None  # ends the workers

    def _loaded(self, number: int) -> Fields:
        if self._ahead is None or number != self._next:
            options = self._options
            numbers = range(number, max(self._slice.stop, number + 1), self._slice.step)
            self._ahead = iter(
                DataLoader(
                    self._microbatches,
                    batch_size=None,
                    sampler=numbers,
                    num_workers=options.workers,
                    prefetch_factor=max(1, -(-options.ahead // options.workers)),
                    pin_memory=options.device.type == "cuda",
                )
            )
        try:
            found, fields = next(self._ahead)
        except (RuntimeError, EOFError, OSError) as error:
            if isinstance(error, RuntimeError) and _LOST not in str(error):
                raise
            self._ahead = None
            raise DataError(
                f"one of {counted(self._options.workers, 'process', 'es')} that load dataset {self._name} ended "
                f"({first_line(error, 200)}); if the memory was full, give fewer --workers"
            ) from error
        assert found == number, f"microbatch {found} came in place of {number}"
        self._next = number + self._slice.step
        if isinstance(fields, str):
            raise DataError(fields)
        return fields


class _Microbatches(Dataset[tuple[int, "Fields | str"]]):
    """Whole microbatches by number, as torch's loader asks its workers for them; an error is its text."""

    def __init__(self, source: DatasetSource, replica_slice: ReplicaSlice) -> None:
        self._source = source
        self._sampler = replica_slice.sampler

    def load(self, number: int) -> Fields:
        return self._source.load(self._sampler.indices(number), self._sampler.augment_seed(number))

    def __getitem__(self, number: int) -> tuple[int, Fields | str]:
        try:
            return number, self.load(number)
        except UserError as error:
            return number, str(error)


def fields_of(batch: Any, name: str, samples: int | None = None) -> Fields:
    """A batch as named fields: of a dict its own, of a tuple `input` (or input0, input1, ...) and `target`."""
    if isinstance(batch, Tensor):
        found: Mapping[str, Any] = {INPUT: batch}
    elif isinstance(batch, Mapping):
        found = {str(key): value for key, value in batch.items()}
    elif isinstance(batch, Sequence) and len(batch) > 2:
        found = {**{f"{INPUT}{number}": item for number, item in enumerate(batch[:-1])}, TARGET: batch[-1]}
    elif isinstance(batch, Sequence) and batch and not isinstance(batch, str):
        found = dict(zip((INPUT, TARGET), batch, strict=False))
    else:
        raise DataError(f"a sample of {name} is of type {type(batch).__name__}; give a tensor, a tuple or a dict")
    for field, value in found.items():
        if not isinstance(value, Tensor):
            raise DataError(
                f"field '{field}' of {name} is of type {type(value).__name__}, not a tensor; leave it out, or turn it "
                "into numbers"
            )
        if not value.dim() or (samples is not None and len(value) != samples):
            raise DataError(
                f"field '{field}' of {name} is {list(value.shape)} for {samples} samples; its first dimension must be "
                "that number"
            )
    return dict(found)


def open_own(text: str, options: SourceOptions) -> DatasetSource:
    """The dataset that `python:package.module:name` names: an object, or a function that makes one."""
    name, limit = text.removeprefix(f"{PREFIX}:"), options.limit
    found = load_object(name, "data")
    collate = getattr(found, "collate_fn", None)
    found = found.dataset if isinstance(found, Collated) else found
    if callable(found) and (isinstance(found, type) or not isinstance(found, Samples)):
        found = found()
        collate = collate or getattr(found, "collate_fn", None)
    if not isinstance(found, Samples):
        raise UserError(
            f"data {PREFIX}:{name} is of type {type(found).__name__}, which has no length or no samples by index; give "
            "a map-style dataset (an iterable one can be trained on with stagewright.Engine)"
        )
    if limit is not None:
        require_limit(limit, len(found))
        found = Subset(found, [number * len(found) // limit for number in range(limit)])  # type: ignore[arg-type]
    return DatasetSource(found, name.partition(":")[2], options.seed, options.ignore_index, collate)


def _seed(text: str) -> None:
    seed = int.from_bytes(hashlib.blake2b(text.encode()).digest()[:8], "little")
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def _own_generators() -> Iterator[None]:
    """Leave the global generators as they were."""
    state = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state[0])
        random.setstate(state[1])
        np.random.set_state(state[2])
