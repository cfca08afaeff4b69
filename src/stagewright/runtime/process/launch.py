"""Launches the rank processes of a job: hosts their store, supervises them, and stops them together."""

from __future__ import annotations

import logging
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import SignalException

from stagewright.errors import Interrupted
from stagewright.runtime.comm.transport import LOOPBACK
from stagewright.runtime.job import Job
from stagewright.runtime.multinode.meeting import Meeting, MeetingConfig, Say
from stagewright.runtime.multinode.nodes import Site, bound_to
from stagewright.runtime.multinode.tunnel import Tunnel, TunnelServer, store_prefix
from stagewright.runtime.process.log import OnEvent
from stagewright.runtime.process.signals import preserve_signals, stop_on_signal
from stagewright.runtime.process.supervisor import StartPoint, Supervisor


def launch(
    job: Job,
    on_event: OnEvent,
    start_point: StartPoint | None = None,
    site: Site | None = None,
    say: Say = lambda line: None,
) -> bool:
    """Run this machine's ranks of a job, one process each; whether the run was asked to stop.

    On machine 0 `on_event` gets every event of every rank, one at a time.
    """
    folder = Path(job.folder)
    (folder / "ranks").mkdir(exist_ok=True)
    with (
        _agent_log(folder),
        preserve_signals(signal.SIGHUP, signal.SIGQUIT),
        _open_store(job, site, folder) as config,
    ):
        meeting = Meeting(config, say)
        supervisor = Supervisor(job, on_event, start_point or StartPoint(), meeting)
        ended: str | None = None
        try:
            with stop_on_signal(supervisor.stop):
                supervisor.run()
        except SignalException as error:
            ended = f"interrupted by {signal.Signals(error.sigval).name}"
            raise Interrupted(f"by {signal.Signals(error.sigval).name}") from error
        except Interrupted as error:
            ended = f"interrupted {error.when}"
            raise
        finally:
            meeting.leave(ended)
    return supervisor.is_stopping


@contextmanager
def _open_store(job: Job, site: Site | None, folder: Path) -> Iterator[MeetingConfig]:
    """Machine 0's store: hosted on loopback here, with a tunnel server for the other machines; or a tunnel to it."""
    nodes = job.config.nodes
    keys = store_prefix(site.token) if site else secrets.token_hex(16)
    config = MeetingConfig(0, keys, folder, nodes.join_timeout, nodes.lost_timeout, site)
    if site is not None and not site.is_host:
        host = site.nodes[0]
        tunnel = Tunnel((host.host, host.port), site.address, site.token, nodes.lost_timeout)
        try:
            yield replace(config, port=tunnel.port)
        finally:
            tunnel.close()
        return
    with ExitStack() as stack:
        listener, port = stack.enter_context(bound_socket())
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        if site is not None:
            stack.callback(_open_tunnel_server(site, port, nodes.lost_timeout, folder / "log.txt").close)
        yield replace(config, port=port)
        del store


def _open_tunnel_server(site: Site, port: int, lost: float, log: Path) -> TunnelServer:
    def refused(peer: str) -> None:
        with log.open("a") as file:
            file.write(f"refused {peer}: it did not prove to know the token\n")

    node = site.nodes[0]
    try:
        listener = bound_to(site.address, node.port)
    except OSError as error:
        raise ValueError(
            f"can't listen on {site.address} port {node.port}: {error.strerror}; "
            f"give another port on each machine: --nodes {node.host}:{node.port + 1},..."
        ) from error
    return TunnelServer(listener, port, site.token, lost, refused)


@contextmanager
def bound_socket() -> Iterator[tuple[socket.socket, int]]:
    """A listening socket on loopback, because torch's store would listen on every interface."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(1024)
        yield listener, listener.getsockname()[1]


@contextmanager
def _agent_log(folder: Path) -> Iterator[None]:
    """Send the log of torch's agent to the run's log instead of the screen."""
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
