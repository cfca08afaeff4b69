"""Checkpoints on the disk: `checkpoints/<batch>/` of a run folder, whole or not there.

A checkpoint is written under the name `<batch>.partial`, and gets its own when everything is in it."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from stagewright.runtime.checkpoint.format import MASTER, CheckpointError, Manifest, hash_file, read_manifest
from stagewright.runtime.stage.batch_norm import mean_buffers

_PARTIAL = ".partial"


def checkpoints_folder(run: Path) -> Path:
    return run / "checkpoints"


def partial_folder(run: Path, batch: int) -> Path:
    """Where a checkpoint is written."""
    return checkpoints_folder(run) / f"{batch}{_PARTIAL}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with a manifest; `verify` says whether it is whole."""

    folder: Path
    manifest: Manifest

    @property
    def batch(self) -> int:
        return self.manifest.batch

    def verify(self) -> None:
        """Raise CheckpointError unless every file is there, with its size and its hash."""
        for file in self.manifest.files:
            path = self.folder / file.name
            if not path.is_file():
                raise CheckpointError(f"checkpoint {self.folder} is damaged: {file.name} is missing")
            if (size := path.stat().st_size) != file.bytes:
                raise CheckpointError(
                    f"checkpoint {self.folder} is damaged: {file.name} has {size} bytes instead of {file.bytes}"
                )
            if hash_file(path) != file.blake2b:
                raise CheckpointError(f"checkpoint {self.folder} is damaged: {file.name} does not match its hash")

    def has(self, kind: str) -> bool:
        return any(file.kind == kind for file in self.manifest.files)

    def read(self, kind: str, names: Collection[str] | None = None, stage: int | None = None) -> dict[str, Tensor]:
        """The tensors of one kind by name: some of them or all, of a stage or of all stages."""
        found: dict[str, Tensor] = {}
        for file in self.manifest.files:
            if file.kind != kind or (stage is not None and file.stage != stage):
                continue
            try:
                with safe_open(self.folder / file.name, "pt") as tensors:
                    wanted = [name for name in tensors.keys() if names is None or name in names]  # noqa: SIM118
                    found |= {name: tensors.get_tensor(name) for name in wanted}
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"checkpoint {self.folder} is damaged: {file.name}: {error}") from error
        return found

    def shapes(self) -> dict[str, list[int]]:
        """Of every parameter that it holds."""
        found: dict[str, list[int]] = {}
        for file in self.manifest.files:
            if file.kind == MASTER:
                with safe_open(self.folder / file.name, "pt") as tensors:
                    found |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        return found

    def mean_buffers(self) -> dict[str, Tensor]:
        """Every stage's buffers: statistics averaged over its replicas by their microbatches, counts summed."""
        mean: dict[str, Tensor] = {}
        for stage in self.manifest.stages:
            replicas = [self.read(f"buffers/{index}", stage=stage.index) for index in range(len(stage.counts))]
            mean |= mean_buffers(replicas, stage.counts)
        return mean


def open_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder, read_manifest(folder))


def list_folders(run: Path) -> list[Path]:
    """The folders of a run's checkpoints, the oldest first; some may be damaged."""
    root = checkpoints_folder(run)
    folders = [path for path in root.iterdir() if path.name.isdecimal()] if root.is_dir() else []
    return sorted(folders, key=lambda path: int(path.name))


def newest_intact(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with those after it."""
    reasons: list[str] = []
    for folder in reversed(list_folders(run)):
        try:
            checkpoint = open_checkpoint(folder)
            checkpoint.verify()
            return checkpoint, reasons
        except CheckpointError as error:
            reasons.append(str(error))
    return None, reasons


def remove(folder: Path) -> None:
    """Delete a checkpoint; from the first moment on it is none any more."""
    doomed = folder if folder.name.endswith(_PARTIAL) else folder.with_name(folder.name + _PARTIAL)
    if doomed != folder:
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clear(run: Path) -> None:
    """Delete what interrupted writes have left."""
    for path in checkpoints_folder(run).glob(f"*{_PARTIAL}"):
        remove(path)
