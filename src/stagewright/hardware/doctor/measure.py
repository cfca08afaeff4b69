"""Measures bandwidths of this machine, each within a second or two, and grades them as findings.

Memory, messages between two ranks, copies to and between GPUs, and the disk that holds a data set.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from stagewright.errors import UserError, counted
from stagewright.hardware.doctor.finding import UNKNOWN, Finding, Grade, finding
from stagewright.hardware.gpu import Gpu
from stagewright.hardware.host import num_cores
from stagewright.metrics import MIB
from stagewright.runtime.process.link_test import measure_links

_AREA = "measured"
_HOST_BYTES = 64 * MIB
_GPU_BYTES = 128 * MIB
_REPEATS = 5
_MOST_PAIRS = 56  # of eight GPUs
# The disk is read in blocks, until one of these is reached.
_BLOCK = 4 * MIB
_MOST_BYTES = 512 * MIB
_MOST_SECONDS = 2.0
_MOST_FILES = 4096
_GB = 1e9
_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}  # bytes/s of one PCIe lane, by generation
_NOTE_SHARE, _PROBLEM_SHARE = 0.6, 0.4  # of the slot's bandwidth
_SLOW_MEMORY, _SLOW_RANKS = 2 * _GB, 0.3 * _GB
_PHOTO = 110_000  # bytes of an ImageNet file


@dataclass(frozen=True, slots=True)
class Measured:
    """One bandwidth, or why it could not be measured."""

    name: str
    bandwidth: float | None  # bytes per second
    latency: float | None = None  # seconds per small message
    gpu: int | None = None  # the GPU whose slot was measured
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class DiskRead:
    """What was read from a disk, and how long it took."""

    path: str
    bytes: int
    files: int
    seconds: float
    free: int  # bytes free on the disk
    is_cold: bool  # the system was asked to drop the files from memory first


def measurements() -> Iterator[tuple[str, Callable[[str], Measured]]]:
    """Everything that can be measured here, each with its name.

    Last what 1, 2, 4, ... pairs get together when all of them copy through host memory at once. Pairs of GPUs without
    peer access share that: it is `host` of a machine in a cluster file. Without GPUs, as many threads copy memory.
    """
    yield "memory copy, one core", partial(memory_copies, count=1)
    yield "between two ranks", _loopback
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for gpu in range(gpus):
        yield f"host to GPU {gpu}", partial(_copy, source=None, target=gpu)
        yield f"GPU {gpu} to host", partial(_copy, source=gpu, target=None)
    for one, other in itertools.islice(itertools.permutations(range(gpus), 2), _MOST_PAIRS):
        yield f"GPU {one} to GPU {other}", partial(_copy, source=one, target=other)
    copies, most = (_staged_copies, gpus) if gpus > 1 else (memory_copies, num_cores())
    count = 1
    while count <= most:
        yield f"{counted(count, 'pair')} at once through the host", partial(copies, count=count)
        count *= 2


def _loopback(name: str) -> Measured:
    """Two processes exchange messages over the transport that CPU ranks use."""
    (pair,) = measure_links(2)["transfers"]
    return Measured(name, pair["bandwidth"], pair["latency"])


def _copy(name: str, source: int | None, target: int | None) -> Measured:
    """A copy between two GPUs, or between pinned memory (None) and a GPU, whose slot it measures."""
    here, there = (
        torch.zeros(_GPU_BYTES, dtype=torch.uint8, device="cpu" if gpu is None else gpu, pin_memory=gpu is None)
        for gpu in (source, target)
    )
    gpus = [gpu for gpu in (source, target) if gpu is not None]
    bandwidth = _GPU_BYTES / _best(lambda: there.copy_(here, non_blocking=True), *gpus)
    return Measured(name, bandwidth, gpu=gpus[0] if len(gpus) == 1 else None)


def memory_copies(name: str, count: int) -> Measured:
    """So many threads, of one core each, copy memory that is larger than their caches."""
    pairs = [[torch.full((_HOST_BYTES,), value, dtype=torch.uint8) for value in (1, 2)] for _ in range(count)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count) as pool:
            seconds = _best(lambda: list(pool.map(lambda pair: pair[1].copy_(pair[0]), pairs)))
    finally:
        torch.set_num_threads(threads)
    return Measured(name, count * _HOST_BYTES / seconds)


def _staged_copies(name: str, count: int) -> Measured:
    """Every GPU of the first `count` sends to the next one through a pinned buffer of its own, piece by piece."""
    gpus = torch.cuda.device_count()
    pairs = [(gpu, (gpu + 1) % gpus) for gpu in range(count)]
    pieces = _GPU_BYTES // _BLOCK
    lanes = [
        (
            torch.chunk(torch.zeros(_GPU_BYTES, dtype=torch.uint8, device=f"cuda:{one}"), pieces),
            torch.chunk(torch.zeros(_GPU_BYTES, dtype=torch.uint8, device=f"cuda:{other}"), pieces),
            torch.chunk(torch.zeros(_GPU_BYTES, dtype=torch.uint8, pin_memory=True), pieces),
            torch.cuda.Stream(one),  # type: ignore[no-untyped-call]
            torch.cuda.Stream(other),  # type: ignore[no-untyped-call]
        )
        for one, other in pairs
    ]

    def work() -> None:
        for piece in range(pieces):
            for source, target, buffer, down, up in lanes:
                with torch.cuda.stream(down):
                    buffer[piece].copy_(source[piece], non_blocking=True)
                    arrived = down.record_event()
                up.wait_event(arrived)
                with torch.cuda.stream(up):
                    target[piece].copy_(buffer[piece], non_blocking=True)

    return Measured(name, count * _GPU_BYTES / _best(work, *range(gpus)))


def _best(work: Callable[[], object], *gpus: int) -> float:
    """Seconds of the fastest of a few runs: what the hardware can do despite other load."""
    times = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        work()
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def read_disk(path: Path) -> DiskRead:
    """Read files below a folder for a second or two; from the disk, not from memory, where the system allows it."""
    done = files = 0
    is_cold = hasattr(os, "posix_fadvise")
    began = time.perf_counter()
    for name in _files(path):
        files += 1
        with suppress(OSError), name.open("rb", buffering=0) as file:  # `data inspect` reports what can't be read
            if is_cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while _is_going_on(done, began) and (block := file.read(_BLOCK)):
                done += len(block)
        if not _is_going_on(done, began):
            break
    return DiskRead(str(path), done, files, time.perf_counter() - began, shutil.disk_usage(path).free, is_cold)


def _is_going_on(done: int, began: float) -> bool:
    return done < _MOST_BYTES and time.perf_counter() - began < _MOST_SECONDS


def _files(path: Path) -> list[Path]:
    """Some files with content below a folder, or the file itself."""
    instead = "give the folder or file that runs will read"
    if not path.exists():
        raise UserError(f"--data {path}: no such file or folder; {instead}")
    if not path.is_dir() and not _holds_bytes(path):
        raise UserError(f"--data {path} is neither a folder nor a file with content; {instead}")
    walked = (Path(folder) / name for folder, _, names in os.walk(path) for name in sorted(names))
    found = list(itertools.islice(filter(_holds_bytes, walked), _MOST_FILES)) if path.is_dir() else [path]
    if not found:
        raise UserError(f"--data {path} holds 0 files to read; {instead}")
    return found


def _holds_bytes(path: Path) -> bool:
    """Whether a path is a regular file with content: pipes, devices and the kernel's files may never end."""
    with suppress(OSError):
        status = path.stat()
        return stat.S_ISREG(status.st_mode) and status.st_size > 0
    return False


