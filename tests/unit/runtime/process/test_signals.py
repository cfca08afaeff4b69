"""Signals while a run is open: which end it at once, which stay ignored, and when deferred ones are handled."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from stagewright.errors import Interrupted
from stagewright.runtime.process.signals import deferred_signals, stop_on_signal


@pytest.fixture(params=[signal.SIGHUP, signal.SIGQUIT], ids=lambda number: number.name)
def ending(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that ends a process, also where these tests run below nohup, which has them ignore it."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


def test_some_signals_end_a_run_at_the_first_one(ending: signal.Signals) -> None:
    asked: list[str] = []
    with pytest.raises(Interrupted, match=f"by {ending.name}"), stop_on_signal(lambda: asked.append("stop")):
        signal.raise_signal(ending)
    assert not asked and signal.getsignal(ending) == signal.SIG_DFL


def test_a_signal_that_this_process_ignores_stays_ignored(ending: signal.Signals) -> None:
    signal.signal(ending, signal.SIG_IGN)
    with stop_on_signal(lambda: None), deferred_signals():
        assert signal.getsignal(ending) == signal.SIG_IGN
    assert signal.getsignal(ending) == signal.SIG_IGN


def test_a_deferred_signal_is_handled_when_the_context_ends() -> None:
    asked: list[str] = []
    with stop_on_signal(lambda: asked.append("stop")):
        with deferred_signals():
            signal.raise_signal(signal.SIGTERM)
            assert not asked
        assert asked == ["stop"]
