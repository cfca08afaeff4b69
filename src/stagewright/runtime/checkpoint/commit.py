"""The supervisor's side of checkpoints: makes one of what the ranks have written, or cleans up; keeps the newest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stagewright.config.toml import as_tables
from stagewright.data.order import Position
from stagewright.events import Saved, Unsaved
from stagewright.runtime.checkpoint.folder import checkpoints_folder, list_folders, partial_folder, remove
from stagewright.runtime.checkpoint.format import FORMAT, MANIFEST, File, Manifest, StageState, sync_folder
from stagewright.runtime.job import Job

_Events = Mapping[int, Mapping[str, Any]]


class Committer:
    """Hears which shares of a checkpoint are on the disk; the manifest comes when all are."""

    def __init__(self, job: Job, tell: Callable[[Saved | Unsaved], None]) -> None:
        self._job = job
        self._tell = tell
        self._shares: dict[int, dict[int, Mapping[str, Any]]] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        """Take one rank's word on its share."""
        batch = int(event["batch"])
        shares = self._shares.setdefault(batch, {})
        shares[int(event["rank"])] = event
        if len(shares) < self._job.plan.world:
            return
        del self._shares[batch]
        folder = partial_folder(Path(self._job.folder), batch)
        reason = next((share["error"] for share in shares.values() if "error" in share), None)
        if reason is None:
            try:
                self._tell(self._complete(folder, batch, shares))
                return
            except OSError as error:
                reason = error.strerror or str(error)
        shutil.rmtree(folder, ignore_errors=True)
        self._tell(Unsaved(batch, str(reason)))

    def discard(self) -> None:
        """The ranks have ended; what they had not finished will not be."""
        self._shares.clear()

    def _complete(self, folder: Path, batch: int, shares: _Events) -> Saved:
        """Add the manifest, give the folder its name, and delete what is too old."""
        manifest = _manifest(self._job, batch, shares)
        if missing := [file.name for file in manifest.files if not (folder / file.name).is_file()]:
            raise OSError(0, f"{missing[0]} is not here; the machines of a run need a run folder that they share")
        known = {file.name for file in manifest.files}
        for path in folder.iterdir():
            if path.name not in known:
                path.unlink()
        with (folder / MANIFEST).open("wb") as file:
            file.write(manifest.as_json().encode())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)
        final = folder.with_name(str(batch))
        if final.exists():
            _replace(folder, final)
        else:
            folder.rename(final)
        sync_folder(final.parent)
        self._prune(batch)
        return Saved(batch, manifest.bytes, max(share["seconds"] for share in shares.values()))

    def _prune(self, batch: int) -> None:
        keep = self._job.config.checkpoint.keep
        older = [folder for folder in list_folders(Path(self._job.folder)) if int(folder.name) <= batch]
        for folder in older[:-keep] if keep else ():
            remove(folder)


def _replace(folder: Path, final: Path) -> None:
    """Put a checkpoint where another one of the same batch is."""
    old = final.with_name(f"{final.name}.old.partial")
    shutil.rmtree(old, ignore_errors=True)
    final.rename(old)
    folder.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def _manifest(job: Job, batch: int, shares: _Events) -> Manifest:
    stages = [about for share in shares.values() for about in share["stages"]]
    files = [File(**file) for share in shares.values() for file in share["files"]]
    return Manifest(
        FORMAT,
        batch,
        job.plan,
        Position.at(job.order, batch, job.fingerprint),
        as_tables(job.config),
        tuple(_stage_state(index, stages) for index in range(len(job.plan.stages))),
        tuple(sorted(files, key=lambda file: file.name)),
    )


def _stage_state(index: int, stages: list[dict[str, Any]]) -> StageState:
    replicas = sorted((about for about in stages if about["stage"] == index), key=lambda about: int(about["replica"]))
    first = replicas[0]
    return StageState(index, tuple(about["count"] for about in replicas), first["optimizer"], first["extra"])


def set_aside_after(run: Path, batch: int) -> None:
    """Put aside what is damaged after a batch that a run goes on from: its place will be needed."""
    for folder in list_folders(run):
        if int(folder.name) > batch:
            aside = checkpoints_folder(run) / f"damaged-{folder.name}"
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
