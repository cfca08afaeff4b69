"""torch's elastic agent, which starts and stops rank processes, with our ranks, meeting and watchdog."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from stagewright.runtime.comm.transport import LOOPBACK
from stagewright.runtime.faults import HungRank, RankExit
from stagewright.runtime.multinode.meeting import Meeting
from stagewright.runtime.process.signals import preserve_signals
from stagewright.runtime.process.watchdog import Limits, Watchdog

_STOP_SECONDS = 2
_TORCH_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class Rendezvous(RendezvousHandler):
    """Calls the supervisor's `begin` before every start; that raises RunFailed where there is none."""

    def __init__(self, begin: Callable[[], Store], machine: int, machines: int, port: int) -> None:
        self._begin = begin
        self._machine = machine
        self._machines = machines
        self._port = port

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "stagewright"

    def next_rendezvous(self) -> RendezvousInfo:
        store = self._begin()
        return RendezvousInfo(store, self._machine, self._machines, RendezvousStoreInfo(LOOPBACK, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "rank"  # torch names folders after it, so it must not contain the token

    def shutdown(self) -> bool:
        return True


class Agent(LocalElasticAgent):
    """Starts the ranks of one machine, and stops them all as soon as one has failed or hangs.

    `exits`, `hung` and `lost` say what happened until the next start; the rendezvous decides whether there is one.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        folder: Path,
        ranks: Sequence[int],
        world: int,
        limits: Limits,
        environment: Callable[[], Mapping[str, str]],
        meeting: Meeting,
    ) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL))
        self.exits: list[RankExit] = []
        self.hung: list[HungRank] = []
        self.lost: list[int] = []
        self._folder = folder
        self._ranks = ranks
        self._world = world
        self._limits = limits
        self._watchdog = Watchdog(folder, limits)
        self._environment = environment
        self._meeting = meeting

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Assign ranks as the plan does, whatever the order in which machines join."""
        return [Worker(index, rank, rank, self._world, self._world) for index, rank in enumerate(self._ranks)]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.exits, self.hung, self.lost = [], [], []
        self._watchdog = Watchdog(self._folder, self._limits)
        os.environ[_TORCH_SIGNALS] = "SIGHUP,SIGQUIT"  # torch's handler would raise while processes start
        with preserve_signals(), _in_environment(self._environment()):
            started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = {rank: process.poll() for rank, process in self._processes().items()}
        if any(codes.values()):
            self.exits = [RankExit.of(self._folder, rank, code) for rank, code in codes.items() if code]
            return self._stop()
        if (other := self._meeting.peer_fault()) is not None:
            self.lost = [other] if other >= 0 else []
            return self._stop()
        running = {rank: process.pid for rank, process in self._processes().items() if codes[rank] is None}
        hung = self._watchdog.find_hung(running) if running else None
        if hung is not None:
            self.hung = [hung]
            os.kill(running[hung.rank], signal.SIGKILL)  # a stopped process ignores SIGTERM
            return self._stop()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.SUCCEEDED and not self._meeting.all_done():
            return RunResult(WorkerState.HEALTHY)
        return result

    def _exit_barrier(self) -> None:
        """Nothing to wait for: `all_done` was true before the agent got here."""

    def _processes(self) -> dict[int, Any]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {rank: handlers[index].proc for index, rank in enumerate(self._ranks) if index in handlers}

    def _stop(self) -> RunResult:
        self._meeting.announce_fault()
        self._shutdown()
        return RunResult(WorkerState.FAILED)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _STOP_SECONDS) -> None:
        if self._pcontext is not None:  # here, because not every version of torch passes a timeout on
            self._pcontext.close(death_sig, min(timeout, _STOP_SECONDS))
        super()._shutdown(death_sig)


@contextmanager
def _in_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process, which ranks inherit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
