"""The supervisor of one machine's ranks: decides before every start whether there is one and from which batch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.agent.server.api import WorkerSpec

from stagewright.errors import RunFailed, counted
from stagewright.runtime.checkpoint.folder import checkpoints_folder, newest_intact
from stagewright.runtime.checkpoint.pauses import STOP
from stagewright.runtime.comm.transport import ADDRESS, LOOPBACK
from stagewright.runtime.faults import Fault, describe_fault, log_fault
from stagewright.runtime.job import Job
from stagewright.runtime.multinode.consistency import consistency_values, first_difference
from stagewright.runtime.multinode.meeting import MachineReport, Meeting, StartDecision
from stagewright.runtime.multinode.nodes import interface_of
from stagewright.runtime.process.agent import Agent, Rendezvous
from stagewright.runtime.process.log import EventReader, OnEvent
from stagewright.runtime.process.rank import KEYS, SUPERVISOR
from stagewright.runtime.process.watchdog import Limits
from stagewright.runtime.status_file import status_path

_REPORT_SECONDS = 8.0  # for the other machines to report what happened to them
_UNLIMITED = 1 << 30
_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


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
        return replace(job, start=batch, resume=str(checkpoints_folder(self._folder) / str(batch)))


class Supervisor:
    """Runs a job's ranks, start after start; every start has its own store keys.

    start 1 ── fault ──► ranks stop ── start decision ──► final, or too many restarts: RunFailed
                                                     └──► start 2, from the last batch that every machine can load
    """

    def __init__(self, job: Job, on_event: OnEvent, start_point: StartPoint, meeting: Meeting) -> None:
        self._job = job
        self._on_event = on_event
        self._start_point = start_point
        self._meeting = meeting
        self._restarts = 0
        self.is_stopping = False
        self._fault: Fault | None = None  # of the start before, once it is known
        self._last: Fault | None = None  # the one before that
        self._reader: EventReader | None = None
        self._folder = Path(job.folder)
        self._agent = self._make_agent()

    def run(self) -> None:
        """Run to the end; RunFailed after a fault without another restart."""
        try:
            self._agent.run()
            if self._meeting.machine and self._ranks_store().check([STOP]):  # another machine asked all ranks to stop
                self.is_stopping = True
        except RunFailed as error:
            if self._fault is None:  # otherwise it is in the log already
                log_fault(self._folder, Fault(str(error), is_final=True), ())
            raise RunFailed(f"{error}; more in {self._folder / 'log.txt'}") from None
        finally:
            self.close()

    def close(self) -> None:
        """Read the last events."""
        if self._reader is not None:
            self._reader.close()

    def _make_agent(self) -> Agent:
        plan, run = self._job.plan, self._job.config.run
        ranks = [rank for rank, device in enumerate(plan.devices) if device.machine == self._meeting.machine]
        port = self._meeting.config.port
        spec = WorkerSpec(
            role="rank",
            local_world_size=len(ranks),
            entrypoint=sys.executable,
            args=("-m", "stagewright.runtime.process.rank", str(self._folder / "job.json")),
            rdzv_handler=Rendezvous(self.begin, self._meeting.machine, self._meeting.machines, port),
            max_restarts=_UNLIMITED,  # `decide` counts them
            monitor_interval=0.1,
            master_addr=LOOPBACK,
            master_port=port,
        )
        limits = Limits(run.timeout, run.start_timeout)
        return Agent(spec, self._folder, ranks, plan.world, limits, self.environment, self._meeting)

    def environment(self) -> Mapping[str, str]:
        """The environment variables of ranks: the keys of this start, and the network interface to use."""
        site = self._meeting.config.site
        variables = {
            KEYS: f"{self._meeting.config.keys}/{self._meeting.start}",
            ADDRESS: site.address if site else LOOPBACK,
            SUPERVISOR: str(os.getpid()),
        }
        interface = interface_of(site.address) if site else None
        if interface is not None and _NCCL_INTERFACE not in os.environ:
            variables[_NCCL_INTERFACE] = f"={interface}"  # "=" for exactly this name, not a prefix
        return variables

    def begin(self) -> Store:
        """Before every start: report on the one before, agree where to start, and read events."""
        self.close()
        agent = self._agent
        report = MachineReport(
            consistency_values(self._job) if self._meeting.machines > 1 else {},
            tuple(self._start_point.batches()),
            exits=tuple(agent.exits),
            hung=tuple(agent.hung),
            lost=tuple(agent.lost),
        )
        if self._meeting.machine and self._meeting.start and agent.lost and self._restarts >= self._job.max_restarts:
            raise RunFailed(self._lost_text(agent.lost[0]))  # machine 0, which would decide that, is lost
        decision = self._meeting.meet(report, self.decide)
        self.accept(decision)
        for rank in range(self._job.plan.world):
            status_path(self._folder, rank).unlink(missing_ok=True)  # of the start before
        self._start_point.job(self._job, decision.batch).save(self._folder / "job.json")
        if self._meeting.machine == 0:
            self._reader = EventReader(self._ranks_store(), self._on_event)
        if self.is_stopping:
            self.stop()  # the signal came before there was a store
        return PrefixStore(f"{self._meeting.start}/agent", self._meeting.open_store())

    def accept(self, decision: StartDecision) -> None:
        """Count a restart and report it; the fault that caused it is dealt with."""
        self._fault = None
        if decision.cause is None:
            return
        self._restarts = decision.restart
        self._meeting.say(f"{decision.cause}; restart {decision.restart} from batch {decision.batch}")
        event = {"batch": decision.batch, "restart": decision.restart, "cause": decision.cause}
        self._on_event({"kind": "restarted", **event})

    def stop(self) -> None:
        """Ask the ranks of all machines to save a checkpoint as soon as they can, and to end."""
        self.is_stopping = True
        if self._meeting.start:
            self._ranks_store().set(STOP, STOP)

    def _ranks_store(self) -> Store:
        """The store keys of the ranks of this start."""
        return PrefixStore(str(self._meeting.start), self._meeting.open_store())

    def decide(self, reports: Mapping[int, MachineReport], waited: float) -> StartDecision | None:
        """Machine 0's decision, given the reports and the seconds waited; None to wait for more reports."""
        for machine, report in reports.items():
            if differs := first_difference(reports[0].values, report.values):
                name, here, there = differs
                return StartDecision(
                    failed=f"{self._meeting.name(machine)} has {name} = {there} but machine 0 has {here}; "
                    "run the same command, with the same code and data, on each machine"
                )
        lost = {number for report in reports.values() for number in report.lost}
        is_complete = len(reports) == self._meeting.machines
        if self._meeting.start > 1 and self._fault is None:
            if (
                not is_complete
                and len(reports) + len(lost - set(reports)) < self._meeting.machines
                and waited < _REPORT_SECONDS
            ):
                return None
            self._fault = self._find_fault(reports)
        if self._fault is not None and (final := self._final(self._fault)):
            return StartDecision(failed=final)
        if not is_complete:
            return None
        blind = [machine for machine, report in reports.items() if not report.sees_checkpoints]
        if blind and self._job.keeps_checkpoints:
            return StartDecision(
                failed=f"{self._meeting.name(blind[0])} can't see {self._folder}, where machine 0 saves "
                "checkpoints; choose --runs on a shared file system, or leave out --checkpoint-every"
            )
        batches = reports[0].batches
        batch = min(batches) if blind else max(batches)
        if self._fault is None:
            return StartDecision(batch)
        self._last = self._fault
        return StartDecision(batch, self._restarts + 1, self._fault.text)

    def _find_fault(self, reports: Mapping[int, MachineReport]) -> Fault:
        """What went wrong, from the reports and the ranks' failures, which all go into the log."""
        failures = self._reader.failures if self._reader else []
        silent = [machine for machine in range(self._meeting.machines) if machine not in reports]
        fault = describe_fault(
            self._job.plan,
            failures,
            [ended for report in reports.values() for ended in report.exits],
            [hung for report in reports.values() for hung in report.hung],
            [self._lost_text(machine) for report in reports.values() for machine in report.lost]
            + [f"lost {self._meeting.name(machine)}: it did not report what happened" for machine in silent],
        )
        log_fault(self._folder, fault, failures)
        return fault

    def _final(self, fault: Fault) -> str | None:
        """The error message of a fault without another restart; None where there is one."""
        is_same = self._last is not None and fault.text == self._last.text
        if not (fault.is_final or is_same or self.is_stopping or self._restarts >= self._job.max_restarts):
            return None
        return f"{fault.text}, again after {counted(self._restarts, 'restart')}" if is_same else fault.text

    def _lost_text(self, machine: int) -> str:
        lost = self._meeting.config.lost
        return f"lost {self._meeting.name(machine)}: no sign of it for {lost:g} s (see --lost-timeout)"
