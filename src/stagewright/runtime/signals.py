"""Ctrl-C and SIGTERM: the first asks a run to stop when it can, the second stops it at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from stagewright.runtime.job import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Have the first signal call `stop` and the second raise, while the context is open."""
    with kept_signals():
        if threading.current_thread() is threading.main_thread():
            handler = _polite_handler(stop)
            for number in SIGNALS:
                signal.signal(number, handler)
        yield


@contextmanager
def kept_signals(*numbers: signal.Signals) -> Iterator[None]:
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
