"""One rank of a run that a script drives: a process that runs the script, started by the supervisor.

It finds its place by its environment variables. What it asks of its engine it also tells the supervisor, which compares
the ranks: one that takes another branch would wait for the others for ever.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from stagewright.errors import first_line
from stagewright.events import Called, Event, Failure, Finished, Ready, Score, Scored, Stopped, encode
from stagewright.runtime.checkpoint.folder import open_checkpoint
from stagewright.runtime.checkpoint.history import History, parse_history
from stagewright.runtime.checkpoint.load import restore
from stagewright.runtime.checkpoint.pauses import Pauses
from stagewright.runtime.checkpoint.save import DiskSaver
from stagewright.runtime.comm.channel import Network
from stagewright.runtime.comm.device import open_device
from stagewright.runtime.comm.nccl import open_network
from stagewright.runtime.comm.transport import LostPeer, Place
from stagewright.runtime.faults import failure_of, shortage_of
from stagewright.runtime.job import Job
from stagewright.runtime.process.assemble import ScriptParts, assemble
from stagewright.runtime.process.rank import (
    EVENTS,
    HISTORY,
    JOB,
    KEYS,
    clock_name,
    exit_now,
    gather_weights,
    settled_batch,
    state_file,
    wait_for,
)
from stagewright.runtime.process.signals import exit_with_parent
from stagewright.runtime.process.torch_flags import keep_freed_memory, set_flags
from stagewright.runtime.script.session import Session
from stagewright.runtime.stage.recorder import make_recorder
from stagewright.runtime.stage.scores import exchange_scores
from stagewright.runtime.status_file import last_action, status_path

_BLAME_SECONDS = 2.0  # that a rank waits before it reports a lost peer: the peer's own report comes first
_PACKAGE = str(Path(__file__).parents[2])


def is_rank() -> bool:
    """Whether the supervisor has started this process to run one rank of a script."""
    return JOB in os.environ and KEYS in os.environ


class ScriptRank:
    """This process's rank, from the first use of the script's engine to its last."""

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides what Ctrl-C means
        exit_with_parent()
        self.job = job = Job.load(Path(os.environ[JOB]))
        self.rank = int(os.environ["RANK"])
        self._folder = Path(job.folder)
        torch.set_num_threads(job.config.run.threads or 1)
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self._store, self._control = (
            PrefixStore(os.environ[KEYS], TCPStore(*address, is_master=False, timeout=timedelta(seconds=job.patience)))
            for _ in range(2)
        )
        self.history: History = parse_history(self._control.get(HISTORY))
        self._calls = 0
        self._exchanges = 0
        self._pauses: Pauses | None = None
        self._network: Network | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def emit(self, event: Event) -> None:
        self._control.queue_push(EVENTS, encode(event))

    def open(self, script: ScriptParts) -> Session:
        """Build the rank's worker and connect it with the others."""
        job, rank = self.job, self.rank
        set_flags(job.config)
        keep_freed_memory()
        device = open_device(job.config.run.device, job.plan.devices[rank].index, share=job.config.run.share_gpu)
        self._network = open_network(job.config, self._store, rank, Place.of(job.plan, rank), job.patience, device)
        self._recorder = recorder = make_recorder(status_path(self._folder, rank), device)
        worker = assemble(job, rank, self._network, self.emit, recorder, device, script)
        worker.saver = DiskSaver(job, worker, self.emit, partial(settled_batch, self._control))
        session = Session(job, [worker], wait_for)
        if job.resume is not None:
            restore(worker, open_checkpoint(Path(job.resume)))
        self.emit(Ready(rank, time.monotonic(), clock_name()))
        self._pauses = Pauses(self._control, rank, job.plan, worker.gate, job.config.checkpoint.minutes)
        session.begin()
        self._session = session
        return session

    def call(self, what: str, where: str, contents: str = "") -> None:
        """Tell the supervisor what the script asks for, and where; a hash of what it gives."""
        self.emit(Called(self.rank, self._calls, what, where, contents))
        self._calls += 1

    def exchange(self, batch: int, scores: Mapping[int, Score]) -> Mapping[int, Score]:
        """The scores of all ranks of the last stage; the supervisor gets them too."""
        score = scores.get(self.rank)
        if score is not None:
            self.emit(Scored(self.rank, batch, score))
        last = self.job.plan.stages[-1].ranks
        self._exchanges += 1
        exchange = exchange_scores(self._store, f"scores/{self._exchanges}", self.rank, last, score)
        try:
            while True:
                wait_for(next(exchange))
        except StopIteration as done:
            return dict(zip(last, done.value, strict=True))

    def save(self, write: Callable[[list[dict[str, Tensor]]], object]) -> None:
        """Bring all weights to rank 0, which writes them; no rank continues before it has."""
        assert self._network is not None
        self._exchanges += 1
        worker, plan = self._session.workers[0], self.job.plan
        self._session.drain()
        gather_weights(worker, self._folder, self._network.host)
        keys = [f"weights/{self._exchanges}/{rank}" for rank in range(plan.world)]
        self._store.set(keys[self.rank], "")
        written = f"weights/{self._exchanges}/written"
        if self.is_main:
            self._store.wait(keys)
            files = [state_file(self._folder, stage.index) for stage in plan.stages]
            write([load_file(file) for file in files])
            for file in files:
                file.unlink()
            self._store.set(written, "")
        self._store.wait([written])

    def close(self, *, is_stopped: bool = False) -> None:
        """The script has ended, or was asked to stop; what is being written is written first."""
        session = self._session
        session.close()
        if self._pauses is not None:
            self._pauses.close()
        if is_stopped:
            self.emit(Stopped(self.rank, session.done))
        self.emit(Finished(self.rank, self._recorder.spans()))

    def fail(self, error: BaseException, trace: TracebackType | None) -> None:
        """Report what ends this rank, and end it."""
        if isinstance(error, torch.OutOfMemoryError):
            self.emit(shortage_of(self.rank))
        self.emit(self._failure(error, trace))
        if isinstance(error, LostPeer):
            time.sleep(_BLAME_SECONDS)
        traceback.print_exception(error)
        exit_now(1)

    def _failure(self, error: BaseException, trace: TracebackType | None) -> Failure:
        """An error of the script's own code names its file and line; a restart would meet it again."""
        frames = traceback.extract_tb(trace)
        if frames and not any(frame.filename.startswith(_PACKAGE) for frame in frames):
            where = f"{Path(frames[0].filename).name}:{frames[0].lineno}"
            text = f"{where} raised {type(error).__name__}: {first_line(error)}"
            told = "".join(traceback.format_exception(error))
            return Failure(self.rank, type(error).__name__, text, is_users=True, traceback=told)
        action = last_action(status_path(self._folder, self.rank), self.rank)
        try:
            raise error
        except BaseException:
            return failure_of(self.rank, action, error, self.job.plan.samples, is_secondary=isinstance(error, LostPeer))
