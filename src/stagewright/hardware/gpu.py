"""The GPUs of this machine: NVIDIA's management library (NVML), and the facts that do not change during a run.

This is the only module that loads NVML. A question that a GPU, a driver or a container does not answer gives None.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_VIRTUAL = {1: "passthrough", 2: "vGPU", 3: "host of vGPUs", 4: "host of vSGAs"}  # NVML's virtualisation modes


class NoNvml(RuntimeError):
    """The library is missing or does not work; the message says why."""


class Nvml:
    """The loaded library; a question without an answer gives None."""

    def __init__(self, library: ModuleType) -> None:
        self._library = library

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *error: object) -> None:
        self.ask("nvmlShutdown")

    def ask(self, question: str, *arguments: Any) -> Any:
        """Call a function of the library; None where it is missing or fails."""
        function = getattr(self._library, question, None)
        try:
            answer = None if function is None else function(*arguments)
        except (self._library.NVMLError, UnicodeDecodeError):
            return None
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer

    def scaled(self, factor: float, question: str, *arguments: Any) -> float | None:
        """A number in our unit, which is `factor` of NVML's."""
        answer = self.ask(question, *arguments)
        return None if answer is None else float(answer) * factor

    def constant(self, name: str) -> Any:
        """A constant of the library by name; None in a release that lacks it."""
        return getattr(self._library, name, None)

    def handles(self) -> list[Any]:
        """The GPUs that this process may query, by index."""
        found = (self.ask("nvmlDeviceGetHandleByIndex", index) for index in range(self.ask("nvmlDeviceGetCount") or 0))
        return [handle for handle in found if handle is not None]


def open_nvml() -> Nvml:
    """Load and initialise the library; NoNvml says why that fails."""
    try:
        import pynvml
    except ImportError as error:
        raise NoNvml("nvidia-ml-py is not installed") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoNvml(str(error)) from error
    except OSError as error:
        raise NoNvml(f"NVML: {error.strerror or error}") from error
    return Nvml(pynvml)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; None where the driver does not say."""

    index: int
    uuid: str
    name: str
    memory: int | None = None  # bytes
    bus: str | None = None  # PCI address
    capability: str | None = None  # compute capability: 9.0
    power_limit: float | None = None  # watts, now
    power_default: float | None = None  # watts, by default
    pcie_generation: int | None = None  # the best that GPU and slot both support; an idle link runs slower
    pcie_width: int | None = None  # lanes in use
    card_generation: int | None = None  # the best that the GPU supports
    card_width: int | None = None
    virtual: str | None = None  # passthrough, vGPU, ...; None on bare metal too
    is_mig: bool | None = None  # split into MIG instances

    @property
    def is_capped(self) -> bool:
        """Whether its power limit is below the default by a watt or more."""
        limit, default = self.power_limit, self.power_default
        return limit is not None and default is not None and limit < default - 1


def read_gpus(nvml: Nvml) -> tuple[Gpu, ...]:
    """The GPUs of this machine, in the order of the driver."""
    return tuple(_read_gpu(nvml, handle, index) for index, handle in enumerate(nvml.handles()))


def _read_gpu(nvml: Nvml, handle: Any, index: int) -> Gpu:
    def ask(what: str) -> Any:
        return nvml.ask(f"nvmlDeviceGet{what}", handle)

    memory, capability, mig = ask("MemoryInfo"), ask("CudaComputeCapability"), ask("MigMode")
    return Gpu(
        index,
        uuid=ask("UUID") or f"GPU {index}",
        name=ask("Name") or "unknown GPU",
        memory=None if memory is None else int(memory.total),
        bus=bus_of(nvml, handle),
        capability=None if capability is None else ".".join(map(str, capability)),
        power_limit=nvml.scaled(1e-3, "nvmlDeviceGetEnforcedPowerLimit", handle),
        power_default=nvml.scaled(1e-3, "nvmlDeviceGetPowerManagementDefaultLimit", handle),
        pcie_generation=ask("MaxPcieLinkGeneration"),
        pcie_width=ask("CurrPcieLinkWidth"),
        card_generation=ask("GpuMaxPcieLinkGeneration"),
        card_width=ask("MaxPcieLinkWidth"),
        virtual=_VIRTUAL.get(ask("VirtualizationMode") or 0),
        is_mig=None if mig is None else bool(mig[0]),
    )


def bus_of(nvml: Nvml, handle: Any) -> str | None:
    """The PCI address, in lower case as the kernel writes it."""
    info = nvml.ask("nvmlDeviceGetPciInfo", handle)
    return None if info is None else bus_text(info)


def bus_text(info: Any) -> str:
    """The PCI address that NVML's PCI information holds."""
    bus: str | bytes = info.busId
    return (bus.decode(errors="replace") if isinstance(bus, bytes) else bus).lower()


def visible(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES shows to this process, in CUDA's order."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(gpus)
    shown: list[Gpu] = []
    for name in (piece.strip() for piece in wanted.split(",")):
        matches = [gpu for gpu in gpus if name == str(gpu.index) or (name[:4] == "GPU-" and gpu.uuid.startswith(name))]
        if len(matches) != 1:
            break  # as CUDA does: everything from the first unknown name on is ignored
        shown += matches
    return shown
