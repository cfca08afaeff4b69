"""Emulation: the workers of all ranks in one process, run in turn and connected through memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from stagewright.errors import RunFailed, UserError
from stagewright.events import Emit, Stopped
from stagewright.runtime.checkpoint.folder import open_checkpoint
from stagewright.runtime.checkpoint.load import restore
from stagewright.runtime.checkpoint.pauses import EmulatedPauses
from stagewright.runtime.checkpoint.save import DiskSaver
from stagewright.runtime.comm.device import open_device
from stagewright.runtime.comm.memory import Memory, MemoryNetwork
from stagewright.runtime.comm.transport import Pending
from stagewright.runtime.faults import describe_fault, failure_of, log_fault
from stagewright.runtime.job import NEVER, Job
from stagewright.runtime.process.assemble import assemble
from stagewright.runtime.process.torch_flags import set_flags
from stagewright.runtime.stage.recorder import Recorder
from stagewright.runtime.stage.worker import Worker
from stagewright.schedule.action import Action


class Emulation:
    """The workers of all ranks of a job."""

    def __init__(
        self,
        job: Job,
        emit: Emit,
        settled: Callable[[], int] = lambda: NEVER,
        wants_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        memory = Memory()
        device = open_device(job.config.run.device, 0, share=True)
        set_flags(job.config)
        self.workers = [
            assemble(job, rank, MemoryNetwork(memory, rank, device), emit, _CurrentAction(), device)
            for rank in range(job.plan.world)
        ]
        self.pauses = EmulatedPauses(job.plan, job.config.checkpoint.minutes, wants_stop)
        for worker in self.workers:
            worker.gate = self.pauses.gate()
            worker.saver = DiskSaver(job, worker, emit, settled)
            if job.resume is not None:
                restore(worker, open_checkpoint(Path(job.resume)))
        self._job = job
        self._emit = emit

    def run(self) -> None:
        """Run the job to its end, or until it is asked to stop."""
        take_turns([self._named_failures(worker) for worker in self.workers])
        if self.workers[0].is_stopped:
            self._emit(Stopped(0, self.workers[0].done))

    def _named_failures(self, worker: Worker) -> Iterator[Pending]:
        """A worker's run, whose errors name the replica and the action, and leave their traceback in the run's log."""
        try:
            yield from worker.run()
        except UserError:
            raise
        except Exception as error:
            action = worker.recorder.action if isinstance(worker.recorder, _CurrentAction) else None
            failure = failure_of(worker.rank, action, error, self._job.plan.samples)
            fault, folder = describe_fault(self._job.plan, [failure], ()), Path(self._job.folder)
            log_fault(folder, fault, [failure])
            raise RunFailed(f"{fault.text}; more in {folder / 'log.txt'}") from error

    def weights(self) -> dict[str, Tensor]:
        """Every stage's newest weights and mean statistics, by the names of the whole model."""
        states: dict[str, Tensor] = {}
        take_turns([_collect(worker, states) for worker in self.workers])
        return states


class _CurrentAction(Recorder):
    """Remembers a worker's current action."""

    action: Action | None = None

    def begin(self, action: Action) -> None:
        self.action = action


def _collect(worker: Worker, states: dict[str, Tensor]) -> Iterator[Pending]:
    for item in worker.states():
        if isinstance(item, tuple):
            states |= {name: tensor.clone() for name, tensor in item[1].items()}
        else:
            yield item


def take_turns(runs: list[Iterator[Pending]]) -> None:
    """Run each until it must wait for something that is not complete, in turn; RuntimeError if all wait."""
    waiting = {run: next(run, None) for run in runs}
    while waiting:
        moved = False
        for run, pending in list(waiting.items()):
            while pending is not None and pending.is_completed():
                pending.wait()
                pending = next(run, None)
                moved = True
            waiting[run] = pending
            if pending is None:
                del waiting[run]
                moved = True
        if not moved:
            raise RuntimeError(f"{len(waiting)} of {len(runs)} emulated ranks wait for each other")
