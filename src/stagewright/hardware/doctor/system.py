"""Findings about the host (processor, memory, virtualisation, limits, ports) and its software (driver, torch, NCCL)."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stagewright.hardware.doctor.finding import Finding, Grade, finding
from stagewright.hardware.environment import Environment
from stagewright.metrics import GIB

_SYSTEM, _SOFTWARE = "system", "software"
_SMALL_SHM = GIB  # NCCL's rings over several GPUs need more than a container's 64 MiB
_ENOUGH_FILES = 4096


@dataclass(frozen=True, slots=True)
class SystemState:
    """What the system's files and limits say; None where they do not say."""

    iommu_groups: int | None
    iommu_option: str | None  # on the kernel's command line
    shared_memory: int | None  # bytes of /dev/shm
    open_files: int | None
    load: float | None  # processes that want a core, averaged over a minute
    port: int
    port_trouble: str | None  # why a socket can't listen on the port
    loopback_trouble: str | None


def read_system_state(port: int, root: Path = Path("/")) -> SystemState:
    """The state of this system; `root` is where its files are, for tests."""
    groups = root / "sys/kernel/iommu_groups"
    return SystemState(
        len(list(groups.iterdir())) if groups.is_dir() else None,
        _iommu_option(root),
        _size(root / "dev/shm"),
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        port,
        _listen_trouble("0.0.0.0", port),
        _listen_trouble("127.0.0.1", 0),
    )


def _iommu_option(root: Path) -> str | None:
    try:
        words = (root / "proc/cmdline").read_text().split()
    except OSError:
        return None
    return next((word for word in words if "iommu" in word), None)


def _size(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _listen_trouble(address: str, port: int) -> str | None:
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return None


def system_findings(found: Environment, state: SystemState) -> Iterator[Finding]:
    host, gpus = found.host, len(found.gpus)
    yield finding(_SYSTEM, "system", f"{host.system}, kernel {host.kernel}")
    load = state.load or 0.0
    busy = "other processes keep cores busy; measurements taken now will be low and vary"
    few = f"{host.cores} cores for {gpus} GPUs; each rank needs one, and decoding images several more"
    yield finding(
        _SYSTEM,
        "processor",
        f"{host.cpu}, {host.cores} cores, load {load:.1f}",
        (load > 0.5 * host.cores, Grade.NOTE, busy),
        (host.cores < 2 * gpus, Grade.NOTE, few),
    )
    memory = None if host.memory is None else f"{host.memory / GIB:.1f} GiB"
    wanted = sum(gpu.memory or 0 for gpu in found.gpus)
    advice = f"less than the {wanted / GIB:.0f} GiB of the GPUs; pinned buffers and checkpoints share it"
    yield finding(_SYSTEM, "memory", memory, (0 < (host.memory or 0) < wanted, Grade.NOTE, advice))
    yield _virtual(found)
    yield _iommu(found, state)
    yield from _limits(found, state)


def _virtual(found: Environment) -> Finding:
    virtual = found.host.virtual or "none seen"
    is_passed = any(gpu.virtual == "passthrough" for gpu in found.gpus)
    value = f"{virtual}, GPUs passed through" if is_passed else virtual
    advice = (
        "virtual machines often show every GPU at PHB and refuse peer access, so copies between GPUs go through "
        "host memory; compare with nvidia-smi topo -m on the host (docs/hardware.md)"
    )
    is_suspect = len(found.gpus) > 1 and "virtual machine" in virtual
    return finding(_SYSTEM, "virtualisation", value, (is_suspect, Grade.NOTE, advice))


def _iommu(found: Environment, state: SystemState) -> Finding:
    groups, option = state.iommu_groups, state.iommu_option
    value = None if groups is None else f"{groups} groups" if groups else "off, or hidden"
    value = f"{value or 'groups not known'}, {option}" if option else value
    is_bad = bool(groups) and found.host.virtual is None and len(found.gpus) > 1 and option != "iommu=pt"
    advice = "on bare metal an IOMMU can slow or hang copies between GPUs; boot with iommu=pt, or switch it off"
    return finding(_SYSTEM, "IOMMU", value, (is_bad, Grade.NOTE, advice))


def _limits(found: Environment, state: SystemState) -> Iterator[Finding]:
    shared = state.shared_memory
    value = None if shared is None else f"{shared / GIB:.2f} GiB at /dev/shm"
    is_small = shared is not None and shared < _SMALL_SHM and len(found.gpus) > 1
    advice = "NCCL keeps its buffers there and may fail; start the container with --shm-size 1g or --ipc host"
    yield finding(_SYSTEM, "shared memory", value, (is_small, Grade.PROBLEM, advice))
    files = state.open_files
    advice = f"too few for many ranks; raise the limit: ulimit -n {_ENOUGH_FILES}"
    yield finding(
        _SYSTEM, "open files", None if files is None else f"{files:,}", (0 < (files or 0) < 1024, Grade.NOTE, advice)
    )
    trouble = state.loopback_trouble
    advice = "ranks of one machine connect over it; allow listening on 127.0.0.1"
    yield finding(_SYSTEM, "loopback", trouble or "ranks can listen", (trouble is not None, Grade.PROBLEM, advice))
    trouble = state.port_trouble
    advice = "--nodes uses it by default; give another: --nodes HOST:PORT,..."
    yield finding(_SYSTEM, f"port {state.port}", trouble or "free", (trouble is not None, Grade.NOTE, advice))


def software_findings(found: Environment) -> Iterator[Finding]:
    libraries, has_gpus = found.libraries, bool(found.gpus)
    advice = "this build has no GPU support; install one for the driver's CUDA: https://pytorch.org/get-started/locally"
    yield finding(_SOFTWARE, "Python", libraries.python)
    yield finding(_SOFTWARE, "torch", libraries.torch, (libraries.cuda is None and has_gpus, Grade.PROBLEM, advice))
    yield _driver_finding(found)
    if has_gpus or libraries.cuda:
        yield finding(_SOFTWARE, "CUDA", libraries.cuda or "not in this torch")
        yield finding(_SOFTWARE, "cuDNN", libraries.cudnn or "not installed")
        is_missed = libraries.nccl is None and len(found.gpus) > 1 and libraries.cuda is not None
        advice = "without it ranks exchange messages through host memory: --backend gloo"
        yield finding(_SOFTWARE, "NCCL", libraries.nccl or "not installed", (is_missed, Grade.NOTE, advice))


def _driver_finding(found: Environment) -> Finding:
    cuda, supported = found.libraries.cuda, found.driver_cuda
    mismatch = "driver and library have different versions; reboot, or reload the kernel module"
    too_new = (
        f"torch was built for CUDA {cuda} but the driver supports up to {supported}; update the "
        "driver, or install an older build of torch"
    )
    none_seen = "torch supports GPUs but no driver shows one; install a driver, or start the container with --gpus all"
    return finding(
        _SOFTWARE,
        "driver",
        _driver(found),
        ("mismatch" in (found.nvml or ""), Grade.PROBLEM, mismatch),
        (_is_newer(cuda, supported), Grade.PROBLEM, too_new),
        (not found.gpus and cuda is not None, Grade.NOTE, none_seen),
    )


def _driver(found: Environment) -> str:
    if found.nvml is not None:
        return f"no GPU: {found.nvml}"
    return f"{found.driver or 'not known'}, CUDA up to {found.driver_cuda or 'not known'}"


def _is_newer(one: str | None, other: str | None) -> bool:
    """Whether one CUDA is of a later major release; minor releases run on each other's drivers."""
    if one is None or other is None:
        return False
    return int(one.partition(".")[0]) > int(other.partition(".")[0])
