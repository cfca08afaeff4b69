"""A run folder has one supervisor at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def possess(folder: Path) -> Iterator[None]:
    """Have a run folder to oneself while the context is open; the system gives it back however the process ends."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"run {folder} is being trained by another process; wait for it, or stop it") from None
        yield


def is_possessed(folder: Path) -> bool:
    """Whether a supervisor has this run folder now."""
    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
