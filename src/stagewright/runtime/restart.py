"""Where a start or a restart may begin."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.runtime.job import Job


class Restart:
    """Decides before every start where ranks begin; this one knows no other place than the beginning."""

    def batches(self) -> Sequence[int]:
        """The batch numbers that this machine could begin with; all machines begin with the largest they share."""
        return (0,)

    def job(self, job: Job, batch: int) -> Job:
        """The job that ranks read when they begin with a batch."""
        return job
