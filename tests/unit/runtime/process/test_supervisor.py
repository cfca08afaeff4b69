"""The supervisor acts on decisions: the fault goes into the log, a start has its own keys and no old files."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed import TCPStore

from stagewright.errors import RunFailed
from stagewright.events import Event, Restarted
from stagewright.runtime.checkpoint.folder import checkpoints_folder
from stagewright.runtime.faults import RankExit
from stagewright.runtime.job import Job
from stagewright.runtime.multinode.meeting import MachineReport, Meeting, MeetingConfig
from stagewright.runtime.process import supervisor as supervisor_module
from stagewright.runtime.process.log import EventHandler
from stagewright.runtime.process.rank import KEYS
from stagewright.runtime.process.supervisor import StartPoint, Supervisor
from stagewright.runtime.status_file import status_path
from stagewright.voice import Voice
from tests.parity import Case, make_job

KILLED = MachineReport(exits=(RankExit(1, -9, "0F3@2", 0),))
CAUSE = "stage 0 replica 1 (rank 1, machine 0) was killed by SIGKILL at 0F3@2"
RAISED = MachineReport(exits=(RankExit(1, 1, "0F3@2", 0),))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(Case("plain", "0:0-1.0:2", "third"), tmp_path, max_restarts=2)


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def said() -> list[str]:
    """What the supervisor has said on the screen."""
    return []


@pytest.fixture
def supervisor(job: Job, events: list[Event], said: list[str]) -> Iterator[Supervisor]:
    """The only machine's supervisor; `begin` starts no rank."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    handler = EventHandler()
    handler.handle = events.append  # type: ignore[method-assign]
    meeting = Meeting(MeetingConfig(store.port, "keys", Path(job.folder)), Voice(note=said.append))
    alone = Supervisor(job, handler, meeting)
    (Path(job.folder) / "ranks").mkdir()
    yield alone
    alone.close()


def test_a_start_removes_old_status_files_and_uses_new_keys(supervisor: Supervisor, job: Job) -> None:
    status_path(Path(job.folder), 2).write_bytes(b"the previous start")
    supervisor.begin(MachineReport())
    assert not status_path(Path(job.folder), 2).exists() and (Path(job.folder) / "job.json").exists()
    assert supervisor.environment(0)[KEYS] == "keys/1"
    supervisor.begin(KILLED)
    assert supervisor.environment(0)[KEYS] == "keys/2"


def test_ranks_start_where_machine_0_decides_whatever_this_machine_was_told(job: Job) -> None:
    resumed = replace(job, start=8, resume="runs/a/checkpoints/8")
    for told in (job, resumed):
        point = StartPoint(told)
        assert point.job(told, 0) == replace(told, start=0, resume=None)
        later = point.job(told, 12)
        assert later.start == 12 and later.resume == str(checkpoints_folder(Path(job.folder)) / "12")
    assert StartPoint(resumed).job(resumed, 8) == resumed


def test_ranks_get_their_place_from_the_usual_environment(supervisor: Supervisor) -> None:
    usual = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    assert usual.items() <= supervisor.environment(2).items()


def test_a_restart_is_counted_and_the_same_exception_again_is_final(
    supervisor: Supervisor, job: Job, events: list[Event]
) -> None:
    supervisor.begin(MachineReport())
    supervisor.begin(RAISED)
    (restarted,) = events
    assert isinstance(restarted, Restarted) and "exited with code 1 at 0F3@2" in restarted.cause
    with pytest.raises(RunFailed, match="again after 1 restart"):
        supervisor.begin(RAISED)
    assert (Path(job.folder) / "log.txt").read_text().splitlines() == [restarted.cause] * 2


def test_the_same_signal_again_restarts_until_no_restart_is_left(supervisor: Supervisor, events: list[Event]) -> None:
    supervisor.begin(MachineReport())
    for _ in range(2):
        supervisor.begin(KILLED)
    assert events == [Restarted(0, CAUSE)] * 2
    with pytest.raises(RunFailed, match=r"was killed by SIGKILL at 0F3@2$"):
        supervisor.begin(KILLED)


def test_another_fault_restarts_until_no_restart_is_left(supervisor: Supervisor) -> None:
    supervisor.begin(MachineReport())
    for batch in range(2):
        supervisor.begin(MachineReport(exits=(RankExit(1, -9, f"0F{batch}@2", 0),)))
    with pytest.raises(RunFailed, match=r"was killed by SIGKILL at 0F9@2 \(the first fault: .* at 0F0@2\)$"):
        supervisor.begin(MachineReport(exits=(RankExit(1, -9, "0F9@2", 0),)))


def test_a_run_that_was_asked_to_stop_does_not_restart(supervisor: Supervisor) -> None:
    supervisor.begin(MachineReport())
    supervisor.stop()
    with pytest.raises(RunFailed, match="was killed by SIGKILL"):
        supervisor.begin(KILLED)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_restart_waits_for_room_on_the_disk(
    supervisor: Supervisor, job: Job, events: list[Event], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor.begin(MachineReport())
    tries: list[object] = []

    def room(folder: Path) -> None:
        tries.append(folder)
        if len(tries) < 3:
            full_disk()

    monkeypatch.setattr("stagewright.runtime.process.supervisor.require_room", room)
    monkeypatch.setattr("stagewright.runtime.process.supervisor.log_fault", lambda *_: len(tries) == 3)
    supervisor.begin(KILLED)
    waits, restarts = said
    assert waits.startswith(CAUSE) and "No space left on device" in waits and "waits" in waits
    assert restarts.startswith(CAUSE) and "restart 1" in restarts and events == [Restarted(0, CAUSE)]


def test_a_run_stopped_while_it_waits_for_room_names_the_fault(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor.begin(MachineReport())

    def stopped(folder: Path) -> None:
        supervisor.is_stopping = True
        full_disk()

    monkeypatch.setattr("stagewright.runtime.process.supervisor.require_room", stopped)
    with pytest.raises(RunFailed, match=r"was killed by SIGKILL at 0F3@2; the disk of .* is full"):
        supervisor.begin(KILLED)


def test_faults_that_the_log_had_no_room_for_are_logged_later(
    supervisor: Supervisor, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor.begin(MachineReport())
    log = Path(job.folder) / "log.txt"
    log.symlink_to("/dev/full")
    supervisor.begin(KILLED)
    log.unlink()
    supervisor.begin(KILLED)
    assert log.read_text().splitlines() == [CAUSE, CAUSE]


def test_only_a_restart_starts_from_a_checkpoint_that_the_run_has_made(job: Job) -> None:
    """The first start is where the run itself starts, whatever the folder of an earlier part of it holds."""
    resumed = replace(job, start=2, resume="run/checkpoints/2")
    point = StartPoint(resumed)
    with mock.patch.object(supervisor_module, "newest_intact", return_value=(mock.Mock(batch=6), [])):
        assert [point.batches() for _ in range(3)] == [(2,), (2, 6), (2, 6)]
    with mock.patch.object(supervisor_module, "newest_intact", return_value=(None, ["damaged"])):
        assert point.batches() == (2,)
    assert point.job(resumed, 2) is resumed
    assert (restarted := point.job(resumed, 6)).start == 6 and restarted.resume == f"{job.folder}/checkpoints/6"
