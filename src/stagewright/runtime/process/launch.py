"""Launches the rank processes of a job: hosts their store, supervises them, and stops them together."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from torch.distributed import TCPStore

from stagewright.errors import Interrupted, UserError
from stagewright.runtime.comm.transport import LOOPBACK
from stagewright.runtime.faults import append_log
from stagewright.runtime.job import Job
from stagewright.runtime.multinode.meeting import Meeting, MeetingConfig
from stagewright.runtime.multinode.nodes import Site, bound_to, names_by_address
from stagewright.runtime.multinode.tunnel import Refusals, Tunnel, TunnelServer, store_prefix
from stagewright.runtime.process.children import SpareRanks
from stagewright.runtime.process.external import ExternalGroup
from stagewright.runtime.process.log import EventHandler
from stagewright.runtime.process.signals import stop_on_signal
from stagewright.runtime.process.supervisor import Supervisor
from stagewright.voice import SILENT, Voice


def launch(
    job: Job,
    handler: EventHandler | None = None,
    site: Site | ExternalGroup | None = None,
    voice: Voice = SILENT,
    script: Sequence[str] | None = None,
    spare: SpareRanks | None = None,
) -> bool:
    """Run this machine's ranks of a job, one process each; whether the run was asked to stop.

    On machine 0 the handler gets every event of every rank, one at a time. With an `ExternalGroup`, which has published
    the job, only the rank of this process runs, and rank 0 gets the events. `script`: the command that runs each rank.
    `spare`: processes that become ranks of the first start.
    """
    folder = Path(job.folder)
    (folder / "ranks").mkdir(exist_ok=True)
    with _open_store(job, site, folder, voice) as config:
        meeting = Meeting(config, voice)
        supervisor = Supervisor(job, handler or EventHandler(), meeting, script, spare)
        ended: str | None = None
        try:
            with stop_on_signal(supervisor.stop):
                supervisor.run()
        except Interrupted as error:
            ended = f"interrupted {error.when}"
            raise
        finally:
            meeting.leave(ended)
    return supervisor.is_stopping


@contextmanager
def _open_store(job: Job, site: Site | ExternalGroup | None, folder: Path, voice: Voice) -> Iterator[MeetingConfig]:
    """Machine 0's store: hosted on loopback here, with a tunnel server for the other machines; or a tunnel to it."""
    if isinstance(site, ExternalGroup):
        yield site.meeting(job)
        return
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
            stack.callback(_open_tunnel_server(site, port, nodes.lost_timeout, folder, voice).close)
        yield replace(config, port=port)
        del store


def _open_tunnel_server(site: Site, port: int, lost: float, folder: Path, voice: Voice) -> TunnelServer:
    node, names = site.nodes[0], dict[str, str]()
    refusals = Refusals(names)

    def refused(peer: str) -> None:
        if line := refusals.add(peer):
            append_log(folder, f"{line}\n")
            advice = f"if that machine is not part of this run, block port {node.port} for it in your firewall"
            voice.warn(f"{line}; {advice}")

    try:
        listener = bound_to(site.address, node.port)
    except OSError as error:
        raise UserError(
            f"can't listen on {site.address} port {node.port}: {error.strerror}; "
            f"give another port on each machine: --nodes {node.host}:{node.port + 1},..."
        ) from error
    # Names may take long to resolve, and nobody waits for it: until then a machine gets the slots of a stranger.
    threading.Thread(target=lambda: names.update(names_by_address(site.nodes)), daemon=True).start()
    return TunnelServer(listener, port, site.token, lost, refused, names)


@contextmanager
def bound_socket() -> Iterator[tuple[socket.socket, int]]:
    """A listening socket on loopback, because torch's store would listen on every interface."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(1024)
        yield listener, listener.getsockname()[1]
