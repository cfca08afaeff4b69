"""Processes that were started early become ranks, and are never left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from stagewright.runtime.process.children import SpareRanks
from stagewright.runtime.process.launch import launch
from stagewright.runtime.status_file import read_process, status_path
from tests.parity import Case, make_job
from tests.waiting import wait_until


def test_spare_processes_become_the_ranks_of_a_job(tmp_path: Path) -> None:
    job = make_job(Case("plain", "0:0.0:1", "third", steps=2), tmp_path)
    with SpareRanks(3) as spare:
        waiting = spare.processes()
        launch(job, spare=spare)
        ran = [read_process(status_path(Path(job.folder), rank))[0] for rank in range(2)]
        assert ran == waiting[:2] and spare.processes() == waiting[2:]
    assert not any(map(psutil.pid_exists, waiting))


def test_a_dead_spare_process_becomes_no_rank(tmp_path: Path) -> None:
    with SpareRanks(1) as spare:
        (process,) = spare.processes()
        os.kill(process, signal.SIGKILL)
        wait_until(lambda: psutil.Process(process).status() == psutil.STATUS_ZOMBIE)
        assert spare.become(tmp_path / "job.json", {}, None, tmp_path / "out", tmp_path / "err") is None
