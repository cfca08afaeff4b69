"""Ctrl-C and SIGTERM: the first asks a run to stop when it can, the second stops it at once. Processes that do not outlive the one that started them."""

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


@contextmanager
def stop_on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Have the first signal call `stop` and the second raise, while the context is open."""
    with preserve_signals():
        if threading.current_thread() is threading.main_thread():
            handler = _polite_handler(stop)
            for number in SIGNALS:
                signal.signal(number, handler)
        yield


@contextmanager
def preserve_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Put handlers back that others replace while the context is open: of SIGINT and SIGTERM, and of these signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (*SIGNALS, *numbers)}
    try:
        yield
    finally:
        for number, before in kept.items():
            signal.signal(number, before)


def _polite_handler(stop: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
    """A signal handler that asks before it insists."""
    heard: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if len(heard) > 1:
            raise Interrupted(f"by {signal.Signals(number).name}")
        if sys.stderr.isatty():
            sys.stderr.write("stopping after the batches that have begun; once more stops at once\n")
        stop()

    return handle


_PARENT_DEATH_SIGNAL = 1  # of prctl
_LOOK_SECONDS = 0.5


def exit_with_parent(parent: int) -> None:
    """End this process soon after its supervisor, however that ended; Linux does it even for one that is stopped."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
