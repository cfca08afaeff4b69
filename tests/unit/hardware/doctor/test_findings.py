"""The findings of `doctor` about made-up machines."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagewright.hardware.doctor.finding import Finding, Grade, finding_lines
from stagewright.hardware.doctor.gpus import GpuState, gpu_findings, read_states, topology_findings
from stagewright.hardware.doctor.measure import (
    DiskRead,
    Measured,
    disk_finding,
    memory_copies,
    read_disk,
    speed_findings,
)
from stagewright.hardware.doctor.system import SystemState, read_system_state, software_findings, system_findings
from stagewright.hardware.environment import Environment, Libraries
from stagewright.hardware.gpu import Gpu
from stagewright.hardware.host import Host
from stagewright.hardware.topology import SELF, Connection, LinkKind, Topology
from tests.nvml_like import Card, Library

GIB = 1 << 30
HOST = Host("box", "Some Linux 1", "6.1", "Chip", 1, 32, 16, 256 * GIB, None)
GPU = Gpu(0, "GPU-0", "NVIDIA GeForce RTX 3090", 24 * GIB, None, "8.6", 350.0, 350.0, 4, 16, 4, 16, None, None)
IDLE = SystemState(0, None, 8 * GIB, 65536, 0.5, 29600, None, None)
LIBRARIES = Libraries("3.12.1", "2.11.0", "12.8", "9.1.2", "2.26.0")
MACHINE = Environment(HOST, LIBRARIES, (GPU, replace(GPU, index=1)), "550.54.15", "12.8")


def only(findings: Any, name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def test_values_of_an_area_begin_in_one_column() -> None:
    names = ("memory copy", "2 pairs at once through the host")
    lines = [str(line) for line in finding_lines([Finding("measured", name, "9.4 GB/s") for name in names], 80)]
    assert len({line.index("9.4 GB/s") for line in lines[1:]}) == 1 and "host  9.4" in lines[2]


def test_a_good_machine_is_all_fine() -> None:
    findings = [*system_findings(MACHINE, IDLE), *software_findings(MACHINE), *gpu_findings(MACHINE.gpus, {})]
    assert [found for found in findings if found.grade is not Grade.FINE] == []
    assert all(found.value for found in findings)


@pytest.mark.parametrize(
    ("host", "around", "name", "grade", "words"),
    [
        ({}, {"load": 30.0}, "processor", Grade.NOTE, "keep cores busy"),
        ({"cores": 3}, {"load": 0.0}, "processor", Grade.NOTE, "3 cores for 2 GPUs"),
        ({"memory": 16 * GIB}, {}, "memory", Grade.NOTE, "less than the 48 GiB"),
        ({"virtual": "virtual machine (QEMU)"}, {}, "virtualisation", Grade.NOTE, "refuse peer access"),
        ({}, {"iommu_groups": 40}, "IOMMU", Grade.NOTE, "iommu=pt"),
        ({}, {"shared_memory": 64 << 20}, "shared memory", Grade.PROBLEM, "--shm-size 1g"),
        ({}, {"open_files": 256}, "open files", Grade.NOTE, "ulimit -n 4096"),
        ({}, {"loopback_trouble": "Permission denied"}, "loopback", Grade.PROBLEM, "127.0.0.1"),
        ({}, {"port_trouble": "Address already in use"}, "port 29600", Grade.NOTE, "--nodes HOST:PORT"),
    ],
)
def test_host_findings(host: dict[str, Any], around: dict[str, Any], name: str, grade: Grade, words: str) -> None:
    found = only(system_findings(replace(MACHINE, host=replace(HOST, **host)), replace(IDLE, **around)), name)
    assert found.grade is grade and words in found.advice, found


def test_a_virtual_machine_without_gpus_and_an_iommu_in_passthrough_are_fine() -> None:
    bare = replace(MACHINE, gpus=(), host=replace(HOST, virtual="virtual machine"))
    assert only(system_findings(bare, IDLE), "virtualisation").grade is Grade.FINE
    passing = replace(IDLE, iommu_groups=40, iommu_option="iommu=pt")
    assert only(system_findings(MACHINE, passing), "IOMMU").grade is Grade.FINE


@pytest.mark.parametrize(
    ("libraries", "found", "name", "grade", "words"),
    [
        ({"cuda": None, "torch": "2.13.0+cpu"}, {}, "torch", Grade.PROBLEM, "install one for the driver's CUDA"),
        ({"cuda": "13.0"}, {}, "driver", Grade.PROBLEM, "CUDA 13.0 but the driver supports up to 12.8"),
        ({"nccl": None}, {}, "NCCL", Grade.NOTE, "--backend gloo"),
        ({}, {"gpus": (), "nvml": "NVML Shared Library Not Found"}, "driver", Grade.NOTE, "--gpus all"),
        ({}, {"gpus": (), "nvml": "Driver/library version mismatch"}, "driver", Grade.PROBLEM, "reboot"),
    ],
)
def test_software_findings(
    libraries: dict[str, Any], found: dict[str, Any], name: str, grade: Grade, words: str
) -> None:
    box = replace(MACHINE, libraries=replace(LIBRARIES, **libraries), **found)
    finding = only(software_findings(box), name)
    assert finding.grade is grade and words in finding.advice, finding


def test_a_newer_minor_cuda_runs_on_an_older_driver_of_the_same_release() -> None:
    box = replace(MACHINE, libraries=replace(LIBRARIES, cuda="12.9"), driver_cuda="12.2")
    assert only(software_findings(box), "driver").grade is Grade.FINE


@pytest.mark.parametrize(
    ("gpu", "state", "name", "grade", "words"),
    [
        ({"power_limit": 300.0}, {}, "power cap", Grade.NOTE, "nvidia-smi -i 0 -pl 350"),
        ({"power_limit": 200.0}, {}, "power cap", Grade.PROBLEM, "nvidia-smi -i 0 -pl 350"),
        ({"pcie_width": 8}, {}, "PCIe", Grade.NOTE, "about 50% of the bandwidth"),
        (
            {"pcie_generation": 3},
            {},
            "PCIe",
            Grade.NOTE,
            "about 50% of the bandwidth that the GPU supports; board, riser",
        ),
        ({"pcie_width": 4}, {}, "PCIe", Grade.PROBLEM, "about 25%"),
        ({"pcie_width": 8, "pcie_generation": 3}, {}, "PCIe", Grade.PROBLEM, "about 25%"),
        ({"is_mig": True}, {}, "card", Grade.NOTE, "nvidia-smi -mig 0"),
        ({}, {"processes": ("7 job",)}, "processes", Grade.PROBLEM, "other processes"),
        ({}, {"throttled": ("power brake",)}, "condition", Grade.NOTE, "power brake"),
        ({}, {"temperature": 90.0}, "condition", Grade.NOTE, "cooling"),
    ],
)
def test_gpu_findings(gpu: dict[str, Any], state: dict[str, Any], name: str, grade: Grade, words: str) -> None:
    found = only(gpu_findings([replace(GPU, **gpu)], {0: GpuState(**state)}), name)
    assert found.grade is grade and words in found.advice, found


def test_missing_answers_read_not_known() -> None:
    silent = Gpu(0, "GPU-0", "card", *[None] * 11)
    values = {found.name: (found.value, found.grade) for found in gpu_findings([silent], {})}
    assert values["power cap"] == values["PCIe"] == ("not known", Grade.FINE)


def test_two_kinds_of_gpus_are_noted() -> None:
    other = replace(GPU, index=1, name="NVIDIA TITAN V")
    assert "slowest" in only(gpu_findings([GPU, other], {}), "kinds").advice


def test_pairs_across_sockets_and_missing_peer_access_are_noted() -> None:
    far = Topology(((SELF, Connection(LinkKind.SYSTEM)), (Connection(LinkKind.SYSTEM), SELF)))
    findings = list(topology_findings(replace(MACHINE, topology=far), [[True, False], [False, True]]))
    assert only(findings, "pairs").value == "1 x SYS" and "one socket" in only(findings, "pairs").advice
    assert only(findings, "peer access").value == "0 of 2 pairs"
    assert only(findings, "peer access").grade is Grade.NOTE
    near = Topology(((SELF, Connection(LinkKind.NVLINK, 4)), (Connection(LinkKind.NVLINK, 4), SELF)))
    findings = list(topology_findings(replace(MACHINE, topology=near), [[True, True], [True, True]]))
    assert [found.grade for found in findings] == [Grade.FINE, Grade.FINE]
    findings = list(topology_findings(replace(MACHINE, topology=near), [[True, None], [None, True]]))
    assert only(findings, "peer access").value == "not known"


def test_reads_states_and_peer_access_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library([Card(processes=(2**22 + 5,), reasons=0x4), Card()], {(0, 1): 30})
    library.peers = 2
    monkeypatch.setitem(sys.modules, "pynvml", library)
    states, peers = read_states()
    assert states[0].processes == (f"{2**22 + 5} of another container",) and states[0].throttled == ("power cap",)
    assert states[1].processes == () and states[1].used == GIB
    assert peers == [[True, False], [False, True]]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_states() == ({}, [])


@pytest.mark.parametrize(
    ("bandwidth", "grade"), [(26e9, Grade.FINE), (17e9, Grade.NOTE), (10e9, Grade.PROBLEM)], ids=["full", "poor", "bad"]
)
def test_compares_a_copy_with_the_bandwidth_of_the_slot(bandwidth: float, grade: Grade) -> None:
    (found,) = speed_findings([Measured("host to GPU 0", bandwidth, gpu=0)], {0: GPU})
    assert found.grade is grade and f"{bandwidth / (16 * 1.969e9):.0%} of the slot's" in found.value


def test_a_failed_measurement_says_why() -> None:
    (found,) = speed_findings([Measured("between two ranks", None, trouble="no more processes")], {})
    assert found.value == "not known" and "no more processes" in found.advice


def test_memory_copy_has_a_plausible_bandwidth() -> None:
    found = memory_copies("memory", 1).bandwidth
    assert found is not None and 1e8 < found < 1e12


def test_reads_a_disk_file_by_file(tmp_path: Path) -> None:
    for index in range(5):
        (tmp_path / f"{index}").write_bytes(bytes(300_000))
    (tmp_path / "6").mkdir()
    read = read_disk(tmp_path)
    assert (read.bytes, read.files) == (1_500_000, 5) and read.seconds > 0 and read.free > 0
    assert read_disk(tmp_path / "3").bytes == 300_000
    with pytest.raises(ValueError, match="holds 0 files to read"):
        read_disk(tmp_path / "6")
    with pytest.raises(ValueError, match="no such file or folder"):
        read_disk(tmp_path / "7")


@pytest.mark.parametrize(("rate", "grade"), [(50e6, Grade.PROBLEM), (300e6, Grade.NOTE), (2e9, Grade.FINE)])
def test_disk_findings(rate: float, grade: Grade) -> None:
    found = disk_finding(DiskRead("data", int(rate), 4, 1.0, 10**12, True))
    assert found.grade is grade and f"{rate / 1e6:.0f} MB/s" in found.value
    assert f"about {rate / 110_000:.0f} photographs/s" in found.value


def test_reads_the_system_state_from_its_files(tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / "sys/kernel/iommu_groups" / name).mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text("quiet amd_iommu=on ro\n")
    found = read_system_state(0, tmp_path)
    assert (found.iommu_groups, found.iommu_option, found.shared_memory) == (2, "amd_iommu=on", None)
    assert found.loopback_trouble is None and found.port_trouble is None
    assert read_system_state(0, tmp_path / "nowhere").iommu_groups is None
