"""Run folders on the disk: make one, recognise one, and lock one while it is being trained.

Imports nothing of ours, so that the command line can look for runs before it imports anything large.

A run leaves config.toml, env.json, plan.json, job.json, metrics.jsonl, monitor.jsonl, summary.json, trace.json,
memory.json, proof.json, weights.safetensors, report.html, report.md, log.txt, logs/ and checkpoints/; runs/<id> by
default.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stagewright.errors import UserError, is_text

if sys.platform != "win32":  # where the command line says that nothing runs there
    import fcntl

PLAN_FILE = "plan.json"  # every run folder has one
WEIGHTS_FILE = "weights.safetensors"  # of a model that a script has given as an object
PROOF_FILE = "proof.json"  # what was proven of the cut; only a run that is cut has one
_LOCK_FILE = ".lock"


def is_run(folder: Path) -> bool:
    """Whether a folder is a run folder."""
    try:
        return (folder / PLAN_FILE).is_file()
    except OSError:  # the text is too long for a file name
        return False


def newest(runs: Iterable[Path]) -> Path:
    """The run that started last."""
    return max(runs, key=lambda folder: (folder / PLAN_FILE).stat().st_mtime)


def new_folder(runs: str, name: str) -> Path:
    """Make a new folder in `runs`, named after the current time and `name`, that only its user can open."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    if not is_text(str(Path(runs).absolute())):
        raise UserError(f"can't store the path {Path(runs).absolute()} as UTF-8; choose another with --runs")
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        folder = Path(runs).absolute() / f"{stamp}-{name}{suffix}"
        try:
            folder.mkdir(0o700, parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"can't make the folder {folder}: {error.strerror}; choose another with --runs") from error
    raise UserError(f"{runs} already has 999 folders named {stamp}-{name}; choose another folder with --runs")


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder while the context is open; the system frees it however the process ends."""
    with (folder / _LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"run {folder} is being trained by another process; wait for it, or stop it") from None
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process is training this run now."""
    try:
        with (folder / _LOCK_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
