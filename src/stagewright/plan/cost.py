"""Every cost formula, once: transfers, reductions, updates, loading. Numbers in, seconds out; arrays go as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagewright.cluster.topology import Cluster, Device, Edge, Link

Number = Any  # a float, or an array of them
_SOFTNESS = 4  # how sharply loader and devices take turns in being the bound
PAGEABLE_SHARE = 0.5  # of a link that a copy from pageable memory reaches
BUCKET_BYTES = 25 << 20  # of gradient summed at a time
GRADIENT_BYTES = 4  # gradients and weights are kept in fp32


def transfer_seconds(size: Number, bandwidth: Number, latency: Number) -> Number:
    """One message."""
    return latency + size / bandwidth


def allreduce_seconds(size: Number, ranks: Number, bandwidth: Number, latency: Number) -> Number:
    """The faster of a ring (least traffic) and a tree (fewest steps); nothing for one rank."""
    ring = 2 * (ranks - 1) / ranks * size / bandwidth + 2 * (ranks - 1) * latency
    tree = 2 * size / bandwidth + 2 * np.ceil(np.log2(ranks)) * latency
    return np.where(np.asarray(ranks) > 1, np.minimum(ring, tree), 0.0)


def exposed_seconds(reduction: Number, hiding: Number, tail: Number) -> Number:
    """What is left of a reduction that runs beside compute of so many seconds: at least its last bucket.

    `tail` is the last bucket's share; its gradients are whole only when backward is over.
    """
    return np.maximum(reduction - hiding, reduction * tail)


def tail_share(size: Number) -> Number:
    """The last bucket's share of a gradient."""
    return np.minimum(1.0, BUCKET_BYTES / np.maximum(size, 1.0))


def update_seconds(parameters: Number, passes: float, bandwidth: float) -> Number:
    """The optimizer, and the copy of a version: so many passes over the weights through device memory."""
    return parameters * GRADIENT_BYTES * passes / bandwidth


def loaded_rate(devices: float, loader: float) -> float:
    """Samples a second when two uneven processes feed each other through a short queue: below both."""
    return float((devices**-_SOFTNESS + loader**-_SOFTNESS) ** (-1 / _SOFTNESS))


@dataclass(frozen=True, slots=True)
class Fabric:
    """What a set of devices reduces over: the bottleneck of its ring."""

    bandwidth: float
    latency: float
    staged: bool


def ring_fabric(cluster: Cluster, devices: Sequence[Device]) -> Fabric:
    """The ring through the devices in their order; an edge that it crosses twice one way is shared by two messages."""
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


def hidden_seconds(backward: float, fabric: Fabric) -> float:
    """How much of a reduction backward hides: none where the copy goes through host memory."""
    return 0.0 if fabric.staged else backward
