"""Two machines of one: network namespaces that a pair of virtual interfaces connects, as fast as a real network.

    namespace 0 ── eth ────── 1 Gb/s each way, by tc tbf ────── eth ── namespace 1

A namespace has no name: it lasts as long as a process is in it. An idle process of each (`cat`) ends when its input
does, which is when this process ends, however it does. So nothing can be left behind, and nothing needs root where
users may make namespaces of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stagewright.bench.demo.ranks import HERE, Where
from stagewright.cluster.catalog import shipped
from stagewright.cluster.topology import Link
from stagewright.runtime.comm.transport import ADDRESS
from stagewright.runtime.process.children import Children

_RATE = "1gbit"
_TOOLS = ("unshare", "nsenter", "ip", "tc", "cat")
_NETWORK = "10.77.0"
_INTERFACE = "eth"
_OWN_USER = ("--user", "--map-root-user")  # for users who are not root, and containers without its rights
_SECONDS = 10.0
_RECEIVED, _SENT = 0, 8  # columns of /proc/PID/net/dev after its name


@dataclass(frozen=True, slots=True)
class Machines:
    """Where the two ranks of a side run, and the link between them; None: loopback, whose speed a profile measures."""

    places: tuple[Where, Where]
    link: Link | None

    @property
    def title(self) -> str:
        if self.link is None:
            return "two processes of this machine, over loopback"
        return "two network namespaces with 1 Gb/s between them (tc tbf), one rank each"

    @property
    def nodes(self) -> str | None:
        return None if self.link is None else f"{_NETWORK}.1,{_NETWORK}.2"


@contextmanager
def two_machines(loopback: bool) -> Iterator[tuple[Machines, str]]:
    """Two machines, and why they are not namespaces where they are not."""
    with Children() as children:
        yield (Machines((HERE, HERE), None), "--loopback") if loopback else _connected(children)


def _connected(children: Children) -> tuple[Machines, str]:
    alone = Machines((HERE, HERE), None)
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return alone, f"{missing[0]} is not installed"
    why = ""
    for own_user in ((), _OWN_USER) if os.geteuid() == 0 else (_OWN_USER,):
        try:
            return _namespaces(children, own_user), ""
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            why = said[-1] if said else "no message"
            children.stop()
    return alone, why


def _namespaces(children: Children, own_user: Sequence[str]) -> Machines:
    """Start the idle process of each namespace and connect them; the second is made as the user of the first."""
    enter = ("--user", "--preserve-credentials") if own_user else ()
    first = _idle(children, ["unshare", *own_user, "--net"])
    into_first = ["nsenter", "--target", str(first), *enter]
    second = _idle(children, [*into_first, "unshare", "--net"] if own_user else ["unshare", "--net"])
    inside = [[*into_first, "--net"], ["nsenter", "--target", str(second), *enter, "--net"]]
    names = (_INTERFACE, "type", "veth", "peer", "name", _INTERFACE)
    _do([*inside[0], "ip", "link", "add", *names, "netns", str(second)])
    for number, command in enumerate(inside):
        _do([*command, "ip", "addr", "add", f"{_NETWORK}.{number + 1}/24", "dev", _INTERFACE])
        for interface in ("lo", _INTERFACE):
            _do([*command, "ip", "link", "set", interface, "up"])
        shape = ("rate", _RATE, "burst", "256kb", "latency", "100ms")
        _do([*command, "tc", "qdisc", "add", "dev", _INTERFACE, "root", "tbf", *shape])
    one, two = (
        Where(tuple(command), {"GLOO_SOCKET_IFNAME": _INTERFACE, ADDRESS: f"{_NETWORK}.{number + 1}"})
        for number, command in enumerate(inside)
    )
    return Machines((one, two), shipped().links["net-1g"])


def _idle(children: Children, command: Sequence[str]) -> int:
    """Start a process that only keeps its namespace, and return its id once it is in there."""
    process = children.start(
        [*command, "sh", "-c", "echo ready; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    if not process.stdout.readline():
        raise OSError(process.stderr.read())
    return process.pid


def _do(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)


def bytes_passed(machines: Machines, pid: int) -> int | None:
    """Bytes that a rank's machine has sent and received, by its interface; None over loopback, which others use too."""
    if machines.link is None:
        return None
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == _INTERFACE:
            columns = figures.split()
            return int(columns[_RECEIVED]) + int(columns[_SENT])
    return None
