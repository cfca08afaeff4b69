"""What a checkpoint holds: one JSON file that names every other file of its folder, with its size and its hash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagewright.data.position import Position
from stagewright.plan.plan import Plan

MANIFEST = "manifest.json"
FORMAT = 1
MASTER = "master"


class CheckpointError(ValueError):
    """A checkpoint that can't be used."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of tensors, by the parameter names of the whole model."""

    name: str
    stage: int
    kind: str  # master, slot/0, optimizer/exp_avg, buffers/0
    bytes: int
    blake2b: str


@dataclass(frozen=True, slots=True)
class StageState:
    """What is kept of a stage besides its tensors."""

    index: int
    counts: tuple[int, ...]  # microbatches that have moved each replica's statistics
    optimizer: Mapping[str, float] = field(default_factory=dict)  # its single numbers
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint."""

    format: int
    batch: int  # batches trained
    plan: Plan
    position: Position
    config: Mapping[str, Mapping[str, Any]]
    stages: tuple[StageState, ...]
    files: tuple[File, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def as_json(self) -> str:
        from pydantic import TypeAdapter

        return TypeAdapter(Manifest).dump_json(self, indent=1).decode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder, or an error that says what is wrong with it."""
    from pydantic import TypeAdapter, ValidationError

    path = folder / MANIFEST
    try:
        manifest = TypeAdapter(Manifest).validate_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: {MANIFEST}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise CheckpointError(f"checkpoint {folder}: {MANIFEST} is damaged: {where}: {first['msg'].lower()}") from error
    if manifest.format != FORMAT:
        raise CheckpointError(f"checkpoint {folder} has format {manifest.format}, this version reads {FORMAT}")
    for file in manifest.files:
        if Path(file.name).name != file.name:
            raise CheckpointError(f"checkpoint {folder}: {MANIFEST} names '{file.name}', no file of its folder")
    return manifest
