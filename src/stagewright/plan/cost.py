"""The cost formulas: transfers, all-reduces, updates, loading. Numbers or arrays in, seconds out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagewright.cluster.specs import HALF, Software
from stagewright.cluster.topology import Cluster, Device, Edge, Link

Number = Any  # a float, or an array of them
_SOFTNESS = 4  # how sharp the change is between being bound by the loader and by the devices
PAGEABLE_SHARE = 0.5  # of a link's bandwidth that a copy from pageable memory reaches
BUCKET_BYTES = 25 << 20  # of gradient summed at a time
GRADIENT_BYTES = 4  # gradients and weights are kept in fp32


def transfer_seconds(size: Number, bandwidth: Number, latency: Number) -> Number:
    """Seconds of one message."""
    return latency + size / bandwidth


def allreduce_seconds(size: Number, ranks: Number, bandwidth: Number, latency: Number) -> Number:
    """Seconds of the faster of a ring (least traffic) and a tree (fewest steps); 0 for one rank."""
    ring = 2 * (ranks - 1) / ranks * size / bandwidth + 2 * (ranks - 1) * latency
    tree = 2 * size / bandwidth + 2 * np.ceil(np.log2(ranks)) * latency
    return np.where(np.asarray(ranks) > 1, np.minimum(ring, tree), 0.0)


def exposed_seconds(reduction: Number, hiding: Number, tail: Number) -> Number:
    """Seconds of a reduction that are not hidden by `hiding` seconds of compute: at least those of its last bucket.

    `tail` is the last bucket's share of the gradient; it is complete only when backward ends.
    """
    return np.maximum(reduction - hiding, reduction * tail)


def tail_share(size: Number) -> Number:
    """The last bucket's share of a gradient."""
    return np.minimum(1.0, BUCKET_BYTES / np.maximum(size, 1.0))


def update_seconds(parameters: Number, passes: float, bandwidth: float) -> Number:
    """Seconds of the optimizer, or of the copy of a version: so many passes over the weights in device memory."""
    return parameters * GRADIENT_BYTES * passes / bandwidth


def loaded_rate(devices: float, loader: float) -> float:
    """Samples per second when the loader feeds the devices through a short queue: below both rates."""
    return float((devices**-_SOFTNESS + loader**-_SOFTNESS) ** (-1 / _SOFTNESS))


@dataclass(frozen=True, slots=True)
class Fabric:
    """The bottleneck of the ring over which a set of devices reduces."""

    bandwidth: float
    latency: float
    staged: bool


def ring_fabric(cluster: Cluster, devices: Sequence[Device]) -> Fabric:
    """The ring through the devices in their order; two messages share an edge that it crosses twice one way."""
    if len(devices) < 2:
        return Fabric(float("inf"), 0.0, False)
    load: Counter[tuple[Edge, bool]] = Counter()
    links: dict[tuple[Edge, bool], Link] = {}
    for source, target in zip(devices, [*devices[1:], devices[0]], strict=True):
        for edge, link in cluster.path(source, target):
            load[edge] += 1
            links[edge] = link
    bandwidth = min((links[edge].reduction or links[edge].bandwidth) / load[edge] for edge in links)
    return Fabric(bandwidth, max(link.latency for link in links.values()), any(link.staged for link in links.values()))


def carried_bytes(size: Number, largest: Number, software: Software, fabric: Fabric) -> Number:
    """The bytes of a gradient that a reduction takes the time of.

    Tensors go up to the host and come down from it at once, one behind the other; of software that sums whole tensors,
    the largest does nothing at once with another.
    """
    return size + largest if software.whole_sums and fabric.staged else size


def scaling_factor(replicas: Number, machines: Number, software: Software, precision: str) -> Number:
    """How much longer replicas take than one alone: each step ends with the slowest, and hosts are shared.

    A measured term, for every doubling of the replicas of a machine and of the machines.
    """
    inside = software.jitter + (software.half_jitter if precision in HALF else 0.0)
    each = np.maximum(np.asarray(replicas) / np.asarray(machines), 1.0)
    return 1.0 + inside * np.log2(each) + (inside + software.network_jitter) * np.log2(machines)


def hidden_seconds(backward: float, fabric: Fabric) -> float:
    """Seconds of a reduction that backward hides: none if it is copied through host memory."""
    return 0.0 if fabric.staged else backward
