"""The device of a rank: its random numbers, its streams, and values read back from it without waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Reading(Protocol):
    """A small tensor on its way to the host."""

    def is_completed(self) -> bool: ...
    def value(self) -> Tensor:
        """The tensor on the host; waits until it is there."""
        ...


class Device(Protocol):
    """Where a rank computes."""

    device: torch.device

    def seed(self, seed: int) -> None:
        """Seed the generator that the device's random operations use."""
        ...

    def read(self, tensor: Tensor) -> Reading:
        """Start to copy a small tensor to the host, while the device keeps computing."""
        ...


class Cpu:
    """The CPU, where every result is available as soon as its operation returns."""

    device = torch.device("cpu")

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def read(self, tensor: Tensor) -> Reading:
        return _HostReading(tensor)


class Gpu:
    """One GPU, which computes on the current stream and copies on two more.

    copy_in   ──H2D──┐                    ┌──H2D──
    compute          └─► F ─► B ─► ...    │
    copy_out                  └─D2H──► message
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._generator = torch.cuda.default_generators[index]
        self.copy_in = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.copy_out = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def read(self, tensor: Tensor) -> Reading:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        return _GpuReading(copy, record_event())

    @contextmanager
    def on_stream(self, stream: torch.cuda.Stream, after: torch.cuda.Event | None) -> Iterator[None]:
        """Issue work on another stream, which first waits for the event `after`."""
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield


def record_event() -> torch.cuda.Event:
    """An event at the end of the current stream; waiting for it sleeps, since ranks share the host's cores."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def gpu_of(device: int, gpus: int, *, share: bool) -> int:
    """The GPU on which a device of a placement runs."""
    return device % gpus if share else device


def open_device(kind: str, index: int, *, share: bool) -> Device:
    """The device of a rank on this machine."""
    return Gpu(gpu_of(index, torch.cuda.device_count(), share=share)) if kind == "cuda" else Cpu()


class _HostReading:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def is_completed(self) -> bool:
        return True

    def value(self) -> Tensor:
        return self._tensor


class _GpuReading:
    def __init__(self, copy: Tensor, copied: torch.cuda.Event) -> None:
        self._copy = copy
        self._copied = copied

    def is_completed(self) -> bool:
        return bool(self._copied.query())  # type: ignore[no-untyped-call]

    def value(self) -> Tensor:
        self._copied.synchronize()
        return self._copy
