"""A made run with known answers."""

from __future__ import annotations

import pytest

from stagewright.events import GpuUsage, RankUsage, Usage
from stagewright.hardware.monitor import Totals


def use(seconds: float, *gpus: GpuUsage, memory: int = 10, held: int | None = None) -> Usage:
    return Usage(seconds, 2.0, 1000 + int(seconds), gpus, (RankUsage(0, memory, 0.5, held), RankUsage(1, 5, 1.0)))


def gpu(power: float | None, energy: float | None, *throttled: str, memory: int = 100, foreign: int = 0) -> GpuUsage:
    return GpuUsage("GPU-a", 3, memory, 0.5, power, energy, 50.0, 1e9, throttled, foreign)


def test_peaks_means_energy_and_throttled_seconds() -> None:
    totals = Totals()
    totals.add(use(10.0, gpu(100, 5000, "power cap")))  # nothing is known of the time before it
    totals.add(use(11.0, gpu(200, 5150, "power cap"), memory=30, held=7))
    totals.add(use(13.0, gpu(300, 5700, "power cap", "software thermal", memory=900), held=3))
    totals.add(use(14.0, gpu(200, 5900, foreign=2)))
    found = totals.describe()
    (card,) = found["gpus"]
    assert (card["peak_memory"], card["foreign"], card["index"], card["uuid"]) == (900, 2, 3, "GPU-a")
    assert card["throttled"] == {"power cap": 3.0, "software thermal": 2.0} and card["throttled_seconds"] == 3.0
    assert (card["energy"], card["mean_power"]) == (900, pytest.approx((200 + 2 * 300 + 200) / 4))
    assert (found["energy"], found["foreign"], found["throttled_seconds"]) == (900, 2, 3.0)
    assert (found["seconds"], found["moments"], found["peak_machine_memory"]) == (4.0, 4, 1014)
    first, second = found["ranks"]
    assert (first["peak_memory"], first["peak_torch_memory"], first["mean_cores"]) == (30, 7, 0.5)
    assert (second["rank"], second["peak_torch_memory"]) == (1, None)


def test_a_card_without_a_counter_has_its_power_summed() -> None:
    totals = Totals()
    for seconds, power in ((0, 100), (2, 150), (3, 250)):
        totals.add(use(float(seconds), gpu(power, None)))
    assert totals.describe()["energy"] == 2 * 150 + 250


def test_a_counter_that_starts_again_does_not_take_energy_back() -> None:
    totals = Totals()
    for seconds, energy in ((0, 9000), (1, 9100), (2, 10), (3, 60)):
        totals.add(use(float(seconds), gpu(None, energy)))
    assert totals.describe()["energy"] == 150


def test_without_gpus_what_nobody_told_is_none() -> None:
    totals = Totals()
    totals.add(use(0.0))
    found = totals.describe()
    assert (found["gpus"], found["energy"], found["mean_power"], found["foreign"]) == ([], None, None, None)
