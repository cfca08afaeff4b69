"""What a prediction is based on, and the interval that follows from it.

Nine of ten errors of held-back rows of a class are within its interval (`cluster/calibration.toml`, errors).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum

from stagewright.cluster.specs import ALIKE, FITTED, SHEET, DeviceSpec
from stagewright.cluster.topology import Cluster


class Evidence(StrEnum):
    """Classes of evidence, the best first."""

    MEASURED = "measured here"
    FITTED = FITTED
    FAMILY = ALIKE
    SHEET = SHEET
    HOST = "unknown host"  # the cards copy through a host whose budget nobody measured


_ORDER = list(Evidence)


def worst(classes: list[Evidence]) -> Evidence:
    return max(classes, key=_ORDER.index)


def device_evidence(device: DeviceSpec, precision: str) -> Evidence:
    """What the speed of a card's kernels is based on, by the shipped calibration."""
    return Evidence(device.basis(precision))


def cluster_evidence(cluster: Cluster, devices: Callable[[str], DeviceSpec], precision: str) -> Evidence:
    """What a prediction on a cluster of the catalog is based on: its cards, and its hosts where copies cross them."""
    kinds = dict.fromkeys(machine.kind for machine in cluster.machines)
    found = [device_evidence(devices(kind), precision) for kind in kinds]
    if has_unknown_host(cluster):
        found.append(Evidence.HOST)
    return worst(found)


def has_unknown_host(cluster: Cluster) -> bool:
    return any(machine.copies_through_host and not machine.knows_host for machine in cluster.machines)


def with_host(cluster: Cluster, budget: float) -> Cluster:
    """The cluster with the budget of every host that nobody measured."""
    machines = tuple(machine if machine.knows_host else replace(machine, host=budget) for machine in cluster.machines)
    return replace(cluster, machines=machines)


def bounds(low: float, high: float, spread: float) -> tuple[float, float]:
    """The bounds that nine of ten rates are within, where the rate itself may be from `low` to `high`."""
    return low * math.exp(-spread), high * math.exp(spread)
