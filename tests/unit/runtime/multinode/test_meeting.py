"""Supervisors of several machines start together and stop together; here they are threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from stagewright.errors import RunFailed
from stagewright.runtime.faults import HungRank, RankExit
from stagewright.runtime.multinode.consistency import first_difference, link_checkpoints
from stagewright.runtime.multinode.meeting import MachineReport, Meeting, MeetingConfig, StartDecision
from stagewright.runtime.multinode.nodes import Node, Site, bound_to
from stagewright.runtime.multinode.tunnel import TunnelServer, store_prefix
from stagewright.voice import Voice
from tests.waiting import LONG, wait_until

TOKEN, HOST = "a token of tests, long enough", "127.0.0.1"


class Host:
    """A store behind a tunnel server, and the meetings of two machines that use it."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / "0", folder / "1"]
        for own in self.folders:
            own.mkdir()
        self.said: list[list[str]] = [[], []]
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        listener = bound_to(HOST, 0)
        port = int(listener.getsockname()[1])
        self.nodes = (Node(0, HOST, port), Node(1, "127.0.0.2", port))
        self.server = TunnelServer(listener, self._store.port, TOKEN, float(LONG), lambda peer: None)

    def meeting(self, machine: int, token: str = TOKEN, lost: float = LONG, join: float = LONG) -> Meeting:
        site = Site(self.nodes, machine, (HOST, "127.0.0.2")[machine], token)
        return Meeting(
            MeetingConfig(self._store.port, store_prefix(TOKEN), self.folders[machine], join, lost, site),
            Voice(note=self.said[machine].append),
        )


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Host]:
    found = Host(tmp_path)
    yield found
    found.server.close()


def when_all(batch: int = 3) -> Callable[[Mapping[int, MachineReport], float], StartDecision | None]:
    return lambda here, waited: StartDecision(batch) if len(here) == 2 else None


