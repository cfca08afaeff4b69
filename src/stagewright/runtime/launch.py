"""The supervisor: starts a rank process for every device, listens to them, and ends them together."""

from __future__ import annotations

import json
import logging
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from stagewright.runtime.job import Interrupted, Job, RunFailed
from stagewright.runtime.rank import EVENTS, position_file
from stagewright.runtime.recorder import last_action

Listen = Callable[[dict[str, Any]], None]
LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.02
_PATIENCE_SECONDS = 2


def launch(job: Job, listen: Listen) -> None:
    """Run a job on this machine, one process a rank; `listen` hears every event, one at a time."""
    folder = Path(job.folder)
    (folder / "ranks").mkdir(exist_ok=True)
    job.save(folder / "job.json")
    token = secrets.token_hex(16)
    with bound_socket() as (listener, port):
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        agent = _Agent(
            WorkerSpec(
                role="rank",
                local_world_size=job.plan.world,
                entrypoint=sys.executable,
                args=("-m", "stagewright.runtime.rank", str(folder / "job.json")),
                rdzv_handler=_OneMachine(store, token, port),
                max_restarts=0,
                monitor_interval=0.1,
                master_addr=LOOPBACK,
                master_port=port,
            ),
            DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
        )
        hearing = _Hearing(PrefixStore(token, TCPStore(LOOPBACK, port, is_master=False)), listen)
        with _agent_log(folder), _own_signals():
            try:
                result = agent.run()
            except SignalException as error:
                raise Interrupted(f"by {signal.Signals(error.sigval).name}") from error
            finally:
                hearing.close()
    if result is None or result.is_failed():
        story = _story(job, hearing.failures, result)
        _log_failures(folder, story, hearing.failures)
        raise RunFailed(f"{story}; more in {folder / 'log.txt'}")


class _Agent(LocalElasticAgent):
    """torch's agent, with less patience: a rank that does not end by itself is killed."""

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _PATIENCE_SECONDS) -> None:
        if self._pcontext is not None:
            self._pcontext.close(death_sig, timeout=min(timeout, _PATIENCE_SECONDS))
        super()._shutdown(death_sig)


class _OneMachine(RendezvousHandler):
    """The rendezvous of a single machine: a store that exists already, and nobody else to wait for."""

    def __init__(self, store: Store, token: str, port: int) -> None:
        self._store = store
        self._token = token
        self._port = port

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "one-machine"

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(f"{self._token}/agent", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._token

    def shutdown(self) -> bool:
        return True


class _Hearing:
    """A thread that takes events off the store, keeps the failures and passes on the rest."""

    def __init__(self, store: Store, listen: Listen) -> None:
        self.failures: list[dict[str, Any]] = []
        self._store = store
        self._listen = listen
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hear what is there already, then stop."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_POLL_SECONDS):
            self._drain()
        self._drain()

    def _drain(self) -> None:
        while self._store.queue_len(EVENTS):
            event = json.loads(self._store.queue_pop(EVENTS, block=False))
            if event["kind"] == "failure":
                self.failures.append(event)
            else:
                self._listen(event)


def _story(job: Job, failures: list[dict[str, Any]], result: RunResult | None) -> str:
    """One message: who failed first, where, at what, and why."""
    primary = [failure for failure in failures if not failure["is_secondary"]]
    ended = {} if result is None else result.failures
    killed = {rank: death for rank, death in ended.items() if death.exitcode < 0}
    if primary:
        failure = primary[0]
        if failure["is_users"] and failure["action"] is None:
            return str(failure["cause"]).partition(": ")[2]
        action, stage = failure["action"] or (None, None)
        return f"{job.plan.name_replica(failure['rank'], stage)} failed at {action or 'start'}: {failure['cause']}"
    if killed:
        rank, death = min(killed.items(), key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[0]))
        action = last_action(position_file(Path(job.folder), rank), rank)
        stage = None if action is None else action.stage
        name = signal.Signals(-death.exitcode).name
        return f"{job.plan.name_replica(rank, stage)} was killed by {name} at {action or 'start'}"
    if failures:
        failure = failures[0]
        return f"{job.plan.name_replica(failure['rank'])} failed: {failure['cause']}"
    return f"a rank ended without a word; its output is in {Path(job.folder) / 'logs'}"


def _log_failures(folder: Path, story: str, failures: list[dict[str, Any]]) -> None:
    """Keep every rank's own account, the secondary ones as well, in the run's log."""
    with (folder / "log.txt").open("a") as log:
        log.write(f"{story}\n")
        for failure in failures:
            log.write(f"rank {failure['rank']}:\n{failure['traceback']}\n")


@contextmanager
def bound_socket() -> Iterator[tuple[socket.socket, int]]:
    """A listening socket on loopback: torch's store would listen on every interface by itself."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(1024)
        yield listener, listener.getsockname()[1]


@contextmanager
def _agent_log(folder: Path) -> Iterator[None]:
    """Send what torch's agent logs to the run's own log instead of the screen."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler = logging.FileHandler(folder / "log.txt")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    handlers, propagate = logger.handlers[:], logger.propagate
    children = [
        logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(logger.name + ".")
    ]
    kept = {child: (child.handlers[:], child.propagate) for child in children}
    for child in children:
        child.handlers[:], child.propagate = [], True
    logger.handlers[:], logger.propagate = [handler], False
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        for child, (child_handlers, child_propagate) in kept.items():
            child.handlers[:], child.propagate = child_handlers, child_propagate
        handler.close()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Put the caller's signal handlers back after the agent has installed its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    kept = {number: signal.getsignal(number) for number in signals}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