def speed_findings(measured: Iterable[Measured], gpus: Mapping[int, Gpu]) -> Iterator[Finding]:
    for one in measured:
        if one.bandwidth is None:
            yield Finding(_AREA, one.name, UNKNOWN, Grade.NOTE, f"could not be measured: {one.trouble}")
            continue
        value = f"{one.bandwidth / _GB:.1f} GB/s"
        if one.gpu is None:
            value += "" if one.latency is None else f", {one.latency * 1e6:.0f} us per message"
            slow = {"memory copy, one core": _SLOW_MEMORY, "between two ranks": _SLOW_RANKS}.get(one.name, 0.0)
            advice = "slow for a current machine; check what else is running"
            yield finding(_AREA, one.name, value, (one.bandwidth < slow, Grade.NOTE, advice))
            continue
        value, gpu = f"{value}, pinned", gpus.get(one.gpu)
        best = 0.0 if gpu is None else _LANE.get(gpu.pcie_generation or 0, 0.0) * (gpu.pcie_width or 0)
        share = one.bandwidth / best if best else 1.0
        advice = "the slot can carry more; other load on the host, a virtual machine or a riser may be the reason"
        yield finding(
            _AREA,
            one.name,
            f"{value}, {share:.0%} of the slot's" if best else value,
            (share < _PROBLEM_SHARE, Grade.PROBLEM, advice),
            (share < _NOTE_SHARE, Grade.NOTE, advice),
        )


def disk_finding(read: DiskRead) -> Finding:
    """The speed of a disk, in bytes and in photographs of ImageNet's size."""
    seconds = max(read.seconds, 1e-9)
    rate = read.bytes / seconds
    photos = min(rate / _PHOTO, read.files / seconds) if read.bytes < read.files * _PHOTO else rate / _PHOTO
    warm = "" if read.is_cold else ", perhaps from memory"
    slow = "too slow to train one GPU on ImageNet; copy the data to a local disk or into memory"
    modest = "enough for a few GPUs; many need a faster disk, or data that fits in memory"
    return finding(
        _AREA,
        "data",
        f"{rate / 1e6:.0f} MB/s{warm}, {counted(read.files, 'file')}, {read.free / 1e9:.0f} GB free; "
        f"about {photos:.0f} photographs/s",
        (rate < 100e6, Grade.PROBLEM, slow),
        (rate < 500e6, Grade.NOTE, modest),
    )
