"""CUDA MPS for the time of a measurement: without it, processes that share a GPU take turns."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
