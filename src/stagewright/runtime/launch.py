"""Runs a job's rank processes from this one: hosts their store, supervises them, and ends them together."""

from __future__ import annotations

import logging
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import SignalException

from stagewright.runtime.hearing import Listen
from stagewright.runtime.job import Interrupted, Job
from stagewright.runtime.rendezvous import LOOPBACK
from stagewright.runtime.restart import Restart
from stagewright.runtime.signals import on_signal
from stagewright.runtime.supervise import Supervisor


def launch(job: Job, listen: Listen, restart: Restart | None = None) -> None:
    """Run a job on this machine, one process a rank; `listen` hears every event, one at a time."""
    folder = Path(job.folder)
    (folder / "ranks").mkdir(exist_ok=True)
    keys = secrets.token_hex(16)
    with bound_socket() as (listener, port):
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        with _agent_log(folder), _own_signals():
            supervisor = Supervisor(job, listen, restart or Restart(), keys, port)
            try:
                with on_signal(supervisor.stop):
                    supervisor.run()
            except SignalException as error:
                raise Interrupted(f"by {signal.Signals(error.sigval).name}") from error
            finally:
                supervisor.close()
        del store


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
