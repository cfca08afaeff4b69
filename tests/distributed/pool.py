"""A pool of gloo ranks, started once per test session, that run one job after another.

    pytest ─ job ─► queue of each rank in a TCPStore ─► Rank ─► events, done or failed ─► one queue ─► pytest

The ranks are forks of a server that has already imported torch. They end with pytest, however that ends.
"""

import json
import multiprocessing
import os
import threading
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from stagewright.events import Event, Failure, Finished, decode, encode
from stagewright.runtime.job import Job
from stagewright.runtime.process.rank import Rank, state_file
from tests.parity import Run
from tests.waiting import LONG

_SIZE = 8
_LOOPBACK = "127.0.0.1"
_FOREVER = timedelta(days=1)
_POLL_SECONDS = 0.002


class PoolError(AssertionError):
    """A job failed on the pool; the message contains the traceback of the first rank that failed."""


@dataclass
class Pool:
    """Eight rank processes, started with the first job."""

    timeout: float = LONG
    processes: list[BaseProcess] = field(default_factory=list)
    _store: dist.TCPStore | None = None
    _jobs: int = 0

    def run(self, job: Job) -> Run:
        """Run a job on the first ranks of the pool; its weights are read from the files it exports."""
        assert job.config.run.export, "the pool reads weights from the files that ranks leave for an export"
        folder = Path(job.folder)
        (folder / "ranks").mkdir(exist_ok=True)
        job.save(folder / "job.json")
        if not self.processes:
            self._start()
        assert self._store is not None
        self._jobs += 1
        token = f"job-{self._jobs}"
        for rank in range(job.plan.world):
            self._store.queue_push(f"jobs/{rank}", json.dumps([token, str(folder / "job.json")]))
        try:
            events = self._collect(token, job.plan.world)
        except BaseException:
            self.close()  # the other ranks wait for the one that failed
            raise
        weights: dict[str, torch.Tensor] = {}
        for stage in job.plan.stages:
            weights |= load_file(state_file(folder, stage.index))
        return Run(job, events, weights)

    def close(self) -> None:
        """End every process; the next job starts new ones."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes, self._store = [], None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "tests.distributed.pool", "tests.models"])
        self._store = dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
        self.processes = [
            context.Process(target=_serve, args=(rank, self._store.port, str(Path.cwd())), daemon=True)
            for rank in range(_SIZE)
        ]
        for process in self.processes:
            process.start()

    def _collect(self, token: str, world: int) -> list[Event]:
        """All events until every rank is done; PoolError at the first failure."""
        assert self._store is not None
        events: list[Event] = []
        missing, limit = set(range(world)), time.monotonic() + self.timeout
        while missing:
            if self._store.queue_len(token):
                event = decode(self._store.queue_pop(token, block=False))
                if isinstance(event, Failure):
                    raise PoolError(f"rank {event.rank} failed:\n{event.traceback}")
                if isinstance(event, Finished):
                    missing.remove(event.rank)
                events.append(event)
                continue
            if dead := [rank for rank in missing if not self.processes[rank].is_alive()]:
                raise PoolError(f"ranks {dead} exited with {[self.processes[rank].exitcode for rank in dead]}")
            if time.monotonic() > limit:
                raise PoolError(f"ranks {sorted(missing)} were not done after {self.timeout:g} s")
            time.sleep(_POLL_SECONDS)
        return events


def _serve(rank: int, port: int, folder: str) -> None:
    """One rank: job after job, until the process is killed."""
    _end_with_parent()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch complains when the store is gone
    os.chdir(folder)
    torch.set_num_threads(1)
    store, control = (dist.TCPStore(_LOOPBACK, port, is_master=False, timeout=_FOREVER) for _ in range(2))
    while True:
        token, path = json.loads(store.queue_pop(f"jobs/{rank}"))

        def emit(event: Event, token: str = token) -> None:
            store.queue_push(token, encode(event))

        try:
            own = dist.PrefixStore(f"{token}/run", store)
            Rank(Job.load(Path(path)), rank, own, dist.PrefixStore(f"{token}/control", control), emit).run()
        except BaseException as error:
            emit(Failure(rank, type(error).__name__, str(error), traceback=traceback.format_exc()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
