"""CUDA MPS for the time of a measurement: without it, processes that share a GPU take turns."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_CONTROL = "nvidia-cuda-mps-control"
_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@contextmanager
def shared_gpu(tell: Callable[[str], None]) -> Iterator[None]:
    """Run MPS in folders of its own while the context is open, unless the user runs one already."""
    if _FOLDERS[0] in os.environ:
        yield
        return
    if shutil.which(_CONTROL) is None:
        tell("CUDA MPS is not installed: ranks that share a GPU take turns, and all sides are slower")
        yield
        return
    with tempfile.TemporaryDirectory(prefix="stagewright-mps-") as folder:
        places = {name: Path(folder) / name for name in _FOLDERS}
        for name, place in places.items():
            place.mkdir()
            os.environ[name] = str(place)
        try:
            subprocess.run([_CONTROL, "-d"], check=True, capture_output=True)
            yield
            subprocess.run([_CONTROL], input=b"quit\n", capture_output=True, timeout=30, check=False)
        finally:
            for name in places:
                del os.environ[name]
