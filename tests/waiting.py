"""Waiting in tests: for an event, not for seconds, so that tests also pass on a machine with a high load.

One such event is that a process has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

LONG = 900  # seconds after which an event will never come; nothing is expected to take this long

Found = TypeVar("Found")


def wait_until(condition: Callable[[], Found], poll: float = 0.02) -> Found:
    """The first true value that a condition returns."""
    limit = time.monotonic() + LONG
    while not (found := condition()):
        assert time.monotonic() < limit, f"it did not happen within {LONG} s"
        time.sleep(poll)
    return found


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended; its new parent may leave it unreaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
