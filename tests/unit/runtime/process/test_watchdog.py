"""Which ranks the watchdog calls hung, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.runtime.faults import HungRank
from stagewright.runtime.process.watchdog import Limits, Watchdog
from stagewright.runtime.stage.recorder import FlightRecorder
from stagewright.runtime.status_file import RankState, read_status, status_path
from stagewright.schedule.action import Action, Op

LIMITS = Limits(timeout=20.0, start=100.0)
UPDATE = Action(Op.UPDATE, 0, 0, None, 0, None)


class Scene:
    """Two ranks with status files, a clock, and a set of stopped processes."""

    def __init__(self, folder: Path) -> None:
        (folder / "ranks").mkdir()
        self.now = 0.0
        self.stopped: set[int] = set()
        self.recorders = [FlightRecorder(status_path(folder, rank)) for rank in range(2)]
        self.watchdog = Watchdog(folder, LIMITS, lambda pid: pid in self.stopped, lambda: self.now)

    def update(self) -> None:
        for recorder in self.recorders:
            self.work(recorder, UPDATE)
            recorder.end(UPDATE)

    def work(self, recorder: FlightRecorder, action: Action) -> None:
        recorder.begin(action)
        recorder.ready(action)

    def pass_time(self, seconds: float, tick: float = 0.5) -> HungRank | None:
        """The first hung rank within so many seconds; the watchdog looks once per tick."""
        end = self.now + seconds
        while self.now < end:
            self.now += tick
            hung = self.watchdog.find_hung({0: 1000, 1: 1001})
            if hung is not None:
                return hung
        return None


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def forward(rank: int, microbatch: int) -> Action:
    return Action(Op.FORWARD, rank, 0, microbatch, 0, None)


def test_names_a_stopped_process_and_its_action(scene: Scene) -> None:
    scene.update()
    scene.work(scene.recorders[1], forward(1, 7))
    assert scene.pass_time(5) is None
    scene.stopped = {1001}
    hung = scene.pass_time(15)
    assert hung is not None and hung.rank == 1 and hung.action == "0F7@0" and hung.stage == 0
    assert "stopped for 10 s" in hung.cause


def test_allows_short_stops(scene: Scene) -> None:
    for _ in range(5):
        scene.stopped = {1000}
        assert scene.pass_time(8) is None
        scene.stopped = set()
        assert scene.pass_time(1) is None


def test_names_a_rank_that_works_before_one_that_waits(scene: Scene) -> None:
    scene.update()
    scene.recorders[0].begin(Action(Op.RECV_GRAD, 0, 0, 3, None, 1))
    scene.pass_time(4)
    scene.work(scene.recorders[1], forward(1, 3))
    hung = scene.pass_time(60)
    assert hung is not None and hung.rank == 1 and "--timeout" in hung.cause


def test_names_the_longest_waiting_rank_where_all_wait(scene: Scene) -> None:
    scene.update()
    scene.recorders[1].begin(Action(Op.RECV_ACT, 1, 0, 3, None, 0))
    scene.pass_time(2)
    scene.recorders[0].begin(Action(Op.RECV_GRAD, 0, 0, 3, None, 1))
    assert scene.pass_time(25) is None  # longer than --timeout: another rank may be working
    hung = scene.pass_time(20)
    assert hung is not None and hung.rank == 1 and "waited for 30 s" in hung.cause


def test_the_start_has_its_own_limit(scene: Scene) -> None:
    assert scene.pass_time(60) is None
    scene.recorders[0].begin(Action(Op.RECV_ACT, 0, 0, 0, None, 1))
    scene.work(scene.recorders[1], forward(1, 0))  # compiles
    assert scene.pass_time(99) is None
    hung = scene.pass_time(5)
    assert hung is not None and hung.rank == 1 and "--start-timeout" in hung.cause


def test_a_new_action_is_progress(scene: Scene) -> None:
    scene.update()
    for microbatch in range(30):  # a long evaluation: forwards that begin and never report more
        for rank, recorder in enumerate(scene.recorders):
            recorder.begin(forward(rank, microbatch))
        assert scene.pass_time(19) is None


def test_repeating_an_action_is_progress(scene: Scene) -> None:
    scene.update()
    for _ in range(5):  # evaluations count from 0 each time
        for rank, recorder in enumerate(scene.recorders):
            recorder.begin(forward(rank, 0))
        assert scene.pass_time(19) is None


def test_saving_has_the_limit_of_the_start(scene: Scene) -> None:
    scene.update()
    for recorder in scene.recorders:
        recorder.save()
    assert scene.pass_time(99) is None
    assert scene.pass_time(5) is not None


def test_time_in_which_the_watchdog_was_suspended_does_not_count(scene: Scene) -> None:
    scene.update()
    assert scene.pass_time(5000, tick=1000) is None


def test_a_damaged_status_file_names_no_action(tmp_path: Path) -> None:
    path = tmp_path / "0.at"
    for content in (b"", b"\xff" * 50, b"\x63" + bytes(49)):
        path.write_bytes(content)
        assert read_status(path, 0).action is None
    recorder = FlightRecorder(path)
    recorder.begin(UPDATE)
    assert (
        read_status(path, 0).action == UPDATE
        and read_status(path, 0).state is RankState.WAITING
        and not read_status(path, 0).has_updated
    )
    recorder.end(UPDATE)
    assert read_status(path, 0).has_updated
