"""The supervisor's side of checkpoints: turns the ranks' shares into one, or removes them, and deletes the oldest.

Beside the newest (`--keep`) the best one stays (`--best`): each manifest tells whether its own was the best so far."""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stagewright.config.toml import as_tables
from stagewright.data.order import Position
from stagewright.events import ReplicaState, Saved, ShareSaved, Unsaved
from stagewright.runtime.checkpoint.folder import (
    best_folder,
    checkpoints_folder,
    list_folders,
    partial_folder,
    remove,
)
from stagewright.runtime.checkpoint.format import FORMAT, MANIFEST, Manifest, StageState, sync_folder
from stagewright.runtime.job import Job

_Shares = Mapping[int, ShareSaved]  # by rank


class Committer:
    """Collects the ranks' reports on their shares; a thread commits each checkpoint whose shares are all on the disk.

    A checkpoint exists from the moment its folder is renamed, with a manifest in it and everything synced. Ranks wait
    for `settled` before they begin one more than two (`save.MOST_OUTSTANDING`).
    """

    def __init__(self, job: Job, report: Callable[[Saved | Unsaved], None]) -> None:
        self.settled = 0  # batch of the newest checkpoint that is committed or given up
        self._job = job
        self._report = report
        self._shares: dict[int, dict[int, ShareSaved]] = {}  # by batch and rank
        self._whole: queue.SimpleQueue[tuple[int, _Shares] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = self._start()

    def add(self, share: ShareSaved) -> None:
        """Take one rank's report."""
        shares = self._shares.setdefault(share.batch, {})
        shares[share.rank] = share
        if len(shares) == self._job.plan.world:
            self._whole.put((share.batch, self._shares.pop(share.batch)))

    def drain(self) -> None:
        """Commit every checkpoint that is whole; raises what the thread raised."""
        self.close()
        self._thread = self._start()

    def discard(self) -> None:
        """Forget checkpoints that are not whole: the ranks that wrote them have ended."""
        self._shares.clear()
        self.settled = 0

    def close(self) -> None:
        """Commit every checkpoint that is whole, then end the thread; raises what it raised."""
        self._whole.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        while (whole := self._whole.get()) is not None:
            try:
                self._settle(*whole)
            except Exception as error:
                self._error = error
            finally:
                self.settled = whole[0]

    def _settle(self, batch: int, shares: _Shares) -> None:
        """Commit a checkpoint, or remove what there is of it and report why."""
        folder = partial_folder(Path(self._job.folder), batch)
        reason = next((share.error for share in shares.values() if share.error is not None), None)
        if reason is None:
            try:
                self._report(self._commit(folder, batch, shares))
                return
            except OSError as error:
                reason = error.strerror or str(error)
        shutil.rmtree(folder, ignore_errors=True)
        self._report(Unsaved(batch, reason))

    def _commit(self, folder: Path, batch: int, shares: _Shares) -> Saved:
        """Write the manifest, rename the folder, and delete the oldest checkpoints."""
        manifest = _manifest(self._job, batch, shares)
        if missing := [file.name for file in manifest.files if not (folder / file.name).is_file()]:
            raise OSError(0, f"{missing[0]} is missing; the machines of a run need a shared run folder")
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
        old = final.with_name(f"{final.name}.old.partial")
        if final.exists():  # a checkpoint of the same batch
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        folder.rename(final)
        shutil.rmtree(old, ignore_errors=True)
        sync_folder(final.parent)
        options = self._job.config.checkpoint
        saved = [path for path in list_folders(Path(self._job.folder)) if int(path.name) <= batch]
        best = best_folder(saved) if options.best else None  # a new best is whole before the old one is deleted
        for path in saved[: -options.keep] if options.keep else ():
            if path != best:
                remove(path)
        slowest = max(shares.values(), key=lambda share: share.seconds)
        shown = manifest.best if manifest.is_best else None
        return Saved(batch, manifest.bytes, slowest.seconds, slowest.waited, shown)


def _manifest(job: Job, batch: int, shares: _Shares) -> Manifest:
    replicas = [state for share in shares.values() for state in share.replicas]
    files = [file for share in shares.values() for file in share.files]
    return Manifest(
        FORMAT,
        batch,
        job.plan,
        Position.at(job.order, batch, job.fingerprint),
        as_tables(job.config),
        tuple(_stage_state(index, replicas) for index in range(len(job.plan.stages))),
        tuple(sorted(files, key=lambda file: file.name)),
        next(iter(shares.values())).best,
    )


def _stage_state(index: int, replicas: Sequence[ReplicaState]) -> StageState:
    own = sorted((state for state in replicas if state.stage == index), key=lambda state: state.replica)
    return StageState(index, tuple(state.count for state in own), own[0].optimizer, own[0].extra)


def set_aside_after(run: Path, batch: int) -> None:
    """Rename the checkpoints after `batch`, which are damaged if a run resumes before them: it needs their names."""
    for folder in list_folders(run):
        if int(folder.name) > batch:
            aside = checkpoints_folder(run) / f"damaged-{folder.name}"
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
