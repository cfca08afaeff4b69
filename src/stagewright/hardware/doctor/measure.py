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
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from stagewright.errors import UserError, counted
from stagewright.hardware.doctor.finding import UNKNOWN, Finding, Grade, finding
from stagewright.hardware.gpu import Gpu
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


def memory_copy() -> Measured:
    """One core copies memory that is larger than its caches."""
    source = torch.zeros(_HOST_BYTES, dtype=torch.uint8).fill_(1)
    target = torch.zeros_like(source).fill_(2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Measured("memory copy, one core", _HOST_BYTES / _best(lambda: target.copy_(source)))
    finally:
        torch.set_num_threads(threads)


def loopback() -> Measured:
    """Two processes exchange messages over the transport that CPU ranks use."""
    (pair,) = measure_links(2)["transfers"]
    return Measured("between two ranks", pair["bandwidth"], pair["latency"])


def gpu_copies() -> Iterator[tuple[str, Callable[[], Measured]]]:
    """Copies between pinned memory and each GPU, both ways, and between GPUs, each with its name."""
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


def pairs_at_once() -> Iterator[tuple[str, Callable[[], Measured]]]:
    """What 1, 2, 4, ... pairs get together when all of them copy through host memory at once.

    Pairs of GPUs without peer access share that: it is `host` of a machine in a cluster file. Without GPUs, as many
    threads copy memory.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    most = devices if devices > 1 else len(os.sched_getaffinity(0))
    count = 1
    while count <= most:
        name = f"{counted(count, 'pair')} at once through the host"
        yield name, partial(_staged_copies if devices > 1 else _memory_copies, name, count)
        count *= 2


def _memory_copies(name: str, count: int) -> Measured:
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
    names = list(_files(path))
    if not names:
        raise UserError(f"--data {path} holds 0 files to read; give the folder or file that runs will read")
    began = time.perf_counter()
    for name in names:
        files += 1
        done += _read(name, is_cold, began, _MOST_BYTES - done)
        if done >= _MOST_BYTES or time.perf_counter() - began > _MOST_SECONDS:
            break
    return DiskRead(str(path), done, files, time.perf_counter() - began, shutil.disk_usage(path).free, is_cold)


def _files(path: Path) -> Iterator[Path]:
    """Some files below a folder, or the file itself."""
    if not path.exists():
        raise UserError(f"--data {path}: no such file or folder; give the one that runs will read")
    if not path.is_dir():
        if not _holds_bytes(path):
            raise UserError(
                f"--data {path} is neither a folder nor a file with content; give the one that runs will read"
            )
        yield path
        return
    walked = (Path(folder) / name for folder, _, names in os.walk(path) for name in sorted(names))
    yield from itertools.islice(filter(_holds_bytes, walked), _MOST_FILES)


def _holds_bytes(path: Path) -> bool:
    """Whether a path is a regular file with content: pipes, devices and the kernel's files may never end."""
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def _read(path: Path, is_cold: bool, began: float, most: int) -> int:
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            if is_cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while done < most and time.perf_counter() - began < _MOST_SECONDS and (block := file.read(_BLOCK)):
                done += len(block)
    except OSError:
        return done  # `stagewright data inspect` reports what can't be read
    return done


def speed_findings(measured: Iterable[Measured], gpus: Mapping[int, Gpu]) -> Iterator[Finding]:
    for one in measured:
        if one.bandwidth is None:
            yield Finding(_AREA, one.name, UNKNOWN, Grade.NOTE, f"could not be measured: {one.trouble}")
        elif one.gpu is not None:
            yield _slot_speed(one.name, one.bandwidth, gpus.get(one.gpu))
        else:
            yield _host_speed(one.name, one.bandwidth, one.latency)


def _host_speed(name: str, bandwidth: float, latency: float | None) -> Finding:
    value = f"{bandwidth / _GB:.1f} GB/s" + ("" if latency is None else f", {latency * 1e6:.0f} us per message")
    slow = {"memory copy, one core": _SLOW_MEMORY, "between two ranks": _SLOW_RANKS}.get(name, 0.0)
    advice = "slow for a current machine; check what else is running"
    return finding(_AREA, name, value, (bandwidth < slow, Grade.NOTE, advice))


def _slot_speed(name: str, bandwidth: float, gpu: Gpu | None) -> Finding:
    value = f"{bandwidth / _GB:.1f} GB/s, pinned"
    lane = None if gpu is None else _LANE.get(gpu.pcie_generation or 0)
    if gpu is None or lane is None or gpu.pcie_width is None:
        return finding(_AREA, name, value)
    share = bandwidth / (lane * gpu.pcie_width)
    advice = "the slot can carry more; other load on the host, a virtual machine or a riser may be the reason"
    return finding(
        _AREA,
        name,
        f"{value}, {share:.0%} of the slot's",
        (share < _PROBLEM_SHARE, Grade.PROBLEM, advice),
        (share < _NOTE_SHARE, Grade.NOTE, advice),
    )


def disk_finding(read: DiskRead) -> Finding:
    """The speed of a disk, in bytes and in photographs of ImageNet's size."""
    rate, each = read.bytes / max(read.seconds, 1e-9), read.bytes / read.files
    photos = min(rate / _PHOTO, read.files / max(read.seconds, 1e-9) if each < _PHOTO else rate / _PHOTO)
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
