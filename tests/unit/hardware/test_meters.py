"""What a GPU uses at one moment, read from a stand-in for NVIDIA's library."""

from __future__ import annotations

import os

import pytest

from stagewright.hardware.gpu import Nvml
from stagewright.hardware.meters import GpuMeter, reasons_of
from tests.nvml_like import Card, Library, uuid

HERE = {100: "python", 101: "python", 7: "other-job", 8: "nvidia-cuda-mps-server"}


def meter(*cards: Card, of: tuple[int, ...] | None = None) -> GpuMeter:
    library = Library(cards)
    library.nvmlInit()
    return GpuMeter(Nvml(library), [uuid(index) for index in of or range(len(cards))], HERE.get)


def test_values_have_base_units_and_memory_is_counted_as_nvidia_smi_does() -> None:
    card = Card(used=5 << 30, reserved=1 << 30, utilisation=87, power=251_500, energy=7_250, clock=1695, reasons=0x24)
    (usage,) = meter(card).read([])
    assert (usage.uuid, usage.index, usage.memory, usage.utilisation) == (uuid(0), 0, 5 << 30, 0.87)
    assert (usage.power, usage.energy, usage.temperature, usage.clock) == (251.5, 7.25, 60, 1.695e9)
    assert usage.throttled == ("power cap", "software thermal")


def test_an_old_driver_counts_reserved_memory_too() -> None:
    (usage,) = meter(Card(used=5 << 30, reserved=1 << 30, silent={"nvmlDeviceGetMemoryInfo_v2"})).read([])
    assert usage.memory == 6 << 30


def test_missing_answers_are_none() -> None:
    questions = ("UtilizationRates", "PowerUsage", "TotalEnergyConsumption", "Temperature", "ClockInfo")
    silent = {f"nvmlDeviceGet{name}" for name in questions} | {"nvmlDeviceGetComputeRunningProcesses"}
    (usage,) = meter(Card(silent=silent)).read([100])
    assert (usage.utilisation, usage.power, usage.energy, usage.temperature, usage.clock) == (None,) * 5
    assert (usage.throttled, usage.foreign) == ((), 0)


def test_reads_only_the_gpus_of_the_run_under_their_own_index() -> None:
    usages = meter(Card(), Card(used=2 << 30), Card(), of=(1,)).read([])
    assert [(usage.index, usage.uuid, usage.memory) for usage in usages] == [(1, uuid(1), 2 << 30)]


@pytest.mark.parametrize(
    ("processes", "ours", "foreign"),
    [
        (((100,), (101,)), {100, 101}, [0, 0]),
        (((100, 7), (101, 8)), {100, 101}, [1, 0]),  # another job, and the MPS server of our own ranks
        (((40_100,), (40_101,)), {100, 101}, [0, 0]),  # in a container: the host's numbers
        (((40_100, 40_555), (40_101,)), {100, 101}, [0, 1]),  # one more than our ranks; which one is unknown
        (((100, os.getpid()), (101,)), {100, 101}, [0, 0]),  # the supervisor itself reads the GPU
        (((os.getpid(),), (40_555,)), {os.getpid()}, [0, 1]),  # an emulated run
        (((40_555,), ()), set(), [1, 0]),  # none of our ranks could be on it
    ],
)
def test_counts_processes_of_others(processes: tuple[tuple[int, ...], ...], ours: set[int], foreign: list[int]) -> None:
    usages = meter(*(Card(processes=listed) for listed in processes)).read(ours)
    assert [usage.foreign for usage in usages] == foreign


def test_throttle_bits_become_reasons() -> None:
    assert reasons_of(0x1) == ()  # idle
    assert reasons_of(0x1C8) == ("hardware slowdown", "hardware thermal", "power brake", "display clocks")
