"""Child processes: started with their environment and files, stopped together within seconds, never left behind.

Spare ranks are children that start before there is a job: they import what ranks need, and wait to be told which rank
to be. A command starts them first of all, so that nobody waits for them: while this process imports torch, opens the
data and makes the plan, they import torch too, and open CUDA's driver.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
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
SPARE, COMPILES = "--spare", "--compile"  # arguments of the module `rank`
_LENGTH = struct.Struct("<Q")  # before what a process is told


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


class SpareRanks:
    """Processes that wait; leaving the context ends those that nobody has taken."""

    def __init__(self, count: int, *, compiles: bool = False) -> None:
        self._children = Children()
        command = [sys.executable, "-m", "stagewright.runtime.process.rank", SPARE, *([COMPILES] if compiles else [])]
        quiet = subprocess.DEVNULL
        started = (
            self._children.start(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet) for _ in range(count)
        )
        self._waiting = list(started)

    def __enter__(self) -> SpareRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._children.stop(0.0)

    def processes(self) -> list[int]:
        """The ids of those that wait."""
        return [process.pid for process in self._waiting]

    def become(
        self, job: Path, environment: Mapping[str, str], content: bytes | None, stdout: Path, stderr: Path
    ) -> subprocess.Popen[str] | None:
        """Have one run a rank of a job, with these variables and output files; None where none is left that lives.

        `content` is for `object_pipe` there. The process is the caller's from then on.
        """
        files = [str(stdout), str(stderr)]
        told = {"job": str(job), "environment": dict(environment), "files": files, "objects": content is not None}
        text = json.dumps(told).encode()
        while self._waiting:
            process = self._waiting.pop(0)
            assert process.stdin is not None
            with suppress(OSError), process.stdin as pipe:
                os.write(pipe.fileno(), _LENGTH.pack(len(text)) + text)
                _write_later(os.dup(pipe.fileno()), content or b"")
                return self._children.hand_over(process)
        return None


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
    _write_later(writing, content)
    return started


def _write_later(descriptor: int, content: bytes) -> None:
    """Write to a pipe in a thread, for as long as somebody reads, and close it."""
    threading.Thread(target=_write, args=(descriptor, content), daemon=True).start()


def _write(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    with suppress(OSError):  # the process has ended, which its supervisor notices
        while view:
            view = view[os.write(descriptor, view[:_PIECE]) :]
    os.close(descriptor)


def wait_for_rank() -> Path | None:
    """In such a process: become the rank that standard input describes; the file of its job, or None where that ends.

    From then on the process has the environment, the output and, for `object_pipe`, the input that a rank has.
    """
    length = _read(_LENGTH.size)
    if not length:
        return None
    told = json.loads(_read(*_LENGTH.unpack(length)))
    os.environ.update(told["environment"])
    if told["objects"]:
        os.environ[DESCRIPTOR] = str(os.dup(0))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for stream, path in zip((sys.stdout, sys.stderr), told["files"], strict=True):
        with Path(path).open("ab") as file:
            os.dup2(file.fileno(), stream.fileno())
    return Path(told["job"])


def _read(size: int) -> bytes:
    """Bytes of standard input, and no more: what follows is read by others; fewer where it has ended."""
    found = b""
    while len(found) < size and (piece := os.read(0, size - len(found))):
        found += piece
    return found
