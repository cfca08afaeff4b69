"""The supervisor of one machine's ranks: starts them, watches them, and acts as `decide` says when one fails.

start ranks ──► watch ──► all done: end
   ▲              └─► a rank exits or hangs, another machine has a fault: stop all ranks ──► meet, decide ──► RunFailed
   └──────────────────────────────────────────────── restart ◄──────────────────────────────────┘"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch.distributed import PrefixStore, Store

from stagewright.errors import DISK_FULL, Interrupted, RunFailed
from stagewright.events import Failure, Restarted
from stagewright.plan.plan import Plan
from stagewright.runtime.checkpoint.folder import checkpoints_folder, newest_intact
from stagewright.runtime.checkpoint.history import history_of
from stagewright.runtime.checkpoint.pauses import STOP
from stagewright.runtime.comm.transport import ADDRESS, LOOPBACK
from stagewright.runtime.faults import Fault, RankExit, log_fault
from stagewright.runtime.job import Job
from stagewright.runtime.multinode.consistency import consistency_values
from stagewright.runtime.multinode.meeting import MachineReport, Meeting, StartDecision
from stagewright.runtime.multinode.nodes import RankProcesses, interface_of
from stagewright.runtime.process.children import Children, SpareRanks
from stagewright.runtime.process.decide import StartState, decide
from stagewright.runtime.process.log import EventHandler, EventReader
from stagewright.runtime.process.object_pipe import content_for
from stagewright.runtime.process.rank import HISTORY, JOB, KEYS
from stagewright.runtime.process.watchdog import Limits, Watchdog
from stagewright.runtime.status_file import status_path

_POLL_SECONDS = 0.1
_ENOUGH = "enough"  # the script has asked to stop, which is no failure
_ROOM = 1 << 18  # bytes on the disk for the small files of a start: job.json, logs, status files
_NCCL_INTERFACE, _NCCL_ERRORS = "NCCL_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class StartPoint:
    """Where a start may begin: at the newest intact checkpoint of a run, or where the run itself started."""

    def __init__(self, job: Job) -> None:
        self._start = job.start
        self._folder = Path(job.folder)
        self._starts = 0

    def batches(self) -> Sequence[int]:
        """Batch numbers to start from: the run's own start, and later ones that save work. Machine 0's are used."""
        newest, _ = newest_intact(self._folder) if self._starts else (None, [])
        self._starts += 1
        return (self._start,) if newest is None else (self._start, newest.batch)

    def job(self, job: Job, batch: int) -> Job:
        """The job of ranks that start from a batch."""
        if batch == job.start:
            return job
        if batch == 0:  # machine 0 starts anew, this machine was told to resume
            return replace(job, start=0, resume=None)
        return replace(job, start=batch, resume=str(checkpoints_folder(self._folder) / str(batch)))


class Supervisor:
    """Runs this machine's ranks of a job, start after start; every start has its own store keys.

    Where torchrun or srun has started a process per rank, it runs that rank only, and never restarts it.
    """

    def __init__(
        self,
        job: Job,
        handler: EventHandler,
        meeting: Meeting,
        script: Sequence[str] | None = None,
        spare: SpareRanks | None = None,
    ) -> None:
        """`script`: the command that runs each rank, where a script drives them; it finds its place by variables.

        Processes in `spare` become the first ranks.
        """
        self._is_external = is_external = isinstance(meeting.config.site, RankProcesses)
        self._job = job
        self._script = script
        self._spare = spare
        self._handler = handler
        self._start_point = StartPoint(job)
        self._meeting = meeting
        self._folder = Path(job.folder)
        self._ranks = [meeting.machine] if is_external else _ranks_on(job.plan, meeting.machine)
        self._reader: EventReader | None = None
        self._objects: dict[tuple[str, ...], bytes] = {}  # of the script, packed once for all starts
        self._unlogged: list[tuple[Fault, Sequence[Failure]]] = []  # faults that the disk had no room for
        self.is_stopping = False  # set by a signal's handler, so it is not part of a value that others replace
        self._state = StartState(
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
            if self._meeting.machine and (store := self._ranks_store()).check([STOP]):
                self.is_stopping = store.get(STOP).decode() == STOP  # a signal on another machine, not its script
        except RunFailed as error:
            if self._state.fault is None:  # otherwise it is in the log already
                self._log(Fault(str(error), is_final=True))
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
        if decision.cause is None:
            self._write_files(decision)
        else:
            self._accept(decision)
        if self._meeting.machine == 0 and self._job.is_scripted:
            self._ranks_store().set(HISTORY, history_of(self._start_point.job(self._job, decision.batch)))
        if self._meeting.machine == 0:
            self._reader = EventReader(self._ranks_store(), self._handler)
        if self.is_stopping:
            self.stop()  # the signal came before there was a store

    def stop(self, why: str = STOP) -> None:
        """Ask the ranks of all machines to save a checkpoint as soon as they can, and to end."""
        if self._is_external and self._reader is None and self._meeting.machine == 0:
            raise Interrupted("before every rank was there")  # torchrun kills this process if it waits for them
        self.is_stopping = True
        if self._meeting.start:
            self._ranks_store().set(STOP, why)

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
            JOB: str(self._folder / "job.json"),
            KEYS: f"{self._meeting.config.keys}/{self._meeting.start}",
            ADDRESS: site.address if site else LOOPBACK,
            _NCCL_ERRORS: os.environ.get(_NCCL_ERRORS, "1"),  # abort communicators of a lost peer
        }
        interface = interface_of(site.address) if site else None
        if interface is not None and _NCCL_INTERFACE not in os.environ:
            variables[_NCCL_INTERFACE] = f"={interface}"  # "=" for exactly this name, not a prefix
        return variables

    def _start(self, children: Children) -> None:
        """Start this machine's ranks; of a script's, what rank 0 prints is seen."""
        job, script = self._folder / "job.json", self._script
        command = script or [sys.executable, "-m", "stagewright.runtime.process.rank", str(job)]
        for rank in self._ranks:
            variables, logs = self.environment(rank), self._logs(rank)
            files = (logs / "stdout.log", logs / "stderr.log")
            content = None if script else content_for(self._job.config, self._job.plan, rank, self._objects)
            spare = self._spare.become(job, variables, content, *files) if self._spare else None
            if spare is not None:
                children.adopt(spare)
                continue
            stdin = subprocess.DEVNULL if script else None
            stdout = None if script and rank == 0 else files[0]
            children.start(command, variables, content, stdin=stdin, stdout=stdout, stderr=files[1])

    def _logs(self, rank: int) -> Path:
        return self._folder / "logs" / f"start-{self._meeting.start}" / f"rank-{rank}"

    def _watch(self, children: Children) -> MachineReport | None:
        """Wait until all ranks of all machines are done, or until something happens that they have to stop for."""
        processes = dict(zip(self._ranks, children.processes(), strict=True))
        watchdog = Watchdog(self._folder, Limits(self._job.config.run.timeout, self._job.config.run.start_timeout))
        while True:
            time.sleep(_POLL_SECONDS)
            if self._reader is not None:
                self._reader.check()
            if self._handler.wants_stop() and not self.is_stopping:
                self.stop(_ENOUGH)
            codes = dict(zip(self._ranks, children.codes(), strict=True))
            if any(codes.values()):
                ended = {rank: code for rank, code in codes.items() if code}
                exits = [
                    RankExit.of(self._folder, rank, code, self._logs(rank) / "stderr.log")
                    for rank, code in ended.items()
                ]
                return MachineReport(exits=tuple(exits))
            if (peer := self._meeting.peer_fault()) is not None:
                return peer
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
            self._log(decision.fault, self._state.failures)
        self._state = replace(self._state, fault=decision.fault)
        return decision.start

    def _accept(self, decision: StartDecision) -> None:
        """Count a restart and report it, as soon as the disk has room for it; its fault is dealt with."""
        fault, cause = self._state.fault, str(decision.cause)
        first = self._state.first or fault
        self._state = replace(self._state, restarts=decision.restart, previous=fault, fault=None, first=first)
        is_told = False
        while (full := self._write_files(decision)) is not None:
            if self.is_stopping:
                raise RunFailed(f"{cause}; {full}, so it was not restarted before it was asked to stop")
            if not is_told:
                self._meeting.voice.note(f"{cause}; {full}: restart {decision.restart} waits for {_ROOM >> 10} KiB")
                is_told = True
            time.sleep(_POLL_SECONDS)
        self._meeting.voice.note(f"{cause}; restart {decision.restart} from batch {decision.batch}")

    def _write_files(self, decision: StartDecision) -> str | None:
        """Write what a start needs; before a restart, why the disk has no room for it, or None where it has."""
        try:
            if decision.cause is not None:
                require_room(self._folder)
                self._log()
                self._handler.handle(Restarted(decision.batch, decision.cause))
            for rank in self._ranks:
                status_path(self._folder, rank).unlink(missing_ok=True)  # of the start before
                self._logs(rank).mkdir(parents=True, exist_ok=True)
            self._start_point.job(self._job, decision.batch).save(self._folder / "job.json")
        except OSError as error:
            if decision.cause is None or error.errno not in DISK_FULL:
                raise
            return f"the disk of {self._folder} is full ({error.strerror})"
        return None

    def _log(self, fault: Fault | None = None, failures: Sequence[Failure] = ()) -> None:
        """Write a fault into the log, after those that are not there yet."""
        if fault is not None:
            self._unlogged.append((fault, failures))
        while self._unlogged and log_fault(self._folder, *self._unlogged[0]):
            del self._unlogged[0]

    def _ranks_store(self) -> Store:
        """The store keys of the ranks of this start."""
        return PrefixStore(str(self._meeting.start), self._meeting.open_store())


def require_room(folder: Path) -> None:
    """Raise OSError unless the disk has room for the files of a start; some systems only know by writing."""
    scratch = folder / ".room"
    try:
        scratch.write_bytes(bytes(_ROOM))
    finally:
        scratch.unlink(missing_ok=True)


def _ranks_on(plan: Plan, machine: int) -> list[int]:
    return [rank for rank, device in enumerate(plan.devices) if device.machine == machine]
