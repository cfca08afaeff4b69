"""A thread that keeps in touch with the other machines while ranks run. The supervisors of one run, one a machine: they meet before every start, and stop together.

machine 0 hosts the store and decides          others
round n ────────────────────────────────────►  wait for a round that is new to them
report of each machine  ◄────────────────────  facts, batches to begin with, who died
decision n: begin with batch p, or the story ►  start, or end with the same story"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from stagewright.errors import RunFailed
from stagewright.runtime.comm.transport import LOOPBACK
from stagewright.runtime.faults import HungRank, RankExit
from stagewright.runtime.multinode.nodes import Site
from stagewright.runtime.multinode.shared_files import announce_folder, link_checkpoints
from stagewright.runtime.multinode.tunnel import AccessDenied, check_access

_BEAT_SECONDS = 0.25
_LONGEST_TICK = 1.0


@dataclass(frozen=True, slots=True)
class PeerWatch:
    """Who watches whom, and for how long it may be silent."""

    machine: int
    machines: int
    lost: float  # seconds

    @property
    def others(self) -> Sequence[int]:
        """The host watches all, everybody else the host."""
        return range(1, self.machines) if self.machine == 0 else (0,)


class Heartbeat:
    """Beats for this machine and sees the beats of others, a fault told by another machine, and the common end."""

    def __init__(self, open_store: Callable[[], Store], watch: PeerWatch, start: int) -> None:
        self.lost: int | None = None  # a machine that is silent
        self.is_faulty = False  # another machine told of a fault
        self.ended: str | None = None  # somebody stopped the run, and how
        self.done = 0  # machines whose ranks are all done
        self._watch = watch
        self._start = start
        self._now = 0.0
        self._beats = dict.fromkeys(watch.others, (-1, 0.0))
        self._closing = threading.Event()
        self._store = open_store()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._looker = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        self._looker.start()

    def close(self) -> None:
        """Stop beating; a beat that is under way is not waited for."""
        self._closing.set()
        self._looker.join()

    def _run(self) -> None:
        while not self._closing.wait(_BEAT_SECONDS):
            try:
                self._beat()
            except RuntimeError:
                return  # the silence is noticed by the other thread

    def _beat(self) -> None:
        store, start = self._store, self._start
        store.add(f"beat/{self._watch.machine}", 1)
        for machine in self._watch.others:
            beat = store.add(f"beat/{machine}", 0)
            if beat != self._beats[machine][0]:
                self._beats[machine] = (beat, self._now)
        self.is_faulty = self.is_faulty or store.check([f"fault/{start}"])
        self.done = store.add(f"done/{start}", 0)
        if store.check(["end"]):
            self.ended = store.get("end").decode()

    def _look(self) -> None:
        """Count silence by a clock that stands still while this process does."""
        read = time.monotonic()
        while not self._closing.wait(_BEAT_SECONDS):
            now = time.monotonic()
            self._now += min(now - read, _LONGEST_TICK)
            read = now
            for machine, (_, heard) in self._beats.items():
                if self._now - heard > self._watch.lost:
                    self.lost = machine


Say = Callable[[str], None]
_POLL_SECONDS = 0.1
_FIRST_WORD_SECONDS, _NEXT_WORD_SECONDS = 2.0, 30.0
_FAREWELL_SECONDS = 5.0
_SHORT_SECONDS = 2.0
_CONNECT = timedelta(seconds=10)


@dataclass(frozen=True, slots=True)
class MachineReport:
    """What one machine brings to a meeting."""

    facts: Mapping[str, Any]
    batches: tuple[int, ...]
    sees: bool = True  # the run folder of machine 0
    exits: tuple[RankExit, ...] = ()
    hung: tuple[HungRank, ...] = ()
    lost: tuple[int, ...] = ()

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: bytes) -> MachineReport:
        found = json.loads(text)
        return MachineReport(
            found["facts"],
            tuple(found["batches"]),
            found["sees"],
            tuple(RankExit(**exit) for exit in found["exits"]),
            tuple(HungRank(**hung) for hung in found["hung"]),
            tuple(found["lost"]),
        )


@dataclass(frozen=True, slots=True)
class StartDecision:
    """What machine 0 decided: where to begin, or why there is no start."""

    batch: int = 0
    restart: int = 0
    cause: str | None = None  # of the fault before
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class MeetingConfig:
    """Where the store is, what its keys begin with, and how long machines wait for each other."""

    port: int
    keys: str
    folder: Path  # of the run, on this machine
    join: float = 600.0
    lost: float = 60.0
    site: Site | None = None


Decide = Callable[[Mapping[int, MachineReport], float], StartDecision | None]


@dataclass
class Meeting:
    """One machine's place among the machines of a run."""

    config: MeetingConfig
    say: Say = lambda line: None
    start: int = 0  # number of the start that is under way
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    _heartbeat: Heartbeat | None = None
    _is_done: bool = False
    _seen: tuple[str, int] = ("", 0)  # the last round of machine 0 that was new

    @property
    def machine(self) -> int:
        return self.config.site.index if self.config.site else 0

    @property
    def machines(self) -> int:
        return len(self.config.site.nodes) if self.config.site else 1

    def open_store(self) -> Store:
        """A connection of its own to the keys of this run."""
        return PrefixStore(self.config.keys, TCPStore(LOOPBACK, self.config.port, is_master=False, timeout=_CONNECT))

    def name(self, machine: int) -> str:
        return str(self.config.site.nodes[machine]) if self.config.site else f"machine {machine}"

    def meet(self, report: MachineReport, decide: Decide) -> StartDecision:
        """Wait for the others; then do what machine 0 decides."""
        self.stop_heartbeat()
        decision = self._host(report, decide) if self.machine == 0 else self._attend(report)
        if decision.failed is not None:
            raise RunFailed(decision.failed)
        self._is_done = False
        if self.machines > 1:
            self._heartbeat = Heartbeat(
                self.open_store, PeerWatch(self.machine, self.machines, self.config.lost), self.start
            )
        return decision

    def peer_fault(self) -> int | None:
        """Whether to stop because of another machine: its number if it is lost, -1 if it told of a fault."""
        line = self._heartbeat
        if line is None:
            return None
        if line.ended is not None:
            raise RunFailed(line.ended)
        if line.lost is not None:
            return line.lost
        return -1 if line.is_faulty else None

    def announce_fault(self) -> None:
        """Tell the other machines to stop; one that can't be reached will notice by itself."""
        if self.machines > 1:
            self._tell(f"fault/{self.start}", str(self.machine))

    def all_done(self) -> bool:
        """Tell that the ranks here are done; whether all are."""
        if self._heartbeat is None:
            return True
        if not self._is_done:
            self.open_store().add(f"done/{self.start}", 1)
            self._is_done = True
        return self._heartbeat.done >= self.machines

    def leave(self, ended: str | None = None) -> None:
        """Go, after the others know why."""
        if self.machines == 1 or not self.start:
            return
        if ended is not None:
            self._tell("end", f"{ended} on {self.name(self.machine)}")
        self.stop_heartbeat()
        try:
            store = self._near_store()
            left, limit = store.add("left", 1), time.monotonic() + _FAREWELL_SECONDS
            while self.machine == 0 and left < self.machines and time.monotonic() < limit:
                time.sleep(_POLL_SECONDS)
                left = store.add("left", 0)
        except (RuntimeError, OSError):
            pass  # they have to find out by themselves

    def stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None

    def _tell(self, key: str, text: str) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            store = self._near_store()
            store.set(key, text)
            store.check([key])  # setting alone does not wait until it is there

    def _near_store(self) -> Store:
        """The store, or an error at once where it is out of reach."""
        if self.machine:
            self._check_access(_SHORT_SECONDS)
        return self.open_store()

    def _host(self, report: MachineReport, decide: Decide) -> StartDecision:
        self.start += 1
        store, here = self.open_store(), {0: report}
        if self.machines > 1:
            announce_folder(store, self.config.folder, self.session)
        store.set("round", json.dumps([self.session, self.start]))
        waiting = _Waiting(self.say, self.config.join)
        while (decision := decide(here, waiting.seconds)) is None:
            for machine in range(1, self.machines):
                key = f"here/{self.start}/{machine}"
                if machine not in here and store.check([key]):
                    here[machine] = MachineReport.from_json(store.get(key))
            missing = [self.name(machine) for machine in range(self.machines) if machine not in here]
            if late := waiting.for_whom(missing):
                decision = StartDecision(failed=late)
                break
        store.set(f"go/{self.start}", json.dumps(asdict(decision)))
        return decision

    def _attend(self, report: MachineReport) -> StartDecision:
        waiting = _Waiting(self.say, self.config.join)
        host = [self.name(0)]
        while True:
            try:
                self._check_access()
                store = self.open_store()
                while (found := self._new_round(store)) is None:
                    if late := waiting.for_whom(host):
                        return StartDecision(failed=late)
                self._seen, self.start = found, found[1]
                seen = replace(report, sees=link_checkpoints(store, self.config.folder, found[0]))
                store.set(f"here/{self.start}/{self.machine}", seen.as_json())
                while not store.check([f"go/{self.start}"]):
                    if late := waiting.for_whom(["the other machines"]):
                        return StartDecision(failed=late)
                return StartDecision(**json.loads(store.get(f"go/{self.start}")))
            except (OSError, TimeoutError, RuntimeError) as error:
                if isinstance(error, RunFailed):
                    raise
                if late := waiting.for_whom(host):
                    return StartDecision(failed=late)

    def _new_round(self, store: Store) -> tuple[str, int] | None:
        """The round that machine 0 is at, once this machine is not in it yet."""
        if not store.check(["round"]):
            return None
        session, start = json.loads(store.get("round"))
        if (session, start) == self._seen or store.check([f"here/{start}/{self.machine}"]):
            store.set(f"fault/{start}", str(self.machine))  # this machine begins anew, so all must
            return None
        return session, start

    def _check_access(self, seconds: float | None = None) -> None:
        site = self.config.site
        assert site is not None
        host = site.nodes[0]
        try:
            check_access((host.host, host.port), site.address, site.token, seconds or _CONNECT.total_seconds())
        except AccessDenied:
            raise RunFailed(
                f"{host} at port {host.port} does not know this machine's token; use the same token on each machine"
            ) from None


class _Waiting:
    """Says whom a machine waits for, now and then, and when it has waited too long."""

    def __init__(self, say: Say, limit: float) -> None:
        self._say = say
        self._limit = limit
        self._began = time.monotonic()
        self._next_word = _FIRST_WORD_SECONDS

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def for_whom(self, names: list[str]) -> str | None:
        """Wait a little; what to say where that was the last time."""
        time.sleep(_POLL_SECONDS)
        if not names:
            return None
        listed = ", ".join(names)
        if self.seconds >= self._limit:
            return (
                f"{listed} did not come within {self._limit:g} s; start the same command there, "
                "check that the address can be reached, or raise --join-timeout"
            )
        if self.seconds >= self._next_word:
            self._say(f"waiting for {listed}")
            self._next_word = self.seconds + _NEXT_WORD_SECONDS
        return None
