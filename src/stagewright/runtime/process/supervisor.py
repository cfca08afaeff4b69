"""The supervisor of one machine's ranks: starts them, watches them, and acts as `decide` says when one fails.

start ranks ──► watch ──► all done: end
   ▲              └─► a rank exits or hangs, another machine has a fault: stop all ranks ──► meet, decide ──► RunFailed
   └──────────────────────────────────────────────── restart ◄──────────────────────────────────┘"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch.distributed import PrefixStore, Store

from stagewright.errors import Interrupted, RunFailed
from stagewright.events import Emit, Restarted
from stagewright.plan.plan import Plan
from stagewright.runtime.checkpoint.folder import checkpoints_folder, newest_intact
from stagewright.runtime.checkpoint.pauses import STOP
from stagewright.runtime.comm.transport import ADDRESS, LOOPBACK
from stagewright.runtime.faults import Fault, RankExit, log_fault
from stagewright.runtime.job import Job
from stagewright.runtime.multinode.consistency import consistency_values
from stagewright.runtime.multinode.meeting import MachineReport, Meeting, StartDecision
from stagewright.runtime.multinode.nodes import RankProcesses, interface_of
from stagewright.runtime.process.children import Children
from stagewright.runtime.process.decide import State, decide
from stagewright.runtime.process.log import EventReader
from stagewright.runtime.process.rank import KEYS
from stagewright.runtime.process.watchdog import Limits, Watchdog
from stagewright.runtime.status_file import status_path

_POLL_SECONDS = 0.1
_NCCL_INTERFACE, _NCCL_ERRORS = "NCCL_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class StartPoint:
    """Where a start may begin: here always with the first batch."""

    def batches(self) -> Sequence[int]:
        """Batch numbers to start from: the run's own start, and later ones that save work. Machine 0's are used."""
        return (0,)

    def job(self, job: Job, batch: int) -> Job:
        """The job of ranks that start from a batch."""
        return job


class NewestCheckpoint(StartPoint):
    """Starts from the newest intact checkpoint of a run, or where the run itself started."""

    def __init__(self, job: Job) -> None:
        self._start = job.start
        self._folder = Path(job.folder)
        self._starts = 0

    def batches(self) -> Sequence[int]:
        newest, _ = newest_intact(self._folder) if self._starts else (None, [])
        self._starts += 1
        return (self._start,) if newest is None else (self._start, newest.batch)

    def job(self, job: Job, batch: int) -> Job:
        if batch == job.start:
            return job
        if batch == 0:  # machine 0 starts anew, this machine was told to resume
            return replace(job, start=0, resume=None)
        return replace(job, start=batch, resume=str(checkpoints_folder(self._folder) / str(batch)))


class Supervisor:
    """Runs this machine's ranks of a job, start after start; every start has its own store keys.

    Where torchrun or srun has started a process per rank, it runs that rank only, and never restarts it.
    """

    def __init__(self, job: Job, on_event: Emit, start_point: StartPoint, meeting: Meeting) -> None:
        self._is_external = is_external = isinstance(meeting.config.site, RankProcesses)
        self._job = job
        self._on_event = on_event
        self._start_point = start_point
        self._meeting = meeting
        self._folder = Path(job.folder)
        self._ranks = [meeting.machine] if is_external else _ranks_on(job.plan, meeting.machine)
        self._reader: EventReader | None = None
        self.is_stopping = False  # set by a signal's handler, so it is not part of a value that others replace
        self._state = State(
            job.plan,
            job.folder,
            job.keeps_checkpoints,
            0 if is_external else job.max_restarts,
            tuple(map(meeting.name, range(meeting.machines))),
            meeting.machine,
            meeting.config.lost,
        )

    def run(self) -> None:
        """Run to the end; RunFailed after a fault without another restart."""
        try:
            with Children() as children:
                happened: MachineReport | None = MachineReport()
                while happened is not None:
                    self.begin(happened)
                    self._start(children)
                    happened = self._watch(children)
                    if happened is not None:
                        self._meeting.announce_fault()
                        children.stop()
            if self._meeting.machine and self._ranks_store().check([STOP]):  # another machine asked all ranks to stop
                self.is_stopping = True
        except RunFailed as error:
            if self._state.fault is None:  # otherwise it is in the log already
                log_fault(self._folder, Fault(str(error), is_final=True), ())
            raise RunFailed(f"{error}; more in {self._folder / 'log.txt'}") from None
        finally:
            self.close()

    def close(self) -> None:
        """Read the last events."""
        if self._reader is not None:
            self._reader.close()

    def begin(self, happened: MachineReport) -> None:
        """Before every start: report what happened during the one before, agree where to start, and read events."""
        self.close()
        values = consistency_values(self._job) if self._meeting.machines > 1 else {}
        report = replace(happened, values=values, batches=tuple(self._start_point.batches()))
        failures = tuple(self._reader.failures) if self._reader else ()
        self._state = replace(self._state, failures=failures)
        if self._meeting.machine and (alone := decide(self._state, {self._meeting.machine: report}, 0.0).start):
            raise RunFailed(str(alone.failed))
        decision = self._meeting.meet(report, self._decide)
        self._accept(decision)
        for rank in self._ranks:
            status_path(self._folder, rank).unlink(missing_ok=True)  # of the start before
        self._start_point.job(self._job, decision.batch).save(self._folder / "job.json")
        if self._meeting.machine == 0:
            self._reader = EventReader(self._ranks_store(), self._on_event)
        if self.is_stopping:
            self.stop()  # the signal came before there was a store

    def stop(self) -> None:
        """Ask the ranks of all machines to save a checkpoint as soon as they can, and to end."""
        if self._is_external and self._reader is None and self._meeting.machine == 0:
            raise Interrupted("before every rank was there")  # torchrun kills this process if it waits for them
        self.is_stopping = True
        if self._meeting.start:
            self._ranks_store().set(STOP, STOP)

    def environment(self, rank: int) -> Mapping[str, str]:
        """The environment variables of a rank: its place, the keys of this start, the network interface to use."""
        site, plan = self._meeting.config.site, self._job.plan
        local = _ranks_on(plan, plan.devices[rank].machine)
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(plan.world),
            "LOCAL_RANK": str(local.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(local)),
            "MASTER_ADDR": self._meeting.config.host,
            "MASTER_PORT": str(self._meeting.config.port),
            KEYS: f"{self._meeting.config.keys}/{self._meeting.start}",
            ADDRESS: site.address if site else LOOPBACK,
            _NCCL_ERRORS: os.environ.get(_NCCL_ERRORS, "1"),  # abort communicators of a lost peer
        }
        interface = interface_of(site.address) if site else None
        if interface is not None and _NCCL_INTERFACE not in os.environ:
            variables[_NCCL_INTERFACE] = f"={interface}"  # "=" for exactly this name, not a prefix
        return variables

    def _start(self, children: Children) -> None:
        command = [sys.executable, "-m", "stagewright.runtime.process.rank", str(self._folder / "job.json")]
        for rank in self._ranks:
            logs = self._folder / "logs" / f"start-{self._meeting.start}" / f"rank-{rank}"
            logs.mkdir(parents=True, exist_ok=True)
            out, error = logs / "stdout.log", logs / "stderr.log"
            children.start(command, self.environment(rank), stdout=out, stderr=error)

    def _watch(self, children: Children) -> MachineReport | None:
        """Wait until all ranks of all machines are done, or until something happens that they have to stop for."""
        processes = dict(zip(self._ranks, children.processes(), strict=True))
        watchdog = Watchdog(self._folder, Limits(self._job.config.run.timeout, self._job.config.run.start_timeout))
        while True:
            time.sleep(_POLL_SECONDS)
            if self._reader is not None:
                self._reader.check()
            codes = dict(zip(self._ranks, children.codes(), strict=True))
            if any(codes.values()):
                exits = [RankExit.of(self._folder, rank, code) for rank, code in codes.items() if code]
                return MachineReport(exits=tuple(exits))
            if (peer := self._meeting.peer_fault()) is not None:
                return MachineReport(lost=() if peer.lost is None else (peer.lost,))
            running = {rank: processes[rank] for rank, code in codes.items() if code is None}
            if running and (hung := watchdog.find_hung(running)) is not None:
                return MachineReport(hung=(hung,))
            if not running and self._meeting.all_done():
                return None

    def _decide(self, reports: Mapping[int, MachineReport], waited: float) -> StartDecision | None:
        """Machine 0's decision; the fault that it finds goes into the log once."""
        state = replace(self._state, start=self._meeting.start, is_stopping=self.is_stopping)
        decision = decide(state, reports, waited)
        if decision.fault is not None and self._state.fault is None:
            log_fault(self._folder, decision.fault, self._state.failures)
        self._state = replace(self._state, fault=decision.fault)
        return decision.start

    def _accept(self, decision: StartDecision) -> None:
        """Count a restart and report it; the fault that caused it is dealt with."""
        if decision.cause is None:
            return
        self._state = replace(self._state, restarts=decision.restart, previous=self._state.fault, fault=None)
        self._meeting.say(f"{decision.cause}; restart {decision.restart} from batch {decision.batch}")
        self._on_event(Restarted(decision.batch, decision.cause))

    def _ranks_store(self) -> Store:
        """The store keys of the ranks of this start."""
        return PrefixStore(str(self._meeting.start), self._meeting.open_store())


def _ranks_on(plan: Plan, machine: int) -> list[int]:
    return [rank for rank, device in enumerate(plan.devices) if device.machine == machine]
