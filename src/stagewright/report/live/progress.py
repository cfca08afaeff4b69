"""What a command does now, on standard error, so that no second is silent.

Imports nothing but the standard library: the command line shows it while it imports torch.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from stagewright.errors import printable

QUIET = "STAGEWRIGHT_QUIET"  # environment variable: where it is set, nothing of this is shown
PATIENCE = 1.0  # seconds after which a pipe gets a line about what takes so long
_FLASH = 0.2  # seconds that are too short to show anything
_REDRAWN = 0.1  # seconds between two frames on a terminal
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_CLEAR = "\r\x1b[2K"


class ProgressLine:
    """One line that changes on a terminal; anywhere else a plain line for each text that lasts longer than `patience`.

    With no patience, as where the texts are a log of long work, a pipe gets every text at once. While something else is
    printed on the same terminal, `clear` takes the line away.
    """

    def __init__(self, text: str = "", patience: float = PATIENCE) -> None:
        self._patience, self._is_quiet = patience, bool(os.environ.get(QUIET))
        self._is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._changed = threading.Condition()
        self._text, self._since = "", time.monotonic()
        self._is_said = self._is_drawn = self._is_closed = False
        self._thread = threading.Thread(target=self._show, daemon=True)
        if text and (patience or self._is_terminal):
            self._set(text)

    def __enter__(self) -> ProgressLine:
        if not self._is_quiet:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_quiet:
            return
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def __call__(self, text: str) -> None:
        """What is done from now on."""
        with self._changed:
            if self._is_quiet:
                return
            if not (self._patience or self._is_terminal):
                self._write(f"{printable(text)}\n")
            else:
                self._set(text)
                self._changed.notify()

    def clear(self) -> None:
        """Take the line away, until the next text."""
        with self._changed:
            self._set("")
            self._erase()

    def _set(self, text: str) -> None:
        self._text, self._since, self._is_said = printable(text), time.monotonic(), False

    def _show(self) -> None:
        with self._changed:
            while not self._is_closed:
                age = time.monotonic() - self._since
                if self._is_terminal:
                    self._draw(age)
                elif self._text and not self._is_said and age >= self._patience:
                    self._write(f"{self._text}\n")
                    self._is_said = True
                self._changed.wait(self._wait(age))
            self._erase()

    def _wait(self, age: float) -> float | None:
        """Seconds until the line must change by itself; None where it need not."""
        if not self._text or (not self._is_terminal and self._is_said):
            return None
        return _REDRAWN if self._is_terminal else max(0.01, self._patience - age)

    def _draw(self, age: float) -> None:
        if not self._text or (age < _FLASH and not self._is_drawn):
            return
        frame = _FRAMES[int(age / _REDRAWN) % len(_FRAMES)] if "utf" in (sys.stderr.encoding or "").lower() else "-"
        seconds = f" {age:.0f} s" if age >= self._patience else ""
        try:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
        except OSError:
            width = 80
        room = max(8, (width or 80) - len(seconds) - 3)
        self._write(f"{_CLEAR}{frame} {self._text[:room]}{seconds}")
        self._is_drawn = True

    def _erase(self) -> None:
        if self._is_drawn:
            self._write(_CLEAR)
            self._is_drawn = False

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):  # nobody reads it, or it is closed
            self._text = ""
