"""Supervisors of several machines meet, decide together and stop together; here they are threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from stagewright.errors import RunFailed
from stagewright.runtime.faults import HungRank, RankExit
from stagewright.runtime.multinode.consistency import difference
from stagewright.runtime.multinode.meeting import MachineReport, Meeting, MeetingConfig, StartDecision
from stagewright.runtime.multinode.nodes import Node, Site, bound_to
from stagewright.runtime.multinode.shared_files import link_checkpoints
from stagewright.runtime.multinode.tunnel import TunnelServer, store_prefix

TOKEN, HOST = "a token of tests, long enough", "127.0.0.1"


class Office:
    """A store behind a door, and crews of two machines that meet there."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / "0", folder / "1"]
        for own in self.folders:
            own.mkdir()
        self.said: list[list[str]] = [[], []]
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        listener = bound_to(HOST, 0)
        port = int(listener.getsockname()[1])
        self.nodes = (Node(0, HOST, port), Node(1, "127.0.0.2", port))
        self.door = TunnelServer(listener, self._store.port, TOKEN, 5.0, lambda peer: None)

    def meeting(self, machine: int, token: str = TOKEN, lost: float = 5.0, join: float = 5.0) -> Meeting:
        site = Site(self.nodes, machine, (HOST, "127.0.0.2")[machine], token)
        return Meeting(
            MeetingConfig(self._store.port, store_prefix(TOKEN), self.folders[machine], join, lost, site),
            self.said[machine].append,
        )


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    found = Office(tmp_path)
    yield found
    found.door.close()


def when_all(batch: int = 3) -> Callable[[Mapping[int, MachineReport], float], StartDecision | None]:
    return lambda here, waited: StartDecision(batch) if len(here) == 2 else None


def together(*functions: Callable[[], object]) -> list[object]:
    """What each returns, or raises."""
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
        thread.join(20)
        assert not thread.is_alive()
    return found


def until(condition: Callable[[], object], seconds: float = 5.0) -> object:
    limit = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < limit, "it never came about"
        time.sleep(0.02)
    return found


REPORT = MachineReport(
    {"lr": 1}, (0, 3), True, (RankExit(1, -9, "0F3@2", 0),), (HungRank(0, None, None, "it sleeps"),), (1,)
)


def test_reports_travel_whole() -> None:
    assert MachineReport.from_json(REPORT.as_json().encode()) == REPORT


def test_machines_meet_whoever_comes_first_and_end_together(office: Office) -> None:
    host, guest = office.meeting(0), office.meeting(1)
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
    until(host.all_done)
    until(guest.all_done)
    together(host.leave, guest.leave)


def test_checkpoints_lie_in_the_folder_of_the_first_machine_where_the_other_sees_it(office: Office) -> None:
    host, guest = office.meeting(0), office.meeting(1)
    seen: list[bool] = []

    def decide(here: Mapping[int, MachineReport], waited: float) -> StartDecision | None:
        seen.extend(here[1].sees for _ in here if 1 in here)
        return when_all()(here, waited)

    for _ in range(2):
        together(lambda: host.meet(REPORT, decide), lambda: guest.meet(REPORT, decide))
    (office.folders[0] / "checkpoints" / "8").mkdir()
    assert all(seen) and [path.name for path in (office.folders[1] / "checkpoints").glob("[0-9]*")] == ["8"]
    (office.folders[0] / "checkpoints" / ".session").unlink()
    assert not link_checkpoints(host.open_store(), office.folders[1], host.session)
    together(host.leave, guest.leave)


def test_a_fault_on_one_machine_stops_the_other_and_both_start_again(office: Office) -> None:
    host, guest = office.meeting(0), office.meeting(1)
    together(lambda: host.meet(REPORT, when_all()), lambda: guest.meet(REPORT, when_all()))
    guest.announce_fault()
    assert until(host.peer_fault) == -1
    assert (
        together(lambda: guest.meet(REPORT, when_all(5)), lambda: host.meet(REPORT, when_all(5)))
        == [StartDecision(5)] * 2
    )
    assert host.start == guest.start == 2
    time.sleep(0.6)
    assert host.peer_fault() is None and guest.peer_fault() is None  # the fault of the start before is over
    together(host.leave, guest.leave)


