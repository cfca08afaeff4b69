"""The supervisor of one run: decides before every start whether there is one, and where it begins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerSpec

from stagewright.runtime.agent import Agent
from stagewright.runtime.hearing import Hearing, Listen
from stagewright.runtime.job import Job, RunFailed
from stagewright.runtime.pauses import STOP
from stagewright.runtime.rank import KEYS, position_file
from stagewright.runtime.rendezvous import LOOPBACK, Rendezvous
from stagewright.runtime.restart import Restart
from stagewright.runtime.story import Fault, log_fault, tell
from stagewright.runtime.watchdog import Limits, Watchdog


class Supervisor:
    """Runs a job's ranks, start after start; every start has store keys of its own.

    start 0 ── fault ──► ranks stop ── story ──► final, or too many: RunFailed
                                            └──► start 1, from the last batch that `restart` knows of
    """

    def __init__(self, job: Job, listen: Listen, restart: Restart, keys: str, port: int) -> None:
        self._job = job
        self._listen = listen
        self._restart = restart
        self._keys = keys
        self._port = port
        self._starts = 0
        self._is_stopping = False
        self._last: Fault | None = None
        self._hearing: Hearing | None = None
        self._folder = Path(job.folder)
        self._agent = self._make_agent()

    def run(self) -> None:
        """Run to the end; a fault that is not to be tried again is a RunFailed."""
        result = self._agent.run()
        self.close()
        if result is None or result.is_failed():
            self._account()

    def close(self) -> None:
        """Hear the last events."""
        if self._hearing is not None:
            self._hearing.close()

    def _make_agent(self) -> Agent:
        job, run = self._job, self._job.config.run
        limits = Limits(run.timeout, run.start_timeout)
        spec = WorkerSpec(
            role="rank",
            local_world_size=job.plan.world,
            entrypoint=sys.executable,
            args=("-m", "stagewright.runtime.rank", str(self._folder / "job.json")),
            rdzv_handler=Rendezvous(self._begin, 0, 1, self._port),
            max_restarts=self._most_restarts + 1,  # so that the last fault comes here too
            monitor_interval=0.1,
            master_addr=LOOPBACK,
            master_port=self._port,
        )
        ranks = range(job.plan.world)
        return Agent(
            spec,
            self._folder,
            ranks,
            job.plan.world,
            lambda: Watchdog(self._folder, limits),
            lambda: {KEYS: self._prefix},
        )

    def stop(self) -> None:
        """Have the ranks keep a checkpoint as soon as they can, and end."""
        self._is_stopping = True
        if self._starts:
            self._store().set(STOP, STOP)

    @property
    def _most_restarts(self) -> int:
        return self._job.max_restarts

    @property
    def _prefix(self) -> str:
        return f"{self._keys}/{self._starts}"

    def _begin(self) -> Store:
        """Before every start: account for the one before, choose where to begin, and listen."""
        fault = self._account() if self._starts else None  # first: its last events may complete a checkpoint
        batch = max(self._restart.batches())
        if fault is not None:
            told: dict[str, Any] = {"kind": "restarted", "batch": batch, "restart": self._starts, "cause": fault.text}
            self._listen(told)
        self._starts += 1
        for rank in range(self._job.plan.world):
            position_file(self._folder, rank).unlink(missing_ok=True)  # where the last start was is no news of this one
        self._restart.job(self._job, batch).save(self._folder / "job.json")
        self._hearing = Hearing(self._store(), self._listen)
        return PrefixStore("agent", self._store())

    def _store(self) -> Store:
        return PrefixStore(self._prefix, TCPStore(LOOPBACK, self._port, is_master=False))

    def _account(self) -> Fault:
        """Tell what went wrong; raise if it is not to be tried again."""
        assert self._hearing is not None
        self.close()
        failures = self._hearing.failures
        fault = tell(self._job.plan, failures, self._agent.deaths, self._agent.hung)
        log_fault(self._folder, fault, failures)
        is_same = self._last is not None and fault.text == self._last.text
        self._last = fault
        if fault.is_final or is_same or self._is_stopping or self._starts > self._most_restarts:
            again = f", again after {self._starts - 1} restarts" if self._starts > 1 else ""
            raise RunFailed(f"{fault.text}{again}; more in {self._folder / 'log.txt'}")
        return fault
