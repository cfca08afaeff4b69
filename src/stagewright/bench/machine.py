"""The machine that a bench runs on: what else ran on it, and CUDA MPS for ranks that share a GPU."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

from stagewright.bench.result import Repeat
from stagewright.events import read_usage
from stagewright.plan.plan import Plan
from stagewright.report.figures import peak_memory
from stagewright.report.read import read_lines
from stagewright.runtime.comm.unix_socket import socket_folder
from stagewright.voice import Voice

_CONTROL = "nvidia-cuda-mps-control"
MPS_SECONDS = 10  # that the daemon gives its clients to end
_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


def with_usage(repeat: Repeat, folder: Path, plan: Plan) -> Repeat:
    """The repeat with the peaks that the monitor of its run saw, and what disturbed it; the same without a monitor."""
    uses = [use for path in sorted(folder.glob("monitor*.jsonl")) for use in read_usage(read_lines(path))]
    if not uses:
        return repeat
    gpus: dict[int, int] = {}
    seen = [gpu for use in uses for gpu in use.gpus]
    for gpu in seen:
        if gpu.memory is not None:
            gpus[gpu.index] = max(gpus.get(gpu.index, 0), gpu.memory)
    placed = {rank: gpus[device.index % len(gpus)] for rank, device in enumerate(plan.devices)} if gpus else {}
    return replace(
        repeat,
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
