"""Checkpoints on the disk: finds, verifies, reads and deletes the folders `checkpoints/<batch>/` of a run.

Ranks write to `<batch>.partial`; the supervisor renames that folder once it is complete."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from stagewright.errors import UserError, first_line
from stagewright.events import File
from stagewright.runtime.checkpoint.format import (
    MASTER,
    CheckpointError,
    CheckpointGone,
    Manifest,
    hash_file,
    read_manifest,
)
from stagewright.runtime.stage.batch_norm import mean_buffers

_PARTIAL = ".partial"


def checkpoints_folder(run: Path) -> Path:
    return run / "checkpoints"


def partial_folder(run: Path, batch: int) -> Path:
    """Where ranks write a checkpoint."""
    return checkpoints_folder(run) / f"{batch}{_PARTIAL}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with a readable manifest; `verify` checks the other files."""

    folder: Path
    manifest: Manifest

    @property
    def batch(self) -> int:
        return self.manifest.batch

    def verify(self) -> None:
        """Raise CheckpointError unless every file exists with its size and hash; CheckpointGone if it was deleted."""
        for file in self.manifest.files:
            if damage := self._damage(file):
                if not self.folder.exists():
                    raise CheckpointGone(self.folder)
                raise self._damaged(f"{file.name} {damage}")

    def _damage(self, file: File) -> str | None:
        path = self.folder / file.name
        try:
            if not path.is_file():
                return "is missing"
            if (size := path.stat().st_size) != file.bytes:
                return f"has {size} bytes instead of {file.bytes}"
            return None if hash_file(path) == file.blake2b else "does not match its hash"
        except OSError as error:
            return f"can't be read: {error.strerror}"

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.folder} is damaged: {reason}")

    def has(self, kind: str) -> bool:
        return any(file.kind == kind for file in self.manifest.files)

    def read(self, kind: str, names: Collection[str] | None = None, stage: int | None = None) -> dict[str, Tensor]:
        """The tensors of one kind by name; of one stage if given, and only these names if given."""
        found: dict[str, Tensor] = {}
        for file in self.manifest.files:
            if file.kind != kind or (stage is not None and file.stage != stage):
                continue
            with self._open(file) as tensors:
                wanted = [name for name in tensors.keys() if names is None or name in names]  # noqa: SIM118
                found |= {name: tensors.get_tensor(name) for name in wanted}
        return found

    @contextmanager
    def _open(self, file: File) -> Iterator[Any]:
        """The tensors of a file; a file with the right hash may still be forged."""
        try:
            with safe_open(self.folder / file.name, "pt") as tensors:
                yield tensors
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise self._damaged(f"{file.name}: {first_line(error)}") from error

    def shapes(self) -> dict[str, list[int]]:
        """The shape of every parameter by name."""
        found: dict[str, list[int]] = {}
        for file in self.manifest.files:
            if file.kind == MASTER:
                with self._open(file) as tensors:
                    found |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        return found

    def mean_buffers(self) -> dict[str, Tensor]:
        """The buffers of all stages: statistics averaged over replicas, weighted by microbatches; counts summed."""
        mean: dict[str, Tensor] = {}
        for stage in self.manifest.stages:
            replicas = [self.read(f"buffers/{index}", stage=stage.index) for index in range(len(stage.counts))]
            shapes = [{name: buffer.shape for name, buffer in buffers.items()} for buffers in replicas]
            if shapes != shapes[:1] * len(shapes):
                raise self._damaged(f"the replicas of stage {stage.index} have different buffers")
            mean |= mean_buffers(replicas, stage.counts)
        return mean


def open_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder, read_manifest(folder))


def list_folders(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first; some may be damaged."""
    root = checkpoints_folder(run)
    folders = [path for path in root.iterdir() if path.name.isdecimal()] if root.is_dir() else []
    return sorted(folders, key=lambda path: int(path.name))


def newest_intact(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is not damaged, and what is wrong with the newer ones."""
    reasons: list[str] = []
    for folder in reversed(list_folders(run)):
        try:
            checkpoint = open_checkpoint(folder)
            checkpoint.verify()
            return checkpoint, reasons
        except CheckpointGone:
            continue
        except CheckpointError as error:
            reasons.append(str(error))
    return None, reasons


def best_folder(folders: Sequence[Path]) -> Path | None:
    """The folder of the best checkpoint, of those of a run, oldest first: the newest that was the best when saved."""
    for folder in reversed(folders):
        with suppress(CheckpointError):
            if read_manifest(folder).is_best:
                return folder
    return None


def find_best(run: Path) -> Path:
    """The best checkpoint of a run; UserError where it has none."""
    if (found := best_folder(list_folders(run))) is None:
        raise UserError(f"{run}: the run has no best checkpoint; train with --best, or name one of its checkpoints")
    return found


def remove(folder: Path) -> None:
    """Delete a checkpoint; renamed first, so an interrupted delete never looks like a checkpoint."""
    doomed = folder if folder.name.endswith(_PARTIAL) else folder.with_name(folder.name + _PARTIAL)
    if doomed != folder:
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clear(run: Path) -> None:
    """Delete what interrupted writes and deletes left behind."""
    for path in checkpoints_folder(run).glob(f"*{_PARTIAL}"):
        remove(path)