def test_a_silent_machine_is_lost_and_may_come_back(office: Office) -> None:
    host, guest = office.meeting(0, lost=0.8), office.meeting(1)
    together(lambda: host.meet(REPORT, when_all()), lambda: guest.meet(REPORT, when_all()))
    guest.stop_heartbeat()
    assert until(host.peer_fault) == 1
    anew = office.meeting(1)  # the command was started again over there
    assert (
        together(lambda: host.meet(REPORT, when_all()), lambda: anew.meet(REPORT, when_all())) == [StartDecision(3)] * 2
    )
    assert anew.start == 2
    together(host.leave, anew.leave)


def test_a_machine_that_begins_anew_makes_all_begin_anew(office: Office) -> None:
    host, guest = office.meeting(0), office.meeting(1)
    together(lambda: host.meet(REPORT, when_all()), lambda: guest.meet(REPORT, when_all()))
    guest.stop_heartbeat()
    anew = office.meeting(1)

    def host_goes_on() -> StartDecision:
        assert until(host.peer_fault) == -1
        return host.meet(REPORT, when_all())

    assert together(host_goes_on, lambda: anew.meet(REPORT, when_all())) == [StartDecision(3)] * 2
    together(host.leave, anew.leave)


def test_a_machine_that_does_not_come_is_waited_for_and_then_named(office: Office) -> None:
    host = office.meeting(0, join=2.5)
    (failed,) = together(lambda: host.meet(REPORT, when_all()))
    assert str(failed).startswith("machine 1 (127.0.0.2) did not come within 2.5 s; start the same command there")
    assert office.said[0] == ["waiting for machine 1 (127.0.0.2)"]
    office.door.close()
    guest = office.meeting(1, join=1.0)
    (failed,) = together(lambda: guest.meet(REPORT, when_all()))
    assert str(failed).startswith("machine 0 (127.0.0.1) did not come within 1 s")


def test_another_token_is_told_at_once(office: Office) -> None:
    guest = office.meeting(1, token="another token, as long as that")
    (failed,) = together(lambda: guest.meet(REPORT, when_all()))
    assert "machine 0 (127.0.0.1) at port" in str(failed) and "use the same token on each machine" in str(failed)


def test_both_machines_hear_why_there_is_no_start(office: Office) -> None:
    host, guest = office.meeting(0), office.meeting(1)
    refuse = lambda here, waited: StartDecision(failed="no") if len(here) == 2 else None  # noqa: E731
    assert together(lambda: host.meet(REPORT, refuse), lambda: guest.meet(REPORT, refuse)) == ["no", "no"]


def test_an_interrupt_is_told_to_all(office: Office) -> None:
    host, guest = office.meeting(0), office.meeting(1)
    together(lambda: host.meet(REPORT, when_all()), lambda: guest.meet(REPORT, when_all()))
    guest.leave("interrupted by SIGINT")
    with pytest.raises(RunFailed, match=r"interrupted by SIGINT on machine 1 \(127.0.0.2\)"):
        until(host.peer_fault)
    host.leave()


def test_the_first_difference_is_named_with_both_values() -> None:
    facts = {"optimizer.lr": 0.1, "plan cuts": ["a"], "data fingerprint": "x"}
    assert difference(facts, dict(facts)) is None
    assert difference(facts, replace_fact(facts, "plan cuts", ["b"])) == ("plan cuts", ["a"], ["b"])
    assert difference(facts, facts | {"run.seed": 3}) == ("run.seed", "nothing", 3)


def replace_fact(facts: Mapping[str, object], name: str, value: object) -> dict[str, object]:
    return {**facts, name: value}


def test_one_machine_is_a_crew_of_its_own() -> None:
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    meeting = Meeting(MeetingConfig(store.port, "keys", Path()))
    assert meeting.meet(REPORT, lambda here, waited: StartDecision(7)) == StartDecision(7)
    meeting.announce_fault()
    assert meeting.peer_fault() is None and meeting.all_done()
    meeting.leave("interrupted")
