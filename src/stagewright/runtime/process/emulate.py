"""Emulation: the workers of all ranks in one process, run in turn and connected through memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stagewright.errors import RunFailed, UserError
from stagewright.events import Emit, Stopped
from stagewright.model.chain import Chain
from stagewright.runtime.checkpoint.folder import open_checkpoint
from stagewright.runtime.checkpoint.load import restore
from stagewright.runtime.checkpoint.pauses import EmulatedPauses
from stagewright.runtime.checkpoint.save import DiskSaver
from stagewright.runtime.comm.device import open_device
from stagewright.runtime.comm.memory import Memory, MemoryNetwork
from stagewright.runtime.faults import describe_fault, failure_of, log_fault
from stagewright.runtime.job import NEVER, Job
from stagewright.runtime.process.assemble import ScriptParts, assemble
from stagewright.runtime.process.session import Session
from stagewright.runtime.process.torch_flags import set_flags
from stagewright.runtime.stage.recorder import Recorder
from stagewright.schedule.action import Action


class Emulation(Session):
    """All ranks of a job in this process."""

    def __init__(
        self,
        job: Job,
        emit: Emit,
        settled: Callable[[], int] = lambda: NEVER,
        wants_stop: Callable[[], bool] = lambda: False,
        script: ScriptParts | None = None,
        chain: Chain | None = None,
    ) -> None:
        """`chain`: the model as it was opened, which is then neither built nor recorded again."""
        memory, run = Memory(), job.config.run
        device = open_device(run.device, 0 if run.emulate else job.plan.devices[0].index, share=True)
        set_flags(job.config)
        workers = [
            assemble(job, rank, MemoryNetwork(memory, rank, device), emit, _CurrentAction(), device, script, chain)
            for rank in range(job.plan.world)
        ]
        self.pauses = EmulatedPauses(job.plan, job.config.checkpoint.minutes, wants_stop)
        for worker in workers:
            worker.gate = self.pauses.gate()
            worker.saver = DiskSaver(job, worker, emit, settled)
            if job.resume is not None:
                restore(worker, open_checkpoint(Path(job.resume)))
        super().__init__(job, workers)
        self._emit = emit

    def run(self) -> None:
        """Run the job to its end, or until it is asked to stop.

        An error of a rank names the replica and the action, and leaves its traceback in the run's log.
        """
        try:
            super().run()
        except UserError:
            raise
        except Exception as error:
            if self.current is None:  # it is not of a rank
                raise
            action = self.current.recorder.action if isinstance(self.current.recorder, _CurrentAction) else None
            failure = failure_of(self.current.rank, action, error, self.plan.samples)
            fault, folder = describe_fault(self.plan, [failure], ()), Path(self.job.folder)
            log_fault(folder, fault, [failure])
            raise RunFailed(f"{fault.text}; more in {folder / 'log.txt'}") from error
        if self.is_stopped:
            self._emit(Stopped(0, self.done))


class _CurrentAction(Recorder):
    """Remembers a worker's current action."""

    action: Action | None = None

    def begin(self, action: Action) -> None:
        self.action = action
