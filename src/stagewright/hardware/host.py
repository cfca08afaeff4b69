"""The host without its GPUs: system, processor, memory, and whether it is virtual."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Host:
    """The host that a run's processes share; None where the system does not say."""

    name: str
    system: str  # name and release
    kernel: str
    cpu: str
    sockets: int | None
    cores: int  # that this process may use; a core with two threads counts twice
    physical_cores: int | None
    memory: int | None  # bytes that this process may use
    virtual: str | None  # the kind of virtual machine or container


def read_host(root: Path = Path("/")) -> Host:
    """This host; `root` is where the system's files are, for tests."""
    parts = (line.partition(":") for line in _lines(root / "proc/cpuinfo"))
    about = [(name.strip(), value.strip()) for name, _, value in parts]
    first = dict(reversed(about))  # of the first processor
    release = dict(line.partition("=")[::2] for line in _lines(root / "etc/os-release"))
    return Host(
        platform.node(),
        release.get("PRETTY_NAME", f"{platform.system()} {platform.release()}").strip().strip('"'),
        platform.release(),
        first.get("model name") or platform.processor() or platform.machine(),
        len({value for name, value in about if name == "physical id"}) or None,
        num_cores(),
        psutil.cpu_count(logical=False),
        _memory(root, psutil.virtual_memory().total),
        _virtual(root, first.get("flags", "").split()),
    )


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _memory(root: Path, total: int) -> int:
    """The memory of the machine, or the part of it that this container may use."""
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = "".join(_lines(root / name)).strip()
        if text.isdigit():
            return min(total, int(text))
    return total


def _virtual(root: Path, flags: list[str]) -> str | None:
    """Judged by the processor's flags, the firmware's vendor and the files that containers leave."""
    found: list[str] = []
    if "hypervisor" in flags:
        vendor = "".join(_lines(root / "sys/class/dmi/id/sys_vendor")).strip()
        found.append(f"virtual machine ({vendor})" if vendor else "virtual machine")
    cgroup = " ".join(_lines(root / "proc/1/cgroup"))
    marks = (root / ".dockerenv", root / "run/.containerenv")
    if any(mark.exists() for mark in marks) or "docker" in cgroup or "kubepods" in cgroup:
        found.append("container")
    return ", ".join(found) or None
