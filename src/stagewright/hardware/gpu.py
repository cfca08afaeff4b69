"""NVIDIA's management library: one place that loads it, and questions that may have no answer. What a GPU is: facts that do not change while a run lasts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any


class NoNvml(RuntimeError):
    """The library is not there, or does not work; the text says why."""


class Nvml:
    """An opened library; what a card, a driver or a container does not tell is None."""

    def __init__(self, library: ModuleType) -> None:
        self._library = library

    def __enter__(self) -> Nvml:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ask("nvmlShutdown")

    def ask(self, question: str, *arguments: Any) -> Any:
        """What a function of the library answers; None where it is missing or fails."""
        function = getattr(self._library, question, None)
        try:
            answer = None if function is None else function(*arguments)
        except (self._library.NVMLError, UnicodeDecodeError):
            return None
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer

    def constant(self, name: str) -> Any:
        """A number by its name in the library; None in a release that has no such name."""
        return getattr(self._library, name, None)

    def handles(self) -> list[Any]:
        """Every GPU that this process may ask about, by index."""
        found = (self.ask("nvmlDeviceGetHandleByIndex", index) for index in range(self.ask("nvmlDeviceGetCount") or 0))
        return [handle for handle in found if handle is not None]


def open_nvml() -> Nvml:
    """Load and start the library; NoNvml says why that can't be."""
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


_VIRTUAL = {1: "passthrough", 2: "vGPU", 3: "host of vGPUs", 4: "host of vSGAs"}
_MILLI = 1e-3


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; None where its driver does not say."""

    index: int
    uuid: str
    name: str
    memory: int | None  # bytes
    bus: str | None  # PCI address
    capability: str | None  # compute capability: 9.0
    power_limit: float | None  # watts that it may draw now
    power_default: float | None  # watts that it may draw as delivered
    pcie_generation: int | None  # the best of card and slot together; less while idle
    pcie_width: int | None  # lanes in use
    card_generation: int | None  # the best of the card alone
    card_width: int | None
    virtual: str | None  # passthrough, vGPU; None on bare metal too
    is_mig: bool | None  # cut into instances


def read_gpus(nvml: Nvml) -> tuple[Gpu, ...]:
    """Every GPU of this machine, in the order of its driver."""
    return tuple(read_gpu(nvml, handle, index) for index, handle in enumerate(nvml.handles()))


def read_gpu(nvml: Nvml, handle: Any, index: int) -> Gpu:
    ask = nvml.ask
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
    mig = ask("nvmlDeviceGetMigMode", handle)
    return Gpu(
        index,
        uuid=ask("nvmlDeviceGetUUID", handle) or f"GPU {index}",
        name=ask("nvmlDeviceGetName", handle) or "GPU of an unknown name",
        memory=None if memory is None else int(memory.total),
        bus=bus_of(nvml, handle),
        capability=None if capability is None else ".".join(str(part) for part in capability),
        power_limit=_scaled(ask("nvmlDeviceGetEnforcedPowerLimit", handle)),
        power_default=_scaled(ask("nvmlDeviceGetPowerManagementDefaultLimit", handle)),
        pcie_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
        card_generation=ask("nvmlDeviceGetGpuMaxPcieLinkGeneration", handle),
        card_width=ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
        virtual=_VIRTUAL.get(ask("nvmlDeviceGetVirtualizationMode", handle) or 0),
        is_mig=None if mig is None else bool(mig[0]),
    )


def bus_of(nvml: Nvml, handle: Any) -> str | None:
    """The PCI address, in lower case as the kernel writes it."""
    info = nvml.ask("nvmlDeviceGetPciInfo", handle)
    return None if info is None else _text(info.busId).lower()


def visible(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that CUDA shows to a process of this environment, in its order."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(gpus)
    shown: list[Gpu] = []
    for name in (piece.strip() for piece in wanted.split(",")):
        matches = [gpu for gpu in gpus if name == str(gpu.index) or (name[:4] == "GPU-" and gpu.uuid.startswith(name))]
        if len(matches) != 1:
            break  # as CUDA does: nothing from the first unknown name on
        shown += matches
    return shown


def _scaled(milli: Any) -> float | None:
    return None if milli is None else float(milli) * _MILLI


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
