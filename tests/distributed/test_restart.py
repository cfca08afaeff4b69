"""The supervisor restarts ranks after faults, and the result is the same."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from stagewright.events import BatchLosses, Event, Restarted
from stagewright.runtime.job import Job
from stagewright.runtime.process.launch import launch
from stagewright.runtime.process.log import EventHandler
from stagewright.runtime.process.rank import state_file
from tests.distributed.test_command import ranks_of
from tests.parity import Case, assert_same_bits, emulate, make_job
from tests.parity import Run as Trained

CASE = Case("dropping", "0:0-1.0:2", "third", mode="stale", staleness=1, steps=200)


class Saboteur(EventHandler):
    """Sends one signal to one rank per start, as soon as that start trains."""

    def __init__(self, folder: Path, *signals: tuple[int, signal.Signals]) -> None:
        self.events: list[Event] = []
        self._folder = folder
        self._signals = list(signals)
        self._has_sent = False

    def handle(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Restarted):
            self._has_sent = False
        if isinstance(event, BatchLosses) and self._signals and not self._has_sent:
            self._has_sent = True
            rank, number = self._signals.pop(0)
            os.kill(ranks_of(self._folder)[rank], number)

    @property
    def restarts(self) -> list[Restarted]:
        return [event for event in self.events if isinstance(event, Restarted)]

    def trained(self, job: Job) -> Trained:
        """The result of the last start."""
        first = self.events.index(self.restarts[-1]) + 1 if self.restarts else 0
        weights: dict[str, Any] = {}
        for stage in job.plan.stages:
            weights |= load_file(state_file(Path(job.folder), stage.index))
        return Trained(job, self.events[first:], weights)


def job_with(folder: Path, **run: Any) -> Job:
    job = make_job(CASE, folder, export="here.safetensors")
    return replace(job, config=replace(job.config, run=replace(job.config.run, **run)))


def test_restarts_after_killed_and_stopped_ranks_give_the_same_bits(tmp_path: Path) -> None:
    job = job_with(tmp_path, max_restarts=2)
    saboteur = Saboteur(tmp_path, (1, signal.SIGKILL), (2, signal.SIGSTOP))
    launch(job, saboteur)
    killed, stopped = saboteur.restarts
    assert killed.batch == 0
    assert "stage 0 replica 1 (rank 1, machine 0) was killed by SIGKILL at 0" in killed.cause
    assert "stage 1 replica 0 (rank 2, machine 0) hangs at 1" in stopped.cause and "stopped" in stopped.cause
    log = (Path(job.folder) / "log.txt").read_text()
    assert killed.cause in log and stopped.cause in log
    assert ranks_of(tmp_path) == []
    assert_same_bits(emulate(CASE, tmp_path), saboteur.trained(job))
