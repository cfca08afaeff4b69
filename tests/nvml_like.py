"""A stand-in for nvidia-ml-py: GPUs as plain values, with the errors that real drivers raise."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


@dataclass
class Card:
    """What one GPU answers; calls named in `silent` raise an error."""

    name: str = "NVIDIA GeForce RTX 3090"
    memory: int = 24576 << 20
    used: int = 1 << 30
    reserved: int = 300 << 20  # of the driver: nvidia-smi does not count it as used
    utilisation: int = 90
    power: int = 300_000  # milliwatts
    limit: int = 350_000
    default_limit: int = 350_000
    energy: int = 1_000_000  # millijoules
    temperature: int = 60
    clock: int = 1700  # MHz
    reasons: int = 0
    processes: tuple[int, ...] = ()
    generation: int = 4
    width: int = 16
    card_generation: int = 4
    card_width: int = 16
    virtual: int = 0
    switch_links: int = 0
    links: tuple[int, ...] = ()  # the card at the far end of each NVLink
    silent: set[str] = field(default_factory=set)


class Library(types.ModuleType):
    """Has the interface of the module `pynvml`."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 2
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    NVML_P2P_CAPS_INDEX_READ = (0,)  # as nvidia-ml-py has it, comma included

    def __init__(self, cards: Sequence[Card], ancestors: dict[tuple[int, int], int] | None = None) -> None:
        super().__init__("pynvml")
        self.cards = list(cards)
        self.ancestors = ancestors or {}
        self.peers = 0  # what a question for peer access answers
        self.init_error: str | None = None
        self.is_open = False

    def nvmlInit(self) -> None:
        if self.init_error:
            raise NVMLError(self.init_error)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.54.15"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12040

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=bus(handle))

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return uuid(handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        card = self._card(handle, "nvmlDeviceGetMemoryInfo" + ("_v2" if version else ""))
        used = card.used if version else card.used + card.reserved
        return SimpleNamespace(total=card.memory, used=used, free=card.memory - used)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=self._card(handle, "nvmlDeviceGetUtilizationRates").utilisation, memory=0)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return (8, 6)

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        raise NVMLError("Not Supported")

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return self._card(handle, "nvmlDeviceGetTemperature").temperature

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return self._card(handle, "nvmlDeviceGetClockInfo").clock

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        card = self._card(handle, "nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid, usedGpuMemory=1 << 20) for pid in card.processes]

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return self.ancestors[min(one, other), max(one, other)]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        card = self.cards[handle]
        if link >= len(card.links) + card.switch_links:
            raise NVMLError("Invalid Argument")
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2 if link >= len(self.cards[handle].links) else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        links = self.cards[handle].links
        return SimpleNamespace(busId=bus(links[link]) if link < len(links) else "00000000:C0:00.0")

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        if isinstance(index, tuple):
            raise TypeError("an integer is required")
        return self.peers

    def __getattr__(self, name: str) -> Any:
        plain = {
            "nvmlDeviceGetName": "name",
            "nvmlDeviceGetPowerUsage": "power",
            "nvmlDeviceGetEnforcedPowerLimit": "limit",
            "nvmlDeviceGetPowerManagementDefaultLimit": "default_limit",
            "nvmlDeviceGetTotalEnergyConsumption": "energy",
            "nvmlDeviceGetCurrentClocksThrottleReasons": "reasons",
            "nvmlDeviceGetMaxPcieLinkGeneration": "generation",
            "nvmlDeviceGetCurrPcieLinkWidth": "width",
            "nvmlDeviceGetGpuMaxPcieLinkGeneration": "card_generation",
            "nvmlDeviceGetMaxPcieLinkWidth": "card_width",
            "nvmlDeviceGetVirtualizationMode": "virtual",
        }
        if name not in plain:
            raise AttributeError(name)
        return lambda handle: getattr(self._card(handle, name), plain[name])

    def _card(self, handle: int, question: str) -> Card:
        assert self.is_open, "asked before nvmlInit, or after nvmlShutdown"
        if question in self.cards[handle].silent:
            raise NVMLError("Not Supported")
        return self.cards[handle]


def uuid(index: int) -> str:
    return f"GPU-0000{index}000-1111-2222-3333-444444444444"


def bus(index: int) -> str:
    return f"00000000:{index:02X}:00.0"
