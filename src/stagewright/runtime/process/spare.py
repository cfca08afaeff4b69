"""Rank processes that start before there is a job: they import what ranks need, and wait to be told which rank to be.

A command starts them first of all, so that nobody waits for them: while this process imports torch, opens the data
and makes the plan, they import torch too, and open CUDA's driver.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from stagewright.runtime.process.children import DESCRIPTOR, Children, write_later

SPARE, COMPILES = "--spare", "--compile"  # arguments of the module `rank`
_LENGTH = struct.Struct("<Q")  # before what a process is told


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
                write_later(os.dup(pipe.fileno()), content or b"")
                return self._children.hand_over(process)
        return None


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
