"""What the search chooses from: contiguous blocks of devices, and contiguous segments of a model's units.

Both are columns of numpy arrays, so that the time and memory of every segment on every block is one expression.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from stagewright.cluster.specs import Software
from stagewright.cluster.topology import HOST, Cluster, Device
from stagewright.plan import cost
from stagewright.plan.estimate import UnitSums

Array = Any  # a numpy array
_MANY = 64  # with more devices than this, large blocks come in steps
_STEPS = 128  # at most so many sizes of large blocks


@dataclass(frozen=True)
class BlockKinds:
    """Kinds of blocks, as columns: blocks of one kind cost the same."""

    size: Array
    bandwidth: Array  # of the block's ring
    latency: Array
    staged: Array
    front: Array  # bytes per second that a replica gets over the link to the device before the block
    back: Array  # the same over the link to the device behind it
    device: Array  # the slowest kind of device in the block
    memory: Array  # bytes of its smallest device
    machines: Array

    def borderless(self) -> tuple[BlockKinds, Array]:
        """The kinds without their borders, each once, and for every kind the index of its borderless one."""
        inner = list(zip(self.size, self.bandwidth, self.latency, self.staged, self.device, self.machines, strict=True))
        first = {found: inner.index(found) for found in dict.fromkeys(inner)}
        order = {found: number for number, found in enumerate(first)}
        columns = (getattr(self, field.name)[list(first.values())] for field in fields(self))
        return BlockKinds(*columns), np.array([order[found] for found in inner])


@dataclass(frozen=True)
class Blocks:
    """Every contiguous block of devices that a stage may take, by its end and its size."""

    devices: tuple[Device, ...]
    period: int  # devices after which positions repeat
    offset: Array  # devices behind the block, modulo the period
    size: Array
    signature: Array  # index of its kind
    kinds: BlockKinds


def make_blocks(cluster: Cluster, kinds: Sequence[str], memories: Sequence[float] | None = None) -> Blocks:
    """The blocks of a cluster; `kinds` name its devices from the fastest to the slowest, `memories` are their bytes."""
    memories = memories or [float("inf")] * len(kinds)
    devices = cluster.devices
    period = _period(cluster)
    places: list[tuple[int, int, int]] = []
    signatures: dict[tuple[float, ...], int] = {}
    for offset in range(min(period, len(devices))):
        for size in _sizes(len(devices), period, offset):
            signature = (size, *_block(cluster, devices, offset, size, period, kinds, memories))
            places.append((offset, size, signatures.setdefault(signature, len(signatures))))
    offsets, sizes, numbers = (np.array(column) for column in zip(*places, strict=True))
    columns = BlockKinds(*(np.array(column) for column in zip(*signatures, strict=True)))
    return Blocks(devices, period, offsets, sizes, numbers, columns)


def _period(cluster: Cluster) -> int:
    """Positions repeat after a machine if all machines are equal, and after a device if all links are equal."""
    machine = cluster.machines[0]
    if any(other != machine for other in cluster.machines):
        return len(cluster.devices)
    if len(machine.levels) <= 1 and (len(cluster.machines) == 1 or machine.devices == 1):
        return 1
    return machine.devices or 1


def _sizes(devices: int, period: int, offset: int) -> Iterator[int]:
    """Every size; with many devices, large blocks are whole machines, or whole steps of a flat cluster."""
    step = max(period, -(-devices // _STEPS))
    for size in range(1, devices - offset + 1):
        if devices <= _MANY or size <= 2 * step or (offset == 0 and size % step == 0):
            yield size


def _block(
    cluster: Cluster,
    devices: tuple[Device, ...],
    offset: int,
    size: int,
    period: int,
    kinds: Sequence[str],
    memories: Sequence[float],
) -> tuple[float, ...]:
    end = len(devices) - offset
    block = devices[end - size : end]

    def border(device: int) -> float:
        """What a replica gets over the link between a device and the one before it; nothing crosses the ends."""
        within = 0 < device < len(devices)
        return _shared_bandwidth(cluster, devices[device - 1], devices[device], block) if within else float("inf")

    back = border(end if offset else end - period)  # the same position, where something may follow
    return _columns(cluster, block, border(end - size), back, kinds, memories)


def _shared_bandwidth(cluster: Cluster, one: Device, other: Device, block: Sequence[Device]) -> float:
    """Bytes per second of a replica's messages, where the replicas of a machine share its network card and its host."""
    sharers = max(Counter(device.machine for device in block).values())
    found = float("inf")
    for (edge, _), link in cluster.path(one, other):
        is_shared = edge[1] == HOST or link is cluster.network
        found = min(found, link.bandwidth / (sharers if is_shared else 1))
    return found


