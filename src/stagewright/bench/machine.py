"""The machine that a bench runs on: what else ran on it, and CUDA MPS for ranks that share a GPU."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from stagewright.events import Usage, read_usage
from stagewright.plan.plan import Plan
from stagewright.report.figures import peak_memory
from stagewright.report.read import read_lines
from stagewright.runtime.comm.unix_socket import socket_folder
from stagewright.voice import Voice

_CONTROL = "nvidia-cuda-mps-control"
MPS_SECONDS = 10  # that the daemon gives its clients to end
_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@dataclass(frozen=True, slots=True)
class Observed:
    """What the monitor saw of a run; empty where there was no monitor."""

    memory: tuple[int, ...] = ()  # bytes of the fullest rank of each stage
    gpu_memory: tuple[int, ...] = ()  # the same, as counted by the GPU's driver
    others: float | None = None  # cores that other processes kept busy
    throttled: tuple[str, ...] = ()
    foreign: int = 0  # the most processes of other programs on one GPU


def observed(folder: Path, plan: Plan) -> Observed:
    """Read what the monitor left in a run folder."""
    uses = [use for path in sorted(folder.glob("monitor*.jsonl")) for use in read_usage(read_lines(path))]
    return summarize(uses, plan) if uses else Observed()


def summarize(uses: Sequence[Usage], plan: Plan) -> Observed:
    """The peaks over a monitor's samples, and what disturbed the run."""
    gpus: dict[int, int] = {}
    seen = [gpu for use in uses for gpu in use.gpus]
    for gpu in seen:
        if gpu.memory is not None:
            gpus[gpu.index] = max(gpus.get(gpu.index, 0), gpu.memory)
    placed = {rank: gpus[device.index % len(gpus)] for rank, device in enumerate(plan.devices)} if gpus else {}
    return Observed(
        memory=_by_stage(plan, peak_memory(uses)),
        gpu_memory=_by_stage(plan, placed),
        others=median(max(0.0, use.cores - sum(rank.cores for rank in use.ranks)) for use in uses),
        throttled=tuple(dict.fromkeys(reason for gpu in seen for reason in gpu.throttled)),
        foreign=max((gpu.foreign for gpu in seen), default=0),
    )


def _by_stage(plan: Plan, held: Mapping[int, int]) -> tuple[int, ...]:
    """The fullest rank of each stage."""
    return tuple(max(held.get(rank, 0) for rank in stage.ranks) for stage in plan.stages) if held else ()


@contextmanager
def shared_gpu(voice: Voice) -> Iterator[None]:
    """Run CUDA MPS while the context is open, unless the environment names a daemon of the user.

    Without MPS, processes that share a GPU run on it one after another.
    """
    if _FOLDERS[0] in os.environ:
        yield
        return
    if shutil.which(_CONTROL) is None:
        voice.warn("CUDA MPS is not installed: ranks that share a GPU take turns, which slows down every side")
        yield
        return
    before = {name: os.environ.get(name) for name in _FOLDERS}
    with socket_folder("stagewright-mps-") as folder:
        pipes, logs = Path(folder) / "pipes", Path(folder) / "logs"
        pipes.mkdir()
        logs.mkdir()
        has_started = False
        try:
            os.environ.update(zip(_FOLDERS, (str(pipes), str(logs)), strict=True))
            started = subprocess.run([_CONTROL, "-d"], check=False, capture_output=True, text=True)
            has_started = not started.returncode
            if not has_started:
                voice.warn(f"CUDA MPS does not start: {(started.stderr or started.stdout).strip()}; ranks take turns")
            yield
        finally:
            if has_started:
                _quit(pipes)
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _quit(pipes: Path) -> None:
    """Stop the daemon and, after a while, the clients it waits for; kill it by its process id if it does not answer."""
    order = f"quit -t {MPS_SECONDS}\n".encode()
    try:
        subprocess.run([_CONTROL], input=order, capture_output=True, timeout=2 * MPS_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        with suppress(OSError, ValueError):
            os.kill(int((pipes / f"{_CONTROL}.pid").read_text()), signal.SIGKILL)
