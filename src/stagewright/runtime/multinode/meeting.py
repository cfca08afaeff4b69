"""The meeting of a run's supervisors, one per machine: they agree before every start, and stop together.

machine 0 hosts the store and decides                 other machines
round n ───────────────────────────────────────────►  wait for a round that is new to them
one report per machine  ◄───────────────────────────  consistency values, batches to start from, ranks that exited
start decision n: the batch, or why there is none ─►  start, or fail with the same message

While ranks run, a heartbeat notices lost machines, faults that another machine announced, and the end of the run."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from stagewright.errors import RunFailed
from stagewright.events import build
from stagewright.runtime.comm.transport import LOOPBACK
from stagewright.runtime.faults import HungRank, PausingClock, RankExit
from stagewright.runtime.multinode.consistency import announce_folder, link_checkpoints
from stagewright.runtime.multinode.nodes import RankProcesses, Site
from stagewright.runtime.multinode.tunnel import AccessDenied, check_access
from stagewright.voice import SILENT, Voice

_BEAT_SECONDS = 0.25
_POLL_SECONDS = 0.1
_FIRST_NOTICE_SECONDS, _NEXT_NOTICE_SECONDS = 2.0, 30.0
_FAREWELL_SECONDS = 5.0
_SHORT_SECONDS = 2.0
_CONNECT = timedelta(seconds=10)


@dataclass(frozen=True, slots=True)
class MachineReport:
    """What one machine reports before a start: its values, and what happened during the start before."""

    values: Mapping[str, Any] = field(default_factory=dict)  # for the consistency check
    batches: tuple[int, ...] = ()  # that it could start from
    sees_checkpoints: bool = True  # in the run folder of machine 0
    exits: tuple[RankExit, ...] = ()
    hung: tuple[HungRank, ...] = ()
    lost: tuple[int, ...] = ()  # machines

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: bytes) -> MachineReport:
        return build(MachineReport, json.loads(text))


@dataclass(frozen=True, slots=True)
class StartDecision:
    """What machine 0 decided: the batch to start from, or why there is no start."""

    batch: int = 0
    restart: int = 0
    cause: str | None = None  # the fault that ended the start before
    failed: str | None = None


Decide = Callable[[Mapping[int, MachineReport], float], StartDecision | None]  # reports by machine, seconds waited


@dataclass(frozen=True, slots=True)
class MeetingConfig:
    """Where the store is, the prefix of its keys, and how many seconds machines wait for each other."""

    port: int
    keys: str
    folder: Path  # of the run, on this machine
    join: float = 600.0
    lost: float = 60.0
    site: Site | RankProcesses | None = None  # who takes part; None for one machine
    host: str = LOOPBACK  # of the store


class Heartbeat:
    """Counts up this machine's number in the store and watches those of others, during one start.

    Machine 0 watches all others; they watch machine 0. A machine is lost after `silence` seconds without a change. One
    thread talks to the store and may block in it; the other measures how long ago each number changed.
    """

    def __init__(self, store: Store, machine: int, machines: int, silence: float, start: int) -> None:
        self.lost: int | None = None  # a machine that has been silent for too long
        self.is_faulty = False  # another machine announced a fault
        self.ended: str | None = None  # why another machine ended the run
        self.done = 0  # machines whose ranks are all done
        self._machine = machine
        self._silence = silence
        self._start = start
        self._clock = PausingClock()
        self._beats = dict.fromkeys((0,) if machine else range(1, machines), (-1, 0.0))
        self._closing = threading.Event()
        self._store = store
        self._beating = threading.Thread(target=self._beat_until_closed, daemon=True)
        self._watching = threading.Thread(target=self._watch_until_closed, daemon=True)
        self._beating.start()
        self._watching.start()

    def close(self) -> None:
        """Stop; does not wait for a beat that is under way."""
        self._closing.set()
        self._watching.join()

    def _beat_until_closed(self) -> None:
        while not self._closing.wait(_BEAT_SECONDS):
            try:
                self._beat()
            except RuntimeError:
                return  # the other thread notices the silence

    def _beat(self) -> None:
        store, start = self._store, self._start
        store.add(f"beat/{self._machine}", 1)
        for machine in self._beats:
            beat = store.add(f"beat/{machine}", 0)
            if beat != self._beats[machine][0]:
                self._beats[machine] = (beat, self._clock.now)
        self.is_faulty = self.is_faulty or store.check([f"fault/{start}"])
        self.done = store.add(f"done/{start}", 0)
        if store.check(["end"]):
            self.ended = store.get("end").decode()

    def _watch_until_closed(self) -> None:
        while not self._closing.wait(_BEAT_SECONDS):
            now = self._clock.tick()
            for machine, (_, changed) in self._beats.items():
                if now - changed > self._silence:
                    self.lost = machine


@dataclass
class Meeting:
    """One machine's part in the meeting."""

    config: MeetingConfig
    voice: Voice = SILENT
    start: int = 0  # number of the current start
    session: str = field(default_factory=lambda: secrets.token_hex(8))  # of this supervisor process
    _heartbeat: Heartbeat | None = None
    _is_done: bool = False
    _seen: tuple[str, int] = ("", 0)  # session and number of the last round that this machine joined

    @property
    def machine(self) -> int:
        return self.config.site.index if self.config.site else 0

    @property
    def machines(self) -> int:
        return len(self.config.site.names) if self.config.site else 1

    def open_store(self) -> Store:
        """A new connection to the keys of this run."""
        config = self.config
        return PrefixStore(config.keys, TCPStore(config.host, config.port, is_master=False, timeout=_CONNECT))

    def name(self, machine: int) -> str:
        return self.config.site.names[machine] if self.config.site else f"machine {machine}"

    def meet(self, report: MachineReport, decide: Decide) -> StartDecision:
        """Wait for the other machines and return what machine 0 decides; RunFailed where there is no start."""
        self.stop_heartbeat()
        decision = self._host(report, decide) if self.machine == 0 else self._attend(report)
        if decision.failed is not None:
            raise RunFailed(decision.failed)
        self._is_done = False
        if self.machines > 1:
            store = self.open_store()
            self._heartbeat = Heartbeat(store, self.machine, self.machines, self.config.lost, self.start)
        return decision

    def peer_fault(self) -> MachineReport | None:
        """Why this machine's ranks have to stop: another machine is lost, or announced a fault.

        RunFailed where another machine ended the run.
        """
        heartbeat = self._heartbeat
        if heartbeat is None or (heartbeat.ended is None and heartbeat.lost is None and not heartbeat.is_faulty):
            return None
        if heartbeat.ended is not None:
            raise RunFailed(heartbeat.ended)
        return MachineReport(lost=() if heartbeat.lost is None else (heartbeat.lost,))

    def announce_fault(self) -> None:
        """Have the other machines stop too; one that can't be reached notices the lost heartbeat."""
        if self.machines > 1:
            self._post(f"fault/{self.start}", str(self.machine))

    def all_done(self) -> bool:
        """Announce once that this machine's ranks are done; whether those of all machines are."""
        if self._heartbeat is None:
            return True
        if not self._is_done:
            self.open_store().add(f"done/{self.start}", 1)
            self._is_done = True
        return self._heartbeat.done >= self.machines

    def leave(self, ended: str | None = None) -> None:
        """End this machine's part; `ended` says why the others have to end as well."""
        if self.machines == 1 or not self.start:
            return
        if ended is not None:
            self._post("end", f"{ended} on {self.name(self.machine)}")
        self.stop_heartbeat()
        try:
            store = self._reachable_store()
            left, limit = store.add("left", 1), time.monotonic() + _FAREWELL_SECONDS
            while self.machine == 0 and left < self.machines and time.monotonic() < limit:
                time.sleep(_POLL_SECONDS)
                left = store.add("left", 0)
        except (RuntimeError, OSError):
            pass  # the others notice the lost heartbeat

    def stop_heartbeat(self) -> None:
        """Fall silent: the other machines count this one as lost after a while."""
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None

    def _post(self, key: str, text: str) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            store = self._reachable_store()
            store.set(key, text)
            store.check([key])  # `set` does not wait until the store has it; `check` does

    def _reachable_store(self) -> Store:
        """The store, or an error within seconds where it is out of reach."""
        if self.machine:
            self._check_access(_SHORT_SECONDS)
        return self.open_store()

    def _host(self, report: MachineReport, decide: Decide) -> StartDecision:
        self.start += 1
        store, reports = self.open_store(), {0: report}
        if self.machines > 1:
            announce_folder(store, self.config.folder, self.session)
        store.set("round", json.dumps([self.session, self.start]))
        waiting = _Waiting(self.voice, self.config.join)
        while (decision := decide(reports, waiting.seconds)) is None:
            for machine in range(1, self.machines):
                key = f"here/{self.start}/{machine}"
                if machine not in reports and store.check([key]):
                    reports[machine] = MachineReport.from_json(store.get(key))
            missing = [self.name(machine) for machine in range(self.machines) if machine not in reports]
            if too_late := waiting.poll(missing):
                decision = StartDecision(failed=too_late)
                break
        store.set(f"go/{self.start}", json.dumps(asdict(decision)))
        return decision

    def _attend(self, report: MachineReport) -> StartDecision:
        waiting = _Waiting(self.voice, self.config.join)
        host = [self.name(0)]
        while True:
            try:
                self._check_access()
                store = self.open_store()
                while (found := self._new_round(store)) is None:
                    if too_late := waiting.poll(host):
                        return StartDecision(failed=too_late)
                self._seen, self.start = found, found[1]
                is_shared = link_checkpoints(store, self.config.folder, found[0])
                store.set(f"here/{self.start}/{self.machine}", replace(report, sees_checkpoints=is_shared).as_json())
                while not store.check([f"go/{self.start}"]):
                    if too_late := waiting.poll(["the other machines"]):
                        return StartDecision(failed=too_late)
                return build(StartDecision, json.loads(store.get(f"go/{self.start}")))
            except (OSError, TimeoutError, RuntimeError) as error:
                if isinstance(error, RunFailed):
                    raise
                if too_late := waiting.poll(host):
                    return StartDecision(failed=too_late)

    def _new_round(self, store: Store) -> tuple[str, int] | None:
        """Machine 0's current round, as session and number, unless this machine has joined it before."""
        if not store.check(["round"]):
            return None
        session, start = json.loads(store.get("round"))
        if (session, start) == self._seen or store.check([f"here/{start}/{self.machine}"]):
            store.set(f"fault/{start}", str(self.machine))  # this machine starts again, so all must
            return None
        return session, start

    def _check_access(self, seconds: float | None = None) -> None:
        site = self.config.site
        if not isinstance(site, Site):
            return  # there is no tunnel
        host = site.nodes[0]
        try:
            check_access((host.host, host.port), site.address, site.token, seconds or _CONNECT.total_seconds())
        except AccessDenied:
            raise RunFailed(
                f"{host} at port {host.port} has another token than this machine; use the same token on each machine"
            ) from None


class _Waiting:
    """Names the machines that this one waits for, from time to time, until it has waited too long."""

    def __init__(self, voice: Voice, limit: float) -> None:
        self._voice = voice
        self._limit = limit
        self._began = time.monotonic()
        self._next_notice = _FIRST_NOTICE_SECONDS

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def poll(self, names: list[str]) -> str | None:
        """Wait a moment for these machines; an error message once the time is up."""
        time.sleep(_POLL_SECONDS)
        if not names:
            return None
        listed = ", ".join(names)
        if self.seconds >= self._limit:
            return (
                f"{listed} did not join within {self._limit:g} s; start the same command there, "
                "check that the address can be reached, or raise --join-timeout"
            )
        if self.seconds >= self._next_notice:
            self._voice.note(f"waiting for {listed}")
            self._next_notice = self.seconds + _NEXT_NOTICE_SECONDS
        return None
