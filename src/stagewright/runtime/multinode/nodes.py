"""The machines of a run as `--nodes` names them: their addresses, which one this is, and the token they share.

Where torchrun or srun has started the ranks, their processes take the machines' part: `RankProcesses`."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import socket
import stat
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagewright.cluster.topology import ANYWHERE, Cluster, Machine
from stagewright.config.sections import Config, NodesConfig
from stagewright.errors import UserError, first_line
from stagewright.files import read_regular

DEFAULT_PORT = 29600
TOKEN = "STAGEWRIGHT_TOKEN"
SLURM = "slurm"
_LEAST_TOKEN = 16
_MOST_TOKEN_BYTES = 4096
_MOST_NODES = 4096
_MOST_CHARACTERS = 2**20  # that are read from scontrol


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of `--nodes`."""

    index: int
    host: str
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        return f"machine {self.index} ({self.host})"


@dataclass(frozen=True, slots=True)
class Site:
    """All machines of a run, and which one this is."""

    nodes: tuple[Node, ...]
    index: int
    address: str  # of this machine, on an interface that the others can reach
    token: str

    @property
    def is_host(self) -> bool:
        """Whether this machine hosts the store and gets the events of all ranks."""
        return self.index == 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, self.nodes))


@dataclass(frozen=True, slots=True)
class RankProcesses:
    """The processes of one rank each that torchrun or srun has started; they share a store, but no token."""

    names: tuple[str, ...]
    index: int  # this process's rank
    address: str  # of this machine, on an interface that the others can reach


def find_site(config: NodesConfig, environment: Mapping[str, str] = os.environ) -> Site | None:
    """The machines that the options name; None for a single machine."""
    if config.list is None:
        return None
    nodes, index = read_nodes(config.list, environment), config.index
    if config.list == SLURM and index is None:
        index = _slurm_number("SLURM_NODEID", environment)
    index = _own_index(nodes) if index is None else index
    if not 0 <= index < len(nodes):
        raise UserError(f"--node-index is {index} but --nodes names {len(nodes)} machines (0-{len(nodes) - 1})")
    return Site(nodes, index, _own_address(nodes, index), read_token(config.token, environment))


def read_nodes(text: str, environment: Mapping[str, str] = os.environ) -> tuple[Node, ...]:
    """The machines of `--nodes`: addresses or host names separated by commas, or those of SLURM's job."""
    if text == SLURM:
        nodes = tuple(_read_node(index, host, text) for index, host in enumerate(slurm_hosts(environment)))
    else:
        nodes = tuple(_read_node(index, piece.strip(), text) for index, piece in enumerate(text.split(",")))
    places = [(node.host, node.port) for node in nodes]
    for index, place in enumerate(places):
        if place in places[:index]:
            raise UserError(f"--nodes {_short(text)} names {place[0]}:{place[1]} twice; name each machine once")
    return nodes


def cluster_of(config: Config) -> Cluster:
    """The machines that a placement may name: this one, those of --nodes, or any if the run is emulated."""
    if config.nodes.list is not None:
        return Cluster((Machine(),) * len(read_nodes(config.nodes.list)), "the machines of --nodes")
    return ANYWHERE if config.run.emulate else Cluster()


def _read_node(index: int, piece: str, text: str) -> Node:
    """`10.0.0.1`, `10.0.0.1:29600`, `fd00::1`, `[fd00::1]:29600`, `name` or `name:29600`."""
    match = re.fullmatch(r"\[([^][]+)\](?::([0-9]+))?|([^][:]+)(?::([0-9]+))?", piece)
    host = match and (match[1] or match[3])
    port = match and (match[2] or match[4])
    if match is None and piece.count(":") > 1:
        host, port = piece, None
    bad = f"--nodes piece {_short(piece)} of {_short(text)}"
    if not host or (":" in host and not _is_address(host)):
        raise UserError(
            f"{bad} is not an address or host name; write 10.0.0.1, 10.0.0.1:29600, [fd00::1]:29600 or a name"
        )
    if not _is_address(host) and not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?", host):
        raise UserError(f"{bad} is not a host name; a name has letters, digits, dots and hyphens")
    if port is not None and (len(port) > 5 or not 0 < int(port) < 65536):
        raise UserError(f"{bad} has port {port[:8]}; ports are 1 to 65535")
    return Node(index, host, DEFAULT_PORT if port is None else int(port))


