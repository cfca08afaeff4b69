"""Commands as a user types them: each in a fresh process, with the lines that it prints and when it printed them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

from stagewright.errors import RunFailed

_STOP_SECONDS = 20.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True, slots=True)
class Printed:
    """What a command printed on standard output; times are seconds since its process was started."""

    lines: tuple[tuple[float, str], ...]
    seconds: float  # until the process had ended

    @property
    def last(self) -> str:
        return self.lines[-1][1] if self.lines else ""

    def when(self, pattern: re.Pattern[str]) -> float | None:
        """When the first line that has the pattern was printed."""
        return next((at for at, line in self.lines if pattern.search(line)), None)


def stagewright(*words: str) -> list[str]:
    """A command of Stagewright in this Python."""
    return [sys.executable, "-m", "stagewright", *words]


def run_command(
    command: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Printed:
    """Run a command to its end with these variables as well; RunFailed with its last line where it fails."""
    variables = {**os.environ, **(environment or {}), "PYTHONUNBUFFERED": "1"}
    began, lines = time.monotonic(), list[tuple[float, str]]()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, env=variables, cwd=folder, stdout=PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            lines.extend((time.monotonic() - began, line.strip()) for line in process.stdout)
            process.wait()
        except BaseException:  # this process is to end: the command ends first, and stops what it has started
            _stop(process)
            raise
        printed = Printed(tuple(lines), time.monotonic() - began)
        errors.seek(0)
        said = [line for line in errors.read().splitlines() if line.strip()]
    if process.returncode:
        raise RunFailed(ended(command, process.returncode, said[-1] if said else printed.last))
    return printed


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    process.kill()


def ended(command: Sequence[str], code: int, why: str) -> str:
    """One line about a command that did not do what it should."""
    return f"{' '.join(command[1:4])} ended with {code}: {why[:200]}"
