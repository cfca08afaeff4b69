"""Signals: Ctrl-C and SIGTERM ask a run to stop, the second one stops it at once; children exit with their parent."""

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

PARENT = "STAGEWRIGHT_PARENT"  # environment variable: the process that started this one and that it must not outlive
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_ENDING = (signal.SIGHUP, signal.SIGQUIT)  # end a run at the first one
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
_POLL_SECONDS = 0.5

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def stop_on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """While the context is open, the first signal calls `stop` and the second raises Interrupted."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1 or number in _ENDING:
            raise Interrupted(f"by {signal.Signals(number).name}")
        if sys.stderr.isatty():
            sys.stderr.write("stopping after the batches in flight; press again to stop at once\n")
        stop()

    with _handled(handle):
        yield


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Handle signals that come while the context is open when it ends, so that none interrupts what is inside."""
    received: list[int] = []
    try:
        with _handled(lambda number, frame: received.append(number)):
            yield
    finally:
        for number in received:
            signal.raise_signal(number)


@contextmanager
def _handled(handle: Handler) -> Iterator[None]:
    """Handle signals so until the context ends; those of `_ENDING` only where this process does not ignore them."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs handlers in the main thread only
        return
    kept = {number: signal.getsignal(number) for number in (*_STOPPING, *_ENDING)}
    kept = {number: before for number, before in kept.items() if number in _STOPPING or before != signal.SIG_IGN}
    try:
        for number in kept:
            signal.signal(number, handle)
        yield
    finally:
        for number, before in kept.items():
            signal.signal(number, before)


def exit_with_parent() -> None:
    """End this process soon after the one that started it by `Children`, however that ended.

    Linux does so even where this process is stopped. The parent may have ended already, while this one was importing.
    """
    parent = int(os.environ[PARENT])
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
