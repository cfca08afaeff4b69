"""Processes that do not outlive the one that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time

_PARENT_DEATH_SIGNAL = 1  # of prctl
_LOOK_SECONDS = 0.5


def die_with(parent: int) -> None:
    """End this process soon after its supervisor, however that ended; Linux does it even for one that is stopped."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
