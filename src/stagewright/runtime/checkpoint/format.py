"""The format of a checkpoint: a manifest (JSON) that names every other file with its size and hash, and the files of
tensors (safetensors), which are written and hashed in pieces so that the thread never blocks training for long."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from stagewright.config.toml import with_new_names
from stagewright.data.order import Position
from stagewright.errors import UserError
from stagewright.events import Best, File
from stagewright.files import MOST_TEXT_BYTES, read_regular
from stagewright.metrics import Criterion
from stagewright.plan.plan import Plan, Stage

MANIFEST = "manifest.json"
FORMAT = 1
MASTER = "master"
FROZEN = "frozen"  # parameters that are not trained; only of runs that start from a file
EMA = "ema"  # the average of the master
_HASH = "blake2b"
_PIECE = 4 * 2**20  # bytes
_ALIGNMENT = 8
_MOST_COUNT = 2**53  # of batches or microbatches: exact as a float64
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class CheckpointError(UserError):
    """A checkpoint that can't be used."""


class CheckpointGone(CheckpointError):
    """A checkpoint that was deleted while it was read: a run that trains keeps only its newest."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"checkpoint {folder} was deleted while it was read; name its run, for the newest")


@dataclass(frozen=True, slots=True)
class StageState:
    """The state of a stage besides its tensors."""

    index: int
    counts: tuple[int, ...]  # per replica: microbatches in its BatchNorm statistics
    optimizer: Mapping[str, float] = field(default_factory=dict)  # its scalars
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a checkpoint except its tensors."""

    format: int
    batch: int  # batches trained
    plan: Plan
    position: Position
    config: Mapping[str, Mapping[str, Any]]
    stages: tuple[StageState, ...]
    files: tuple[File, ...]
    best: Best | None = None  # evaluation so far, where evaluations are compared

    @property
    def is_best(self) -> bool:
        """Whether it was saved as the best so far (`--best`)."""
        is_asked = self.config.get("checkpoint", {}).get("best") is not None
        return is_asked and self.best is not None and self.best.batch == self.batch

    def best_by(self, criterion: Criterion | None) -> Best | None:
        """The best evaluation so far by a criterion; none yet, where they were compared by another or not at all."""
        known = self.best if self.best is not None and self.best.criterion == criterion else None
        return known or (None if criterion is None else Best(criterion))

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def as_json(self) -> str:
        """The text of the manifest; its last field is a hash of the others."""
        fields = _adapter().dump_python(self, mode="json")
        return json.dumps(fields | {_HASH: _hash(fields)}, indent=1)


@cache
def _adapter() -> Any:
    return TypeAdapter(Manifest)


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a checkpoint's folder; CheckpointError where it is missing, damaged or impossible."""
    damaged = f"checkpoint {folder} is damaged: {MANIFEST}"
    try:
        fields = json.loads(read_regular(folder / MANIFEST, MOST_TEXT_BYTES))
    except OSError as error:
        if not folder.exists():
            raise CheckpointGone(folder) from error
        raise CheckpointError(f"{damaged}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{damaged} is not JSON") from error
    if not isinstance(fields, dict) or fields.pop(_HASH, None) != _hash(fields):
        raise CheckpointError(f"{damaged} does not match its hash")
    if fields.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {folder} has format {fields.get('format')!r}, this version reads {FORMAT}")
    try:
        manifest: Manifest = _adapter().validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{damaged}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from error
    for file in manifest.files:
        if Path(file.name).name != file.name:
            raise CheckpointError(f"{damaged} names '{file.name}', which is outside its folder")
    if not _is_consistent(manifest):
        raise CheckpointError(f"{damaged} describes an impossible plan")
    return replace(manifest, config=with_new_names(manifest.config))


def _is_consistent(manifest: Manifest) -> bool:
    """Whether its numbers fit together, so that readers need not check again."""
    plan, world, place = manifest.plan, len(manifest.plan.devices), manifest.position
    counts = [count for state in manifest.stages for count in state.counts]
    return (
        min(plan.batch, plan.microbatches, len(plan.stages), world) >= 1
        and plan.batch % plan.microbatches == 0
        and all(0 <= number < _MOST_COUNT for number in (manifest.batch, place.epoch, place.batch, *counts))
        and len(plan.cuts) == len(plan.stages) - 1
        and [len(state.counts) for state in manifest.stages] == [len(stage.ranks) for stage in plan.stages]
        and all(_is_possible(stage, index, plan) for index, stage in enumerate(plan.stages))
        and sorted(index for tie in plan.ties for index in tie.stages) == [s.index for s in plan.stages if s.is_tied]
        and all(
            set(p.homes) <= set(tie.stages) and p.names and p.size >= 0 for tie in plan.ties for p in tie.parameters
        )
        and {"name"} <= manifest.config.get("model", {}).keys() & manifest.config.get("optimizer", {}).keys()
    )


def _is_possible(stage: Stage, index: int, plan: Plan) -> bool:
    return (
        (stage.index, stage.count) == (index, len(plan.stages))
        and set(stage.ranks) <= set(range(len(plan.devices)))
        and len(set(stage.ranks)) == len(stage.ranks) >= 1
        and min(stage.round, stage.versions, stage.depth) >= 1
        and stage.origin >= 0
    )


def _hash(fields: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=32).hexdigest()


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write tensors to a file and sync it; its size in bytes and its hash."""
    digest = hashlib.blake2b(digest_size=32)
    size = 0
    with path.open("wb", buffering=0) as file:
        for piece in _pieces(tensors):
            view = memoryview(piece)
            while view:  # an unbuffered write may write only a part
                view = view[file.write(view) :]
            digest.update(piece)
            size += len(piece)
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def hash_file(path: Path) -> str:
    """The hash of a file, as `write_shard` returns it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=32)).hexdigest()


def sync_folder(path: Path) -> None:
    """Sync a folder, so that new and renamed files survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for first in range(0, len(content), _PIECE):
            yield content[first : first + _PIECE]
