"""Signals: Ctrl-C and SIGTERM ask a run to stop, the second one stops it at once; ranks exit with their supervisor."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from stagewright.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
_POLL_SECONDS = 0.5


@contextmanager
def stop_on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """While the context is open, the first signal calls `stop` and the second raises Interrupted."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            raise Interrupted(f"by {signal.Signals(number).name}")
        if sys.stderr.isatty():
            sys.stderr.write("stopping after the batches in flight; press again to stop at once\n")
        stop()

    with preserve_signals():
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, handle)
        yield


@contextmanager
def preserve_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Restore the handlers of SIGINT, SIGTERM and these signals when the context ends, whoever replaced them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (*SIGNALS, *numbers)}
    try:
        yield
    finally:
        for number, before in kept.items():
            signal.signal(number, before)


def exit_with_parent(parent: int) -> None:
    """End this process soon after its parent, however that ended; Linux does so even where this one is stopped."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
