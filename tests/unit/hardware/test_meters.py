"""GPUs at a moment, asked of a stand-in for NVIDIA's library."""

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


def test_everything_is_in_plain_units_and_memory_is_as_nvidia_smi_counts_it() -> None:
    card = Card(used=5 << 30, reserved=1 << 30, utilisation=87, power=251_500, energy=7_250, clock=1695, reasons=0x24)
    (use,) = meter(card).read([])
    assert (use.uuid, use.index, use.memory, use.utilisation) == (uuid(0), 0, 5 << 30, 0.87)
    assert (use.power, use.energy, use.temperature, use.clock) == (251.5, 7.25, 60, 1.695e9)
    assert use.throttled == ("power cap", "software thermal")


def test_an_old_driver_counts_memory_in_its_own_way() -> None:
    (use,) = meter(Card(used=5 << 30, reserved=1 << 30, silent={"nvmlDeviceGetMemoryInfo_v2"})).read([])
    assert use.memory == 6 << 30


def test_what_a_card_does_not_tell_is_none() -> None:
    questions = ("UtilizationRates", "PowerUsage", "TotalEnergyConsumption", "Temperature", "ClockInfo")
    silent = {f"nvmlDeviceGet{name}" for name in questions} | {"nvmlDeviceGetComputeRunningProcesses"}
    (use,) = meter(Card(silent=silent)).read([100])
    assert (use.utilisation, use.power, use.energy, use.temperature, use.clock) == (None,) * 5
    assert (use.throttled, use.foreign) == ((), 0)


def test_only_the_gpus_of_the_run_are_read_under_their_own_index() -> None:
    uses = meter(Card(), Card(used=2 << 30), Card(), of=(1,)).read([])
    assert [(use.index, use.uuid, use.memory) for use in uses] == [(1, uuid(1), 2 << 30)]


@pytest.mark.parametrize(
    ("processes", "ours", "foreign"),
    [
        (((100,), (101,)), {100, 101}, [0, 0]),
        (((100, 7), (101, 8)), {100, 101}, [1, 0]),  # somebody else's job, and the server that ours share the GPU by
        (((40_100,), (40_101,)), {100, 101}, [0, 0]),  # in a container: the host's numbers
        (((40_100, 40_555), (40_101,)), {100, 101}, [0, 1]),  # one too many, though not whose
        (((100, os.getpid()), (101,)), {100, 101}, [0, 0]),  # the supervisor looked at the GPU itself
        (((os.getpid(),), (40_555,)), {os.getpid()}, [0, 1]),  # an emulated run
        (((40_555,), ()), set(), [1, 0]),  # nobody of ours could be on it
    ],
)
def test_foreign_processes(processes: tuple[tuple[int, ...], ...], ours: set[int], foreign: list[int]) -> None:
    uses = meter(*(Card(processes=listed) for listed in processes)).read(ours)
    assert [use.foreign for use in uses] == foreign


def test_reasons_for_a_lower_clock() -> None:
    assert reasons_of(0x1) == ()  # idle
    assert reasons_of(0x1C8) == ("hardware slowdown", "hardware thermal", "power brake", "display clocks")