def together(*functions: Callable[[], object]) -> list[object]:
    """What each function returns, or the message of the RunFailed that it raises; they run at the same time."""
    found: list[object] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            found[index] = functions[index]()
        except RunFailed as error:
            found[index] = str(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    return found


REPORT = MachineReport(
    {"lr": 1}, (0, 3), True, (RankExit(1, -9, "0F3@2", 0),), (HungRank(0, None, None, "it is stopped"),), (1,)
)


def test_reports_survive_json() -> None:
    assert MachineReport.from_json(REPORT.as_json().encode()) == REPORT


def test_machines_meet_in_any_order_and_end_together(hosted: Host) -> None:
    host, guest = hosted.meeting(0), hosted.meeting(1)
    seen: dict[int, MachineReport] = {}

    def decide(here: Mapping[int, MachineReport], waited: float) -> StartDecision | None:
        seen.update(here)
        return when_all()(here, waited)

    def late() -> StartDecision:
        time.sleep(0.5)
        return guest.meet(REPORT, when_all())

    assert together(lambda: host.meet(MachineReport({}, (0,)), decide), late) == [StartDecision(3), StartDecision(3)]
    assert seen[1] == REPORT and host.start == guest.start == 1
    assert host.peer_fault() is None and guest.peer_fault() is None
    assert not guest.all_done()
    time.sleep(0.6)
    assert not guest.all_done()
    wait_until(host.all_done)
    wait_until(guest.all_done)
    together(host.leave, guest.leave)


def test_links_checkpoints_to_machine_0_where_its_folder_is_shared(hosted: Host) -> None:
    host, guest = hosted.meeting(0), hosted.meeting(1)
    seen: list[bool] = []

    def decide(here: Mapping[int, MachineReport], waited: float) -> StartDecision | None:
        seen.extend(here[1].sees_checkpoints for _ in here if 1 in here)
        return when_all()(here, waited)

    for _ in range(2):
        together(lambda: host.meet(REPORT, decide), lambda: guest.meet(REPORT, decide))
    (hosted.folders[0] / "checkpoints" / "8").mkdir()
    assert all(seen) and [path.name for path in (hosted.folders[1] / "checkpoints").glob("[0-9]*")] == ["8"]
    (hosted.folders[0] / "checkpoints" / ".session").unlink()
    assert not link_checkpoints(host.open_store(), hosted.folders[1], host.session)
    together(host.leave, guest.leave)


def test_a_fault_on_one_machine_stops_the_other_and_both_restart(hosted: Host) -> None:
    host, guest = hosted.meeting(0), hosted.meeting(1)
    together(lambda: host.meet(REPORT, when_all()), lambda: guest.meet(REPORT, when_all()))
    guest.announce_fault()
    assert wait_until(host.peer_fault) == MachineReport()
    decisions = together(lambda: guest.meet(REPORT, when_all(5)), lambda: host.meet(REPORT, when_all(5)))
    assert decisions == [StartDecision(5)] * 2
    assert host.start == guest.start == 2
    time.sleep(0.6)
    assert host.peer_fault() is None and guest.peer_fault() is None  # the fault of the previous start is over
    together(host.leave, guest.leave)


def test_a_silent_machine_counts_as_lost_and_may_rejoin(hosted: Host) -> None:
    host, guest = hosted.meeting(0, lost=0.8), hosted.meeting(1)
    together(lambda: host.meet(REPORT, when_all()), lambda: guest.meet(REPORT, when_all()))
    guest.stop_heartbeat()
    assert wait_until(host.peer_fault) == MachineReport(lost=(1,))
    again = hosted.meeting(1)  # the command was started again on machine 1
    decisions = together(lambda: host.meet(REPORT, when_all()), lambda: again.meet(REPORT, when_all()))
    assert decisions == [StartDecision(3)] * 2
    assert again.start == 2
    together(host.leave, again.leave)


def test_a_machine_that_starts_again_makes_all_start_again(hosted: Host) -> None:
    host, guest = hosted.meeting(0), hosted.meeting(1)
    together(lambda: host.meet(REPORT, when_all()), lambda: guest.meet(REPORT, when_all()))
    guest.stop_heartbeat()
    again = hosted.meeting(1)

    def host_restarts() -> StartDecision:
        assert wait_until(host.peer_fault) == MachineReport()
        return host.meet(REPORT, when_all())

    assert together(host_restarts, lambda: again.meet(REPORT, when_all())) == [StartDecision(3)] * 2
    together(host.leave, again.leave)


def test_names_a_machine_that_does_not_join_in_time(hosted: Host) -> None:
    host = hosted.meeting(0, join=5.0)
    (failed,) = together(lambda: host.meet(REPORT, when_all()))
    assert str(failed).startswith("machine 1 (127.0.0.2) did not join within 5 s; start the same command there")
    assert hosted.said[0] == ["waiting for machine 1 (127.0.0.2)"]
    hosted.server.close()
    guest = hosted.meeting(1, join=1.0)
    (failed,) = together(lambda: guest.meet(REPORT, when_all()))
    assert str(failed).startswith("machine 0 (127.0.0.1) did not join within 1 s")


def test_fails_at_once_with_another_token(hosted: Host) -> None:
    guest = hosted.meeting(1, token="another token, as long as that")
    (failed,) = together(lambda: guest.meet(REPORT, when_all()))
    assert "machine 0 (127.0.0.1) at port" in str(failed) and "use the same token on each machine" in str(failed)


def test_both_machines_fail_with_the_same_message(hosted: Host) -> None:
    host, guest = hosted.meeting(0), hosted.meeting(1)
    refuse = lambda here, waited: StartDecision(failed="no") if len(here) == 2 else None  # noqa: E731
    assert together(lambda: host.meet(REPORT, refuse), lambda: guest.meet(REPORT, refuse)) == ["no", "no"]


def test_an_interrupt_on_one_machine_ends_the_others(hosted: Host) -> None:
    host, guest = hosted.meeting(0), hosted.meeting(1)
    together(lambda: host.meet(REPORT, when_all()), lambda: guest.meet(REPORT, when_all()))
    guest.leave("interrupted by SIGINT")
    with pytest.raises(RunFailed, match=r"interrupted by SIGINT on machine 1 \(127.0.0.2\)"):
        wait_until(host.peer_fault)
    host.leave()


def test_first_difference_gives_both_values() -> None:
    values = {"optimizer.lr": 0.1, "plan cuts": ["a"], "data fingerprint": "x"}
    assert first_difference(values, dict(values)) is None
    assert first_difference(values, values | {"plan cuts": ["b"]}) == ("plan cuts", ["a"], ["b"])
    assert first_difference(values, values | {"run.seed": 3}) == ("run.seed", "nothing", 3)


def test_a_single_machine_needs_no_other() -> None:
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    meeting = Meeting(MeetingConfig(store.port, "keys", Path()))
    assert meeting.meet(REPORT, lambda here, waited: StartDecision(7)) == StartDecision(7)
    meeting.announce_fault()
    assert meeting.peer_fault() is None and meeting.all_done()
    meeting.leave("interrupted")
