"""Where a start or a restart may begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stagewright.runtime.checkpoint import checkpoints_folder, newest_whole
from stagewright.runtime.job import Job


class Restart:
    """Decides before every start where ranks begin; this one knows no other place than the beginning."""

    def batches(self) -> Sequence[int]:
        """The batch numbers to begin with: the run's own first, and better ones; machine 0's count."""
        return (0,)

    def job(self, job: Job, batch: int) -> Job:
        """The job that ranks read when they begin with a batch."""
        return job


class FromCheckpoint(Restart):
    """Begins with the newest whole checkpoint of a run, or where the run itself began."""

    def __init__(self, job: Job) -> None:
        self._start = job.start
        self._folder = Path(job.folder)
        self._starts = 0

    def batches(self) -> Sequence[int]:
        newest, _ = newest_whole(self._folder) if self._starts else (None, [])
        self._starts += 1
        return (self._start,) if newest is None else (self._start, newest.batch)

    def job(self, job: Job, batch: int) -> Job:
        if batch == job.start:
            return job
        return replace(job, start=batch, resume=str(checkpoints_folder(self._folder) / str(batch)))
