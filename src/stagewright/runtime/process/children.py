"""Child processes: started with their environment and files, stopped together within seconds, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from stagewright.runtime.process.signals import PARENT, deferred_signals

DESCRIPTOR = "STAGEWRIGHT_OBJECTS"  # environment variable: that of the pipe which a process reads first
STOP_SECONDS = 2.0  # from SIGTERM to SIGKILL
_POLL_SECONDS = 0.01
_PIECE = 1 << 20  # bytes


class Children:
    """The processes that this one starts; leaving the context stops those that still run.

        with Children() as children:
            children.start([sys.executable, "-m", "package.module"], {"RANK": "0"}, stderr=folder / "0.err")
            while None in children.codes():
                time.sleep(0.1)

    Each child is in a session of its own: Ctrl-C reaches only this process, and a stop also reaches what the child
    has started. A module that is run as a child calls `signals.exit_with_parent()` first, so that it ends with this
    process even where that is killed. All methods are called in one thread, which must outlive the children.
    """

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        content: bytes | None = None,
        *,
        stdin: int | None = None,
        stdout: Path | int | None = None,
        stderr: Path | int | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command with these variables added to the environment; `content` is for `object_pipe` there.

        Output goes to the end of a file, to where this process's does (None), or as `subprocess.PIPE` says.
        """
        variables = {**os.environ, **(environment or {}), PARENT: str(os.getpid())}
        with ExitStack() as stack, deferred_signals():  # an exception in here would lose a process
            out, error = (
                stack.enter_context(target.open("ab")) if isinstance(target, Path) else target
                for target in (stdout, stderr)
            )
            child = start_process(
                command, content, variables, stdin=stdin, stdout=out, stderr=error, start_new_session=True
            )
            self._started.append(child)
        return child

    def adopt(self, child: subprocess.Popen[str]) -> None:
        """Take a process that this one has started elsewhere, in a session of its own."""
        self._started.append(child)

    def hand_over(self, child: subprocess.Popen[str]) -> subprocess.Popen[str]:
        """Forget a process, which somebody else adopts."""
        self._started.remove(child)
        return child

    def codes(self) -> list[int | None]:
        """Exit codes in the order of starts, negative for a signal; None for a process that runs."""
        return [child.poll() for child in self._started]

    def processes(self) -> list[int]:
        """Process ids in the order of starts."""
        return [child.pid for child in self._started]

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End all, killing those that still run after `seconds`; the next start is the first again."""
        with deferred_signals():
            limit = time.monotonic() + seconds
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # a stopped process would not notice
            while None in self.codes() and time.monotonic() < limit:
                time.sleep(_POLL_SECONDS)
            self._signal(signal.SIGKILL)
            for child in self._started:
                child.wait()
            self._started.clear()

    def _signal(self, number: signal.Signals) -> None:
        for child in self._started:
            if child.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, number)


def start_process(
    command: Sequence[str], content: bytes | None, environment: Mapping[str, str] = os.environ, **options: Any
) -> subprocess.Popen[str]:
    """Start a process that gets these bytes from an inherited pipe; a thread writes them, for as long as it reads."""
    if content is None:
        return subprocess.Popen(command, env=environment, text=True, **options)
    reading, writing = os.pipe()
    try:
        started: subprocess.Popen[str] = subprocess.Popen(
            command, env={**environment, DESCRIPTOR: str(reading)}, text=True, pass_fds=(reading,), **options
        )
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)  # so that writing fails once the process has ended
    write_later(writing, content)
    return started


def write_later(descriptor: int, content: bytes) -> None:
    """Write to a pipe in a thread, for as long as somebody reads, and close it."""
    threading.Thread(target=_write, args=(descriptor, content), daemon=True).start()


def _write(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    with suppress(OSError):  # the process has ended, which its supervisor notices
        while view:
            view = view[os.write(descriptor, view[:_PIECE]) :]
    os.close(descriptor)
