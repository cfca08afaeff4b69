"""The device of a rank: its random numbers, its streams, and values read back from it without waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Reading:
    """A small tensor on its way to the host, where it is once `copied` has happened; None: it is there already."""

    def __init__(self, tensor: Tensor, copied: torch.cuda.Event | None = None) -> None:
        self._tensor = tensor
        self._copied = copied

    def is_completed(self) -> bool:
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def value(self) -> Tensor:
        """The tensor on the host; waits until it is there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor


class Cpu:
    """The CPU, where every result is available as soon as its operation returns."""

    device = torch.device("cpu")

    def seed(self, seed: int) -> None:
        """Seed the generator that the device's random operations use."""
        torch.default_generator.manual_seed(seed)

    def read(self, tensor: Tensor) -> Reading:
        """Start to copy a small tensor to the host, while the device keeps computing."""
        return Reading(tensor)


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
        return Reading(copy, record_event())

    @contextmanager
    def on_stream(self, stream: torch.cuda.Stream, after: torch.cuda.Event | None) -> Iterator[None]:
        """Issue work on another stream, which first waits for the event `after`."""
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield


Device = Cpu | Gpu  # where a rank computes


def record_event() -> torch.cuda.Event:
    """An event at the end of the current stream; waiting for it sleeps, since ranks share the host's cores."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def timed_event() -> torch.cuda.Event:
    """An event at the end of the current stream that knows when it happened."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def gpu_of(device: int, gpus: int, *, share: bool) -> int:
    """The GPU on which a device of a placement runs."""
    return device % gpus if share else device


# How to open device `index` of a placement, by the kind that --device names; on GPUs, whether ranks share them.
DEVICES: dict[str, Callable[[int, bool], Device]] = {
    "cpu": lambda index, share: Cpu(),
    "cuda": lambda index, share: Gpu(gpu_of(index, torch.cuda.device_count(), share=share)),
}


def open_device(kind: str, index: int, *, share: bool) -> Device:
    """The device of a rank on this machine."""
    return DEVICES[kind](index, share)
