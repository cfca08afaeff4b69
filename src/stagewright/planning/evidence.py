"""What a prediction is based on, and the interval that follows from it.

Nine of ten errors of held-back rows of a class are within its interval (`cluster/calibration.toml`, errors).
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

from stagewright.cluster.specs import HALF, Catalog, DeviceSpec

if TYPE_CHECKING:
    from stagewright.planning.reading import Reading


class Evidence(StrEnum):
    """Classes of evidence, the best first."""

    MEASURED = "measured here"
    FITTED = "fitted card"
    FAMILY = "same chip family"
    SHEET = "data sheet"
    HOST = "unknown host"  # the cards copy through a host whose budget nobody measured


_ORDER = list(Evidence)


def worst(classes: list[Evidence]) -> Evidence:
    return max(classes, key=_ORDER.index)


def device_evidence(device: DeviceSpec, precision: str) -> Evidence:
    """What the speed of a card's kernels is based on, by the shipped calibration."""
    units = device.units(precision, convolution=True)
    if device.measured.get(units) == "your own":
        return Evidence.FITTED
    return Evidence(device.evidence.get("fp16" if units in HALF else units, Evidence.SHEET))


def row_evidence(reading: Reading, catalog: Catalog, seen: frozenset[tuple[str, str]]) -> Evidence:
    """What the prediction of a row is based on, given the cards and families that were fitted."""
    found = []
    for kind in reading.kinds:
        device = catalog.device(kind)
        units = device.units(reading.precision, convolution=True)
        units = "fp16" if units in HALF else units
        is_family = (f"family {device.family.name}", units) in seen
        found.append(
            Evidence.FITTED if (device.name, units) in seen else Evidence.FAMILY if is_family else Evidence.SHEET
        )
    if reading.is_staged and reading.host not in catalog.hosts:
        found.append(Evidence.HOST)
    return worst(found)


def interval(rate: float, evidence: Evidence, catalog: Catalog) -> tuple[float, float]:
    """The bounds that nine of ten such rates are within."""
    spread = catalog.errors[evidence]
    return rate * math.exp(-spread), rate * math.exp(spread)
