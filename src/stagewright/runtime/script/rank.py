"""One rank of a run that a script drives: a process that runs the script, started by the supervisor.

It finds its place by its environment variables. What it asks of its engine it also tells the supervisor, which compares
the ranks: one that takes another branch would wait for the others for ever.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from stagewright.errors import first_line
from stagewright.events import Called, Failure
from stagewright.runtime.checkpoint.history import History, parse_history
from stagewright.runtime.job import Job
from stagewright.runtime.process.rank import HISTORY, JOB, KEYS, Rank, join, state_file
from stagewright.runtime.process.signals import exit_with_parent

_PACKAGE = str(Path(__file__).parents[2])


def is_rank() -> bool:
    """Whether the supervisor has started this process to run one rank of a script."""
    return JOB in os.environ and KEYS in os.environ


class ScriptRank(Rank):
    """This process's rank, from the first use of the script's engine to its last."""

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides what Ctrl-C means
        exit_with_parent()
        job = Job.load(Path(os.environ[JOB]))
        super().__init__(job, int(os.environ["RANK"]), *join(job))
        self.history: History = parse_history(self._control.get(HISTORY))
        self._calls = 0
        self._files = 0  # of weights that the script has asked for

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def call(self, what: str, where: str, contents: str = "") -> None:
        """Tell the supervisor what the script asks for, and where; a hash of what it gives."""
        self.emit(Called(self.rank, self._calls, what, where, contents))
        self._calls += 1

    def save(self, write: Callable[[list[dict[str, Tensor]]], object]) -> None:
        """Bring all weights to rank 0, which writes them; no rank continues before it has."""
        plan, self._files = self.job.plan, self._files + 1
        self.gather_weights()
        keys = [f"weights/{self._files}/{rank}" for rank in range(plan.world)]
        self._store.set(keys[self.rank], "")
        written = f"weights/{self._files}/written"
        if self.is_main:
            self._store.wait(keys)
            files = [state_file(self._folder, stage.index) for stage in plan.stages]
            write([load_file(file) for file in files])
            for file in files:
                file.unlink()
            self._store.set(written, "")
        self._store.wait([written])

    def abandon(self, error: BaseException) -> None:
        """The error is reported where it ends the script (`fail`)."""

    def _failure(self, error: BaseException) -> Failure:
        """An error of the script's own code names its file and line; a restart would meet it again."""
        frames = traceback.extract_tb(error.__traceback__)
        if not frames or any(frame.filename.startswith(_PACKAGE) for frame in frames):
            return super()._failure(error)
        where = f"{Path(frames[0].filename).name}:{frames[0].lineno}"
        text = f"{where} raised {type(error).__name__}: {first_line(error)}"
        told = "".join(traceback.format_exception(error))
        return Failure(self.rank, type(error).__name__, text, is_users=True, traceback=told)
