"""The environment of a machine, with a stand-in for NVIDIA's library and without one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stagewright.hardware.environment import cudnn_version, read_environment
from stagewright.hardware.gpu import Gpu, visible
from stagewright.hardware.host import read_host
from tests.nvml_like import Card, Library, uuid


def with_library(monkeypatch: pytest.MonkeyPatch, *cards: Card, **ancestors: int) -> Library:
    library = Library(cards, {(int(pair[1]), int(pair[2])): level for pair, level in ancestors.items()})
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_gpus_are_read_from_the_driver_and_missing_answers_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Card(silent={"nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetMemoryInfo"})
    library = with_library(monkeypatch, Card(width=8, virtual=1), silent, p01=30)
    found = read_environment()
    first, second = found.gpus
    assert (first.uuid, first.name, first.memory) == (uuid(0), "NVIDIA GeForce RTX 3090", 24576 << 20)
    assert (first.power_limit, first.pcie_width, first.card_width, first.virtual) == (350.0, 8, 16, "passthrough")
    assert (second.power_limit, second.memory, second.virtual, second.is_mig) == (None, None, None, None)
    assert (found.driver, found.driver_cuda, found.nvml) == ("550.54.15", "12.4", None)
    assert found.topology is not None and found.topology.texts() == [["X", "PHB"], ["PHB", "X"]]
    assert not library.is_open, "the library is closed"
    assert json.loads(json.dumps(found.describe()))["topology"] == [["X", "PHB"], ["PHB", "X"]]
    assert dict(found.rows())["GPU 0"] == "NVIDIA GeForce RTX 3090, 24.0 GiB, 350 W, PCIe 4.0 x8"


@pytest.mark.parametrize("reason", ["NVML Shared Library Not Found", "Driver/library version mismatch"])
def test_without_a_driver_there_are_no_gpus_but_a_reason(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    with_library(monkeypatch).init_error = reason
    found = read_environment()
    assert (found.gpus, found.topology, found.nvml) == ((), None, reason)
    assert ("GPUs", f"none ({reason})") in found.rows()


def test_without_the_package_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_environment().nvml == "nvidia-ml-py is not installed"


@pytest.mark.parametrize(
    ("wanted", "shown"),
    [(None, [0, 1, 2]), ("2,0", [2, 0]), (f"{uuid(1)[:9]}", [1]), ("1,7,0", [1]), ("", []), ("GPU-0000", [])],
)
def test_visible_gpus_are_those_that_cuda_visible_devices_names(
    monkeypatch: pytest.MonkeyPatch, wanted: str | None, shown: list[int]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if wanted is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    gpus = [Gpu(index, uuid(index), "card", *[None] * 11) for index in range(3)]
    assert [gpu.index for gpu in visible(gpus)] == shown


def test_the_memory_of_a_container_is_its_limit(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "etc").mkdir()
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1048576\n")
    (tmp_path / "proc/cpuinfo").write_text("model name\t: Chip\nphysical id\t: 0\nflags\t\t: fpu hypervisor\n")
    (tmp_path / "etc/os-release").write_text('PRETTY_NAME="Some Linux 1"\n')
    (tmp_path / ".dockerenv").touch()
    host = read_host(tmp_path)
    assert (host.memory, host.cpu, host.sockets, host.system) == (1 << 20, "Chip", 1, "Some Linux 1")
    assert host.virtual == "virtual machine, container"
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    memory = read_host(tmp_path).memory
    assert memory is not None and memory > 1 << 20


@pytest.mark.parametrize(("number", "text"), [(90102, "9.1.2"), (8907, "8.9.7"), (91900, "9.19.0")])
def test_cudnn_numbers_become_versions(number: int, text: str) -> None:
    assert cudnn_version(number) == text
