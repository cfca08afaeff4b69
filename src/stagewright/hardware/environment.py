"""Everything besides the plan that a measurement depends on: host, GPUs, driver and libraries."""

from __future__ import annotations

import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from stagewright.hardware.gpu import Gpu, NoNvml, open_nvml, read_gpus
from stagewright.hardware.host import Host, read_host
from stagewright.hardware.topology import Topology, read_topology
from stagewright.metrics import GIB


@dataclass(frozen=True, slots=True)
class Libraries:
    """Versions of the libraries; None where one is missing."""

    python: str
    torch: str
    cuda: str | None  # the release that torch was built for
    cudnn: str | None
    nccl: str | None


@dataclass(frozen=True, slots=True)
class Environment:
    """A machine and its software."""

    host: Host
    libraries: Libraries
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    driver_cuda: str | None = None  # the newest release that the driver supports
    topology: Topology | None = None
    nvml: str | None = None  # why no GPUs could be read; None where they were

    def describe(self) -> dict[str, Any]:
        """Everything as JSON takes it; unknown values are null."""
        described = asdict(self)
        described["topology"] = None if self.topology is None else self.topology.texts()
        return described

    def rows(self) -> list[tuple[str, str]]:
        """Names and values for a table of a report; unknown values read "not known"."""
        host, libraries = self.host, self.libraries
        memory = "not known" if host.memory is None else f"{host.memory / GIB:.1f} GiB"
        rows = [
            ("system", f"{host.system}, kernel {host.kernel}"),
            ("processor", f"{host.cpu}, {host.cores} cores"),
            ("memory", memory),
            ("virtualisation", host.virtual or "none seen"),
        ]
        rows += [(f"GPU {gpu.index}", _gpu_words(gpu)) for gpu in self.gpus] or [("GPUs", f"none ({self.nvml})")]
        if self.gpus:
            cuda = f", CUDA up to {self.driver_cuda}" if self.driver_cuda else ""
            rows.append(("driver", f"{self.driver or 'not known'}{cuda}"))
        named = ("python", "Python"), ("torch", "torch"), ("cuda", "CUDA"), ("cudnn", "cuDNN"), ("nccl", "NCCL")
        return rows + [(label, getattr(libraries, name) or "not there") for name, label in named]


def read_environment() -> Environment:
    """This machine and its software."""
    host, libraries = read_host(), read_libraries()
    try:
        nvml = open_nvml()
    except NoNvml as error:
        return Environment(host, libraries, nvml=str(error))
    with nvml:
        newest = nvml.ask("nvmlSystemGetCudaDriverVersion_v2")
        cuda = None if newest is None else f"{newest // 1000}.{newest % 1000 // 10}"
        driver = nvml.ask("nvmlSystemGetDriverVersion")
        return Environment(host, libraries, read_gpus(nvml), driver, cuda, read_topology(nvml))


def read_libraries() -> Libraries:
    nccl = None
    with suppress(AttributeError):  # this torch was built without NCCL
        if torch.cuda.is_available():
            nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None  # type: ignore[no-untyped-call]
    return Libraries(
        platform.python_version(),
        str(torch.__version__),
        torch.version.cuda,
        None if cudnn is None else cudnn_version(cudnn),
        nccl,
    )


def cudnn_version(number: int) -> str:
    """9.1.2 from 90102, 8.9.7 from 8907."""
    major = 10_000 if number >= 90_000 else 1_000
    return f"{number // major}.{number % major // 100}.{number % 100}"


def _gpu_words(gpu: Gpu) -> str:
    memory = "" if gpu.memory is None else f", {gpu.memory / GIB:.1f} GiB"
    power = "" if gpu.power_limit is None else f", {gpu.power_limit:.0f} W"
    pcie = "" if gpu.pcie_generation is None else f", PCIe {gpu.pcie_generation}.0 x{gpu.pcie_width or '?'}"
    return f"{gpu.name}{memory}{power}{pcie}"
