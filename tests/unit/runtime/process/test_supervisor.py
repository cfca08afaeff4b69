"""Machine 0 decides before every start: start, restart, wait for a machine, or fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from stagewright.runtime.faults import RankExit
from stagewright.runtime.job import Job
from stagewright.runtime.multinode.meeting import MachineReport, Meeting, MeetingConfig, StartDecision
from stagewright.runtime.multinode.nodes import Node, Site
from stagewright.runtime.process.rank import KEYS
from stagewright.runtime.process.supervisor import StartPoint, Supervisor
from stagewright.runtime.status_file import status_path
from tests.parity import Case, make_job

NODES = (Node(0, "10.0.0.1"), Node(1, "10.0.0.2"))
KILLED = MachineReport({}, (0, 8), exits=(RankExit(1, -9, "0F3@2", 0),))
WELL = MachineReport({}, (0, 8))
CAUSE = "stage 0 replica 1 (rank 1, machine 0) was killed by SIGKILL at "


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(Case("plain", "0:0-1.0:2", "third"), tmp_path, max_restarts=2)


def supervisor(job: Job, start: int, **run: Any) -> Supervisor:
    """The supervisor of machine 0 of two, before a start."""
    job = replace(job, config=replace(job.config, run=replace(job.config.run, **run)))
    meeting = Meeting(MeetingConfig(1, "keys", Path(job.folder), site=Site(NODES, 0, "10.0.0.1", "token")), start=start)
    return Supervisor(job, lambda event: None, StartPoint(), meeting)


def decided(decision: StartDecision | None) -> StartDecision:
    assert decision is not None
    return decision


def test_the_first_start_waits_for_all_and_uses_the_newest_checkpoint(job: Job) -> None:
    first = supervisor(job, 1)
    assert first.decide({0: WELL}, 100.0) is None
    assert first.decide({0: WELL, 1: WELL}, 0.0) == StartDecision(8)


def test_restarts_after_a_fault_and_names_its_cause(job: Job) -> None:
    second = supervisor(job, 2)
    assert second.decide({0: WELL}, 1.0) is None  # machine 1 may know more
    decision = second.decide({0: WELL, 1: KILLED}, 1.0)
    assert decision == StartDecision(8, 1, f"{CAUSE}0F3@2")
    assert f"{CAUSE}0F3@2" in (Path(job.folder) / "log.txt").read_text()


def test_fails_after_max_restarts(job: Job) -> None:
    decision = supervisor(job, 2, max_restarts=0).decide({0: KILLED, 1: WELL}, 0.0)
    assert decision is not None and decision.failed is not None and "was killed by SIGKILL" in decision.failed


def test_fails_when_the_same_fault_happens_again(job: Job) -> None:
    again = supervisor(job, 2)
    again.accept(decided(again.decide({0: KILLED, 1: WELL}, 0.0)))
    failed = decided(again.decide({0: KILLED, 1: WELL}, 0.0)).failed
    assert failed is not None and failed.endswith("again after 1 restart")


def test_restarts_after_another_fault(job: Job) -> None:
    again = supervisor(job, 2)
    again.accept(decided(again.decide({0: KILLED, 1: WELL}, 0.0)))
    other = replace(KILLED, exits=(RankExit(1, -9, "0F99@2", 0),))
    assert decided(again.decide({0: other, 1: WELL}, 0.0)) == StartDecision(8, 2, f"{CAUSE}0F99@2")


def test_names_a_lost_machine_at_once_without_restarts(job: Job) -> None:
    lost = replace(WELL, lost=(1,))
    decision = supervisor(job, 2, max_restarts=0).decide({0: lost}, 0.0)
    assert decision is not None and decision.failed is not None
    assert decision.failed.startswith("lost machine 1 (10.0.0.2): no sign of it for 60 s")
    waiting = supervisor(job, 2)
    assert waiting.decide({0: lost}, 100.0) is None
    back = waiting.decide({0: lost, 1: WELL}, 200.0)
    assert back is not None and back.restart == 1 and "lost machine 1" in str(back.cause)


def test_names_a_machine_that_does_not_report(job: Job) -> None:
    decision = supervisor(job, 2, max_restarts=0).decide({0: WELL}, 9.0)
    assert decision is not None and decision.failed == "lost machine 1 (10.0.0.2): it did not report what happened"


def test_fails_before_the_first_start_when_options_differ(job: Job) -> None:
    decision = supervisor(job, 1).decide({0: replace(WELL, values={"run.seed": 1}), 1: WELL}, 0.0)
    assert decision is not None and decision.failed is not None
    assert decision.failed.startswith("machine 1 (10.0.0.2) has run.seed = nothing but machine 0 has 1")


def test_starts_from_the_beginning_where_a_machine_can_not_see_the_checkpoints(job: Job) -> None:
    blind = replace(WELL, sees_checkpoints=False)
    assert supervisor(job, 1).decide({0: WELL, 1: blind}, 0.0) == StartDecision(0)
    keeping = replace(job, config=replace(job.config, checkpoint=replace(job.config.checkpoint, every=4)))
    decision = supervisor(keeping, 1).decide({0: WELL, 1: blind}, 0.0)
    assert decision is not None and decision.failed is not None and "machine 1 (10.0.0.2) can't see" in decision.failed


def test_a_start_removes_old_status_files_and_uses_new_keys(job: Job) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = Meeting(MeetingConfig(store.port, "keys", Path(job.folder)))
    alone = Supervisor(job, lambda event: None, StartPoint(), meeting)
    (Path(job.folder) / "ranks").mkdir()
    status_path(Path(job.folder), 2).write_bytes(b"the previous start")
    alone.begin()
    alone.close()
    assert not status_path(Path(job.folder), 2).exists() and (Path(job.folder) / "job.json").exists()
    assert alone.environment()[KEYS] == "keys/1"
    alone.begin()
    alone.close()
    assert alone.environment()[KEYS] == "keys/2"
