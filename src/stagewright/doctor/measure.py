"""Bandwidths of this machine, each within a second or two."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

_HOST_BYTES = 64 << 20
_GPU_BYTES = 128 << 20
_REPEATS = 5
_MOST_PAIRS = 56  # eight GPUs


@dataclass(frozen=True, slots=True)
class Measured:
    """One bandwidth, or why there is none."""

    name: str
    bandwidth: float | None  # bytes a second
    latency: float | None = None  # seconds a small message
    gpu: int | None = None  # whose slot it is
    trouble: str = ""


def memory_copy() -> Measured:
    """One core copying memory that is larger than caches."""
    source = torch.zeros(_HOST_BYTES, dtype=torch.uint8).fill_(1)
    target = torch.zeros_like(source).fill_(2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Measured("memory copy, one core", _HOST_BYTES / _best(lambda: target.copy_(source)))
    finally:
        torch.set_num_threads(threads)


def loopback() -> Measured:
    """Two rank processes, by the transport that CPU ranks use."""
    from stagewright.runtime.linktest import measure_links

    (pair,) = measure_links(2)["transfers"]
    return Measured("between two ranks", pair["bandwidth"], pair["latency"])


def gpu_copies() -> Iterator[tuple[str, Callable[[], Measured]]]:
    """Copies between pinned memory and each GPU both ways, and between GPUs, by name."""
    if not torch.cuda.is_available():
        return
    count = torch.cuda.device_count()
    for gpu in range(count):
        yield (name := f"host to GPU {gpu}"), partial(_host_copy, name, gpu, is_to_gpu=True)
        yield (name := f"GPU {gpu} to host"), partial(_host_copy, name, gpu, is_to_gpu=False)
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    for one, other in pairs[:_MOST_PAIRS]:
        yield (name := f"GPU {one} to GPU {other}"), partial(_peer_copy, name, one, other)


def _host_copy(name: str, gpu: int, *, is_to_gpu: bool) -> Measured:
    host = torch.zeros(_GPU_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(_GPU_BYTES, dtype=torch.uint8, device=f"cuda:{gpu}")
    source, target = (host, there) if is_to_gpu else (there, host)
    return Measured(name, _GPU_BYTES / _best(lambda: target.copy_(source, non_blocking=True), gpu), gpu=gpu)


def _peer_copy(name: str, one: int, other: int) -> Measured:
    source = torch.zeros(_GPU_BYTES, dtype=torch.uint8, device=f"cuda:{one}")
    target = torch.zeros(_GPU_BYTES, dtype=torch.uint8, device=f"cuda:{other}")
    seconds = _best(lambda: target.copy_(source, non_blocking=True), one, other)
    return Measured(name, _GPU_BYTES / seconds)


def _best(work: Callable[[], object], *gpus: int) -> float:
    """Seconds of the quickest of a few: what the hardware can do, whatever else is going on."""
    times = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        work()
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        times.append(time.perf_counter() - began)
    return min(times[1:])
