"""Every contiguous block of a cluster's devices: what a stage could run on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from stagewright.cluster import Cluster, Device
from stagewright.plan import cost

Array = Any  # a numpy array
_MANY = 64  # devices from which on large blocks come in steps
_STEPS = 128


@dataclass(frozen=True)
class Kinds:
    """Blocks that cost alike, as columns."""

    size: Array
    bandwidth: Array  # of the block's ring
    latency: Array
    staged: Array
    front: Array  # bandwidth of the link to the device before it
    back: Array  # and to the one behind
    device: Array  # the slowest kind of device in it

    def borderless(self) -> tuple[Kinds, Array]:
        """The kinds that differ in more than their borders, and which of them each is."""
        inner = list(zip(self.size, self.bandwidth, self.latency, self.staged, self.device, strict=True))
        first = {found: inner.index(found) for found in dict.fromkeys(inner)}
        order = {found: number for number, found in enumerate(first)}
        columns = (getattr(self, field.name)[list(first.values())] for field in fields(self))
        return Kinds(*columns), np.array([order[found] for found in inner])


@dataclass(frozen=True)
class Blocks:
    """Every contiguous block of devices a stage may take, by where it ends and how large it is."""

    devices: tuple[Device, ...]
    period: int  # devices after which positions repeat
    offset: Array  # devices behind the block, modulo the period
    size: Array
    signature: Array  # which of the kinds it is
    kinds: Kinds

    def take(self, behind: int, size: int) -> tuple[Device, ...]:
        end = len(self.devices) - behind
        return self.devices[end - size : end]


def make_blocks(cluster: Cluster, kinds: Sequence[str]) -> Blocks:
    """The blocks of a cluster; `kinds` name its devices from the fastest to the slowest."""
    devices = cluster.devices
    period = _period(cluster)
    places: list[tuple[int, int, int]] = []
    signatures: dict[tuple[float, ...], int] = {}
    for offset in range(min(period, len(devices))):
        for size in _sizes(len(devices), period, offset):
            signature = (size, *_block(cluster, offset, size, period, kinds))
            places.append((offset, size, signatures.setdefault(signature, len(signatures))))
    offsets, sizes, numbers = (np.array(column) for column in zip(*places, strict=True))
    columns = Kinds(*(np.array(column) for column in zip(*signatures, strict=True)))
    return Blocks(devices, period, offsets, sizes, numbers, columns)


def _period(cluster: Cluster) -> int:
    """Positions repeat from machine to machine where all are alike, and from device to device where all links are."""
    machine = cluster.machines[0]
    if any(other != machine for other in cluster.machines):
        return len(cluster.devices)
    if len(machine.levels) <= 1 and (len(cluster.machines) == 1 or machine.devices == 1):
        return 1
    return machine.devices or 1


def _sizes(devices: int, period: int, offset: int) -> Iterator[int]:
    """Every size; from many devices on, large blocks are whole machines, or whole steps of a flat cluster."""
    step = max(period, -(-devices // _STEPS))
    for size in range(1, devices - offset + 1):
        if devices <= _MANY or size <= 2 * step or (offset == 0 and size % step == 0):
            yield size


def _block(
    cluster: Cluster, offset: int, size: int, period: int, kinds: Sequence[str]
) -> tuple[float, float, bool, float, float, int]:
    devices = cluster.devices
    end = len(devices) - offset
    block = devices[end - size : end]
    fabric = cost.ring_fabric(cluster, block)

    def border(device: int) -> float:
        """The link between a device and the one before it; nothing crosses the cluster's ends."""
        within = 0 < device < len(devices)
        return cluster.link(devices[device - 1], devices[device]).bandwidth if within else float("inf")

    kind = max(kinds.index(cluster.kind_of(device)) for device in block)
    back = border(end if offset else end - period)  # the same position, where something may follow
    return fabric.bandwidth, fabric.latency, fabric.staged, border(end - size), back, kind


def as_kind(cluster: Cluster, devices: Sequence[Device], kinds: Sequence[str]) -> Kinds:
    fabric = cost.ring_fabric(cluster, devices)
    others = [device for device in cluster.devices if device not in set(devices)]
    border = max((cluster.link(devices[0], other).bandwidth for other in others), default=float("inf"))
    kind = max(kinds.index(cluster.kind_of(device)) for device in devices)
    values = (len(devices), fabric.bandwidth, fabric.latency, fabric.staged, border, border, kind)
    return Kinds(*(np.array([value]) for value in values))
