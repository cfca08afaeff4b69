"""Stagewright's side: the worker that `stagewright train` runs, over the same channels, span after span."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from stagewright.bench.peers import open_store
from stagewright.runtime.assemble import assemble
from stagewright.runtime.job import Job
from stagewright.runtime.network import GlooNetwork
from stagewright.runtime.place import Place
from stagewright.runtime.rank import position_file
from stagewright.runtime.recorder import FlightRecorder
from stagewright.runtime.worker import Emit


class Stagewright:
    """One rank of a job, trained in segments."""

    def __init__(self, job: Job, rank: int, meeting: Path, emit: Emit) -> None:
        self.loss: float | None = None  # of the last batch, on ranks of the last stage
        self._emit = emit
        self._plan = job.plan
        position = position_file(meeting, rank)
        position.parent.mkdir(exist_ok=True)
        network = GlooNetwork(open_store(meeting, job.plan.world), rank, Place(), job.config.run.timeout)
        self._worker = assemble(job, rank, network, self._hear, FlightRecorder(position))

    def train(self, first: int, steps: int) -> None:
        """Train some batches, from empty pipeline to empty pipeline."""
        span = range(self._plan.boundary(first), self._plan.boundary(first + steps))
        for pending in self._worker.train(span):
            pending.wait()

    def _hear(self, event: dict[str, Any]) -> None:
        self.loss = fmean(loss for _, loss in event["losses"])
        self._emit(event)
