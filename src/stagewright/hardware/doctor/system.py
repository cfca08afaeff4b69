"""Findings about the host (processor, memory, virtualisation, limits, ports) and its software (driver, torch, NCCL)."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stagewright.hardware.doctor.finding import Finding, Grade, finding
from stagewright.hardware.environment import Environment
from stagewright.metrics import GIB

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
    words, shared = list[str](), None
    with suppress(OSError):
        words = (root / "proc/cmdline").read_text().split()
    with suppress(OSError):
        disk = os.statvfs(root / "dev/shm")
        shared = disk.f_blocks * disk.f_frsize
    return SystemState(
        len(list(groups.iterdir())) if groups.is_dir() else None,
        next((word for word in words if "iommu" in word), None),
        shared,
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        port,
        _listen_trouble("0.0.0.0", port),
        _listen_trouble("127.0.0.1", 0),
    )


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
    host, gpus, system = found.host, len(found.gpus), partial(finding, "system")
    yield system("system", f"{host.system}, kernel {host.kernel}")
    load = state.load or 0.0
    busy = "other processes keep cores busy; measurements taken now will be low and vary"
    few = f"{host.cores} cores for {gpus} GPUs; each rank needs one, and decoding images several more"
    yield system(
        "processor",
        f"{host.cpu}, {host.cores} cores, load {load:.1f}",
        (load > 0.5 * host.cores, Grade.NOTE, busy),
        (host.cores < 2 * gpus, Grade.NOTE, few),
    )
    memory = None if host.memory is None else f"{host.memory / GIB:.1f} GiB"
    wanted = sum(gpu.memory or 0 for gpu in found.gpus)
    advice = f"less than the {wanted / GIB:.0f} GiB of the GPUs; pinned buffers and checkpoints share it"
    yield system("memory", memory, (0 < (host.memory or 0) < wanted, Grade.NOTE, advice))
    virtual = host.virtual or "none seen"
    passed = ", GPUs passed through" if any(gpu.virtual == "passthrough" for gpu in found.gpus) else ""
    advice = (
        "virtual machines often show every GPU at PHB and refuse peer access, so copies between GPUs go through "
        "host memory; compare with nvidia-smi topo -m on the host (docs/hardware.md)"
    )
    yield system("virtualisation", virtual + passed, (gpus > 1 and "virtual machine" in virtual, Grade.NOTE, advice))
    groups, option = state.iommu_groups, state.iommu_option
    value = None if groups is None else f"{groups} groups" if groups else "off, or hidden"
    value = f"{value or 'groups not known'}, {option}" if option else value
    is_bad = bool(groups) and host.virtual is None and gpus > 1 and option != "iommu=pt"
    advice = "on bare metal an IOMMU can slow or hang copies between GPUs; boot with iommu=pt, or switch it off"
    yield system("IOMMU", value, (is_bad, Grade.NOTE, advice))
    shared = state.shared_memory
    value = None if shared is None else f"{shared / GIB:.2f} GiB at /dev/shm"
    advice = "NCCL keeps its buffers there and may fail; start the container with --shm-size 1g or --ipc host"
    is_small = shared is not None and shared < _SMALL_SHM and gpus > 1
    yield system("shared memory", value, (is_small, Grade.PROBLEM, advice))
    files = state.open_files
    value = None if files is None else f"{files:,}"
    advice = f"too few for many ranks; raise the limit: ulimit -n {_ENOUGH_FILES}"
    yield system("open files", value, (0 < (files or 0) < 1024, Grade.NOTE, advice))
    trouble, advice = state.loopback_trouble, "ranks of one machine connect over it; allow listening on 127.0.0.1"
    yield system("loopback", trouble or "ranks can listen", (trouble is not None, Grade.PROBLEM, advice))
    trouble, advice = state.port_trouble, "--nodes uses it by default; give another: --nodes HOST:PORT,..."
    yield system(f"port {state.port}", trouble or "free", (trouble is not None, Grade.NOTE, advice))


def software_findings(found: Environment) -> Iterator[Finding]:
    libraries, has_gpus, software = found.libraries, bool(found.gpus), partial(finding, "software")
    cuda, supported = libraries.cuda, found.driver_cuda
    yield software("Python", libraries.python)
    advice = "this build has no GPU support; install one for the driver's CUDA: https://pytorch.org/get-started/locally"
    yield software("torch", libraries.torch, (cuda is None and has_gpus, Grade.PROBLEM, advice))
    mismatch = "driver and library have different versions; reboot, or reload the kernel module"
    too_new = (
        f"torch was built for CUDA {cuda} but the driver supports up to {supported}; update the "
        "driver, or install an older build of torch"
    )
    none_seen = "torch supports GPUs but no driver shows one; install a driver, or start the container with --gpus all"
    newest = f"{found.driver or 'not known'}, CUDA up to {supported or 'not known'}"
    yield software(
        "driver",
        newest if found.nvml is None else f"no GPU: {found.nvml}",
        ("mismatch" in (found.nvml or ""), Grade.PROBLEM, mismatch),
        (_is_newer(cuda, supported), Grade.PROBLEM, too_new),
        (not has_gpus and cuda is not None, Grade.NOTE, none_seen),
    )
    if has_gpus or cuda:
        yield software("CUDA", cuda or "not in this torch")
        yield software("cuDNN", libraries.cudnn or "not installed")
        is_missed = libraries.nccl is None and len(found.gpus) > 1 and cuda is not None
        advice = "without it ranks exchange messages through host memory: --backend gloo"
        yield software("NCCL", libraries.nccl or "not installed", (is_missed, Grade.NOTE, advice))


def _is_newer(one: str | None, other: str | None) -> bool:
    """Whether one CUDA is of a later major release; minor releases run on each other's drivers."""
    if one is None or other is None:
        return False
    return int(one.partition(".")[0]) > int(other.partition(".")[0])
