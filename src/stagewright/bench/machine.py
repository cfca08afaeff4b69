"""What the figures are measured on, and who else is using it. What the monitor saw of a run: memory of its stages, throttled GPUs, and others on the machine. CUDA MPS for the time of a measurement: without it, processes that share a GPU take turns."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from stagewright.events import Usage
from stagewright.hardware.environment import environment
from stagewright.hardware.host import num_cores
from stagewright.plan.plan import Plan
from stagewright.report.read import read_usage

__all__ = ["busy_seconds", "machine", "num_cores"]
_IDLE = (3, 4)  # idle, and waiting for a disk
_GUEST = 8  # from here on counted twice


def machine() -> dict[str, str]:
    """The machine in a few words."""
    return environment().words()


def busy_seconds() -> float | None:
    """Processor time that everything on this machine has used so far, where the system tells."""
    try:
        first, *_ = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    ticks = [int(text) for text in first.split()[1 : 1 + _GUEST]]
    return sum(count for index, count in enumerate(ticks) if index not in _IDLE) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Seen:
    """A run from outside; empty where nobody watched."""

    memory: tuple[int, ...] = ()  # bytes of the fullest rank of each stage
    gpu_memory: tuple[int, ...] = ()  # the same as the GPU's driver counts it
    others: float | None = None  # cores that other processes kept busy
    throttled: tuple[str, ...] = ()
    foreign: int = 0  # most processes of others on the GPUs


def watched(folder: Path, plan: Plan) -> Seen:
    """What the monitor of a run on this machine has left."""
    uses = [use for path in sorted(folder.glob("monitor*.jsonl")) for use in read_usage(path)]
    return seen(uses, plan) if uses else Seen()


def seen(uses: Sequence[Usage], plan: Plan) -> Seen:
    """The peaks of its moments, and what was out of the ordinary."""
    ranks: dict[int, int] = {}
    gpus: dict[int, int] = {}
    for use in uses:
        for rank in use.ranks:
            held = rank.memory if rank.torch_memory is None else rank.torch_memory
            ranks[rank.rank] = max(ranks.get(rank.rank, 0), held)
        for gpu in use.gpus:
            if gpu.memory is not None:
                gpus[gpu.index] = max(gpus.get(gpu.index, 0), gpu.memory)
    placed = {rank: gpus[device.index % len(gpus)] for rank, device in enumerate(plan.devices)} if gpus else {}
    return Seen(
        memory=_by_stage(plan, ranks),
        gpu_memory=_by_stage(plan, placed),
        others=median(max(0.0, use.cores - sum(rank.cores for rank in use.ranks)) for use in uses),
        throttled=tuple(dict.fromkeys(reason for use in uses for gpu in use.gpus for reason in gpu.throttled)),
        foreign=max((gpu.foreign for use in uses for gpu in use.gpus), default=0),
    )


def _by_stage(plan: Plan, held: Mapping[int, int]) -> tuple[int, ...]:
    """The fullest rank of each stage."""
    return tuple(max(held.get(rank, 0) for rank in stage.ranks) for stage in plan.stages) if held else ()


_CONTROL = "nvidia-cuda-mps-control"
_PATIENCE = 10  # seconds
_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@contextmanager
def shared_gpu(tell: Callable[[str], None]) -> Iterator[None]:
    """Run MPS in folders of its own while the context is open, unless the environment names a user's own."""
    if _FOLDERS[0] in os.environ:
        yield
        return
    if shutil.which(_CONTROL) is None:
        tell("CUDA MPS is not installed: ranks that share a GPU take turns, and all sides are slower")
        yield
        return
    before = {name: os.environ.get(name) for name in _FOLDERS}
    with tempfile.TemporaryDirectory(prefix="stagewright-mps-") as folder:
        pipes, logs = Path(folder) / "pipes", Path(folder) / "logs"
        pipes.mkdir()
        logs.mkdir()
        has_started = False
        try:
            os.environ.update(zip(_FOLDERS, (str(pipes), str(logs)), strict=True))
            started = subprocess.run([_CONTROL, "-d"], check=False, capture_output=True, text=True)
            has_started = not started.returncode
            if not has_started:
                tell(f"CUDA MPS does not start: {(started.stderr or started.stdout).strip()}; ranks take turns")
            yield
        finally:
            if has_started:
                _quit(pipes)
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _quit(pipes: Path) -> None:
    """End the daemon, and whoever it still waits for after a while; where it does not hear, by its id."""
    order = f"quit -t {_PATIENCE}\n".encode()
    try:
        subprocess.run([_CONTROL], input=order, capture_output=True, timeout=2 * _PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        with suppress(OSError, ValueError):
            os.kill(int((pipes / f"{_CONTROL}.pid").read_text()), signal.SIGKILL)
