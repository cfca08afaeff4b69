"""How the GPUs of a machine reach each other: the matrix that `nvidia-smi topo -m` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stagewright.hardware.gpu import Nvml, bus_of, bus_text

_MOST_LINKS = 36
_SWITCH = 2  # NVML's device type of a switch at the far end of a link
_TO_SWITCH = "switch"


class LinkKind(StrEnum):
    """The kinds of connection, nearest first; values are the words of `nvidia-smi topo -m`."""

    SELF = "X"
    NVLINK = "NV"
    BRIDGE = "PIX"  # at most one PCIe bridge
    BRIDGES = "PXB"  # several PCIe bridges, but no host bridge
    HOST = "PHB"  # through a PCIe host bridge, usually the CPU
    NODE = "NODE"  # between host bridges of one NUMA node
    SYSTEM = "SYS"  # across sockets


@dataclass(frozen=True, slots=True)
class Connection:
    """How one GPU reaches another; `str` gives the cell of the matrix."""

    kind: LinkKind
    links: int = 0  # NVLinks in parallel

    def __str__(self) -> str:
        return f"{self.kind}{self.links}" if self.kind is LinkKind.NVLINK else str(self.kind)


SELF = Connection(LinkKind.SELF)
_COMMON_ANCESTORS = {10 * level: Connection(kind) for level, kind in enumerate(list(LinkKind)[2:], 1)}  # NVML's levels
_COMMON_ANCESTORS[0] = Connection(LinkKind.BRIDGE)


@dataclass(frozen=True, slots=True)
class Topology:
    """The connection of every pair of GPUs; None where the driver does not say."""

    rows: tuple[tuple[Connection | None, ...], ...]
    processors: int | None = None  # that the GPUs have an affinity to; None where the text does not say

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, indices: Sequence[int]) -> Topology:
        """The matrix of some of the GPUs."""
        return Topology(tuple(tuple(self.rows[one][other] for other in indices) for one in indices), self.processors)

    def texts(self) -> list[list[str]]:
        """The matrix as strings."""
        return [["?" if cell is None else str(cell) for cell in row] for row in self.rows]

    def table(self) -> list[str]:
        """The matrix as aligned lines."""
        names = [f"GPU{index}" for index in range(len(self))]
        width = max((len(name) for name in names), default=4)
        lines = ["  ".join([" " * width, *(name.rjust(width) for name in names)])]
        return lines + [
            "  ".join([name.ljust(width), *(cell.rjust(width) for cell in row)]).rstrip()
            for name, row in zip(names, self.texts(), strict=True)
        ]


def read_topology(nvml: Nvml) -> Topology:
    """The matrix of this machine, from its driver."""
    gpus = [(handle, bus_of(nvml, handle), _links(nvml, handle)) for handle in nvml.handles()]

    def connection(one: int, other: int) -> Connection | None:
        if one == other:
            return SELF
        (here, _, ours), (there, bus, theirs) = gpus[one], gpus[other]
        direct = 0 if bus is None else ours.count(bus)
        if links := direct or min(ours.count(_TO_SWITCH), theirs.count(_TO_SWITCH)):
            return Connection(LinkKind.NVLINK, links)
        return _COMMON_ANCESTORS.get(nvml.ask("nvmlDeviceGetTopologyCommonAncestor", here, there))

    places = range(len(gpus))
    return Topology(tuple(tuple(connection(one, other) for other in places) for one in places))


def _links(nvml: Nvml, handle: Any) -> list[str]:
    """The far end of each active NVLink: a PCI address, or `switch`."""
    ends: list[str] = []
    for link in range(_MOST_LINKS):
        if nvml.ask("nvmlDeviceGetNvLinkState", handle, link) != 1:
            continue
        info = nvml.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        is_switch = nvml.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == _SWITCH
        ends.append(_TO_SWITCH if is_switch else "" if info is None else bus_text(info))
    return ends
