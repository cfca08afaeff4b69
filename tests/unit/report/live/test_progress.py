"""What takes long is named on standard error: at once on a terminal, after a while in a pipe."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from stagewright.report.live.progress import QUIET, ProgressLine
from tests.waiting import LONG


class Shown(io.StringIO):
    """Standard error that tells when a text has arrived."""

    def __init__(self, awaited: str, *, is_terminal: bool) -> None:
        super().__init__()
        self._awaited, self._is_terminal, self._arrived = awaited, is_terminal, threading.Event()

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        done = super().write(text)
        if self._awaited in text:
            self._arrived.set()
        return done

    def wait(self) -> None:
        assert self._arrived.wait(LONG)


def test_a_pipe_gets_a_line_for_what_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(QUIET)
    monkeypatch.setattr(sys, "stderr", shown := Shown("third", is_terminal=False))
    with ProgressLine(patience=0.01) as progress:
        progress("third\n\x1b[2J")
        shown.wait()
    with ProgressLine("first", patience=1e6) as progress:
        progress("second")
    assert shown.getvalue() == "third\\n\\x1b[2J\n"


def test_a_terminal_gets_one_line_that_is_replaced_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(QUIET)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", shown := Shown("tracing", is_terminal=True))
    with ProgressLine() as progress:
        progress("tracing")
        shown.wait()
        progress.clear()
        assert shown.getvalue().endswith("\x1b[2K") and "\n" not in shown.getvalue()


def test_a_log_of_long_work_gets_every_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(QUIET)
    monkeypatch.setattr(sys, "stderr", shown := Shown("", is_terminal=False))
    with ProgressLine("bench", patience=0) as progress:
        progress("one")
        progress("two")
    assert shown.getvalue() == "one\ntwo\n"