def _columns(
    cluster: Cluster,
    block: Sequence[Device],
    front: float,
    back: float,
    kinds: Sequence[str],
    memories: Sequence[float],
) -> tuple[float, ...]:
    fabric = cost.ring_fabric(cluster, block)
    own = {kinds.index(cluster.kind_of(device)) for device in block}
    machines = len({device.machine for device in block})
    memory = min(memories[kind] for kind in own)
    return fabric.bandwidth, fabric.latency, fabric.staged, front, back, max(own), memory, machines


def as_kind(cluster: Cluster, devices: Sequence[Device], kinds: Sequence[str]) -> BlockKinds:
    """Some devices as one block; `kinds` name devices from the fastest to the slowest."""
    others = [device for device in cluster.devices if device not in set(devices)]
    border = max((_shared_bandwidth(cluster, devices[0], other, devices) for other in others), default=float("inf"))
    values = (len(devices), *_columns(cluster, devices, border, border, kinds, [float("inf")] * len(kinds)))
    return BlockKinds(*(np.array([value]) for value in values))


@dataclass(frozen=True)
class Segments:
    """Every contiguous segment of units, as arrays over pairs (first, last), ordered by first.

    Segments begin and end at points: at all units, or only at some of them to keep the arrays small.
    """

    units: int  # between neighbouring points
    points: Array
    first: Array  # indices of points
    last: Array
    compute: Array  # kinds of devices x pairs, seconds per microbatch
    backward: Array
    parameters: Array
    saved: Array
    entering: Array  # bytes that enter over both borders per microbatch, forward and backward
    leaving: Array
    other: Array  # bytes of message buffers, of gradients of activations, of workspace and of frozen weights

    @staticmethod
    def of(sums: Sequence[UnitSums], software: Software, points: Array | None = None) -> Segments:
        """The segments of one table per kind of device."""
        points = np.arange(sums[0].count + 1) if points is None else points
        first, last = np.triu_indices(len(points), 1)
        begin, end = points[first], points[last]

        def between(prefix: Array) -> Array:
            return prefix[end] - prefix[begin]

        def largest(values: Array) -> Array:
            pieces = np.maximum.reduceat(values, points[:-1])
            return np.concatenate([np.maximum.accumulate(pieces[piece:]) for piece in range(len(pieces))])

        own = sums[0]
        borrowed = largest(own.workspaces)
        workspace = np.full_like(borrowed, float(software.workspace))
        if not software.keeps_workspace:
            workspace = np.minimum(borrowed, workspace)
        messages = 2 * (own.live[begin] + own.live[end])
        return Segments(
            len(points) - 1,
            points,
            first,
            last,
            np.array([between(kind.forward) + between(kind.backward) for kind in sums]),
            np.array([between(kind.backward) for kind in sums]),
            between(own.parameters),
            between(own.saved),
            own.live[begin] + own.live_gradient[end],
            own.live[end] + own.live_gradient[begin],
            messages + 2 * largest(own.outputs) + workspace + cost.GRADIENT_BYTES * between(own.frozen),
        )

    def beginning(self, unit: int) -> slice:
        """The pairs of the segments that begin at a unit."""
        start = unit * self.units - unit * (unit - 1) // 2
        return slice(start, start + self.units - unit)


def narrow_points(sums: UnitSums) -> Array:
    """The points where no more bytes are live than at their neighbours, and both ends of the chain."""
    live = np.concatenate(([np.inf], sums.live[1:-1], [np.inf]))
    inner = [unit for unit in range(1, sums.count) if live[unit] <= live[unit - 1] and live[unit] < live[unit + 1]]
    return np.array([0, *inner, sums.count])