def slurm_hosts(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The hosts of SLURM's step or job, as scontrol writes out their short form `a[1-3,07],b`."""
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not listed:
        raise UserError("--nodes slurm was given but SLURM_JOB_NODELIST is not set; start the command with srun")
    bad = f"SLURM's node list {_short(listed)}"
    if listed.startswith("-") or not listed.isprintable():
        raise UserError(f"{bad} can't be read; use --nodes A,B,...")
    command = ["scontrol", "show", "hostnames", listed]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as scontrol:
            assert scontrol.stdout is not None
            hosts = scontrol.stdout.read(_MOST_CHARACTERS).split()
            scontrol.kill()  # where there is more to read
    except FileNotFoundError as error:
        raise UserError(f"{bad} needs scontrol, which is not on the PATH; or use --nodes A,B,...") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{bad} can't be read by scontrol: {first_line(error, 80)}; use --nodes A,B,...") from error
    if not 0 < len(hosts) <= _MOST_NODES:
        found = f"more than {_MOST_NODES}" if hosts else "no"
        raise UserError(f"{bad} names {found} machines according to scontrol; use --nodes A,B,...")
    return hosts


def _slurm_number(name: str, environment: Mapping[str, str]) -> int:
    try:
        return int(environment[name])
    except (KeyError, ValueError):
        found = environment.get(name)
        raise UserError(
            f"--nodes slurm was given but {name} is {found!r}; start the command with srun, or give --node-index"
        ) from None


def _own_index(nodes: Sequence[Node]) -> int:
    """The index of the one machine that has an address of this machine."""
    own = [node.index for node in nodes if any(is_own(address) for address in _addresses(node, quiet=True))]
    if len(own) == 1:
        return own[0]
    listed = ", ".join(node.host for node in nodes[:8])
    found = "none of them is" if not own else f"{len(own)} of them ({', '.join(nodes[i].host for i in own)}) are"
    raise UserError(f"--nodes names {listed}, and {found} this machine; choose one with --node-index")


def _own_address(nodes: Sequence[Node], index: int) -> str:
    """An address of this machine that the others can reach."""
    node = nodes[index]
    addresses = [address for address in _addresses(node) if is_own(address)]
    if not addresses:
        raise UserError(
            f"--nodes gives {node}, but this machine does not have that address; "
            "check --node-index, or name the address of the interface to use"
        )
    reachable = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    if not reachable and any(not _is_loopback_host(other) for other in nodes):
        raise UserError(
            f"--nodes gives {node}, which is {addresses[0]} here, an address that no other machine can reach; "
            "name the address of the interface to use"
        )
    return (reachable or addresses)[0]


def _addresses(node: Node, quiet: bool = False) -> list[str]:
    try:
        found = socket.getaddrinfo(node.host, node.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if quiet:
            return []
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--nodes gives {node}, which can't be resolved: {reason}; give its address") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def names_by_address(nodes: Sequence[Node]) -> dict[str, str]:
    """The machines' names by their addresses, without those that can't be resolved here."""
    return {address: str(node) for node in nodes for address in _addresses(node, quiet=True)}


def is_own(address: str) -> bool:
    """Whether this machine has an address: only then can a socket be bound to it."""
    try:
        with bound_to(address, 0):
            return True
    except OSError:
        return False


def bound_to(address: str, port: int) -> socket.socket:
    """A socket bound to one interface only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
    except OSError:
        bound.close()
        raise
    return bound


def read_token(path: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """The secret that all machines share, from a file that only the user can read or from the environment."""
    if path is None:
        token, where = environment.get(TOKEN, ""), f"environment variable {TOKEN}"
        if not token:
            raise UserError(f"several machines need a token; give --token FILE or {TOKEN}, the same on each")
    else:
        where = f"--token {path}"
        try:
            token = read_regular(path, _MOST_TOKEN_BYTES).decode()
            if stat.S_IMODE(Path(path).stat().st_mode) & 0o077:
                raise UserError(f"{where} can be read by others; chmod 600 {path}")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{where}: {getattr(error, 'strerror', None) or 'not text'}") from error
    try:
        token = token.strip()
        token.encode()
    except UnicodeEncodeError as error:  # of bytes in the environment
        raise UserError(f"{where} is not UTF-8 text; use letters and digits") from error
    if len(token) < _LEAST_TOKEN:
        raise UserError(f"{where} has {len(token)} characters; a token needs at least {_LEAST_TOKEN}")
    return token


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an address; None where the system does not tell."""
    for _, name in socket.if_nameindex():
        with socket.socket() as probe:
            try:
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    packed = ipaddress.ip_address(address).packed.hex()
    return next((line.split()[-1] for line in lines if line.startswith(packed)), None)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback_host(node: Node) -> bool:
    return node.host == "localhost" or (_is_address(node.host) and ipaddress.ip_address(node.host).is_loopback)


def _short(text: str) -> str:
    return repr(text[:80])
