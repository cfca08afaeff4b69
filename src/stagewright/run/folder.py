"""Where a run leaves its files. A run folder has one supervisor at a time."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.config.sections import Config

if TYPE_CHECKING:
    from stagewright.plan.plan import Plan
    from stagewright.run.resume import Resume


_PLAN = "plan.json"  # every run's folder has one


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    try:
        return (folder / _PLAN).is_file()
    except OSError:  # a text that is too long for a name
        return False


def newest(runs: Iterable[Path]) -> Path:
    """The run that began last."""
    return max(runs, key=lambda folder: (folder / _PLAN).stat().st_mtime)


def run_folder(config: Config, plan: Plan, resume: Resume | None) -> Path:
    """A folder of its own, or that of the run whose newest checkpoint it goes on from, in batches of the same size."""
    if resume is None or not resume.is_newest or resume.checkpoint.manifest.plan.batch != plan.batch:
        return _new_folder(config, plan)
    return resume.run


def _new_folder(config: Config, plan: Plan) -> Path:
    """A folder of its own for this run."""
    model = config.model.name.rpartition(":")[2]
    return new_folder(config.run.runs, f"{model}-{plan.mode}-{plan.shape}")


def new_folder(runs: str, name: str) -> Path:
    """A folder that nobody else has, named after now and what it is about."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        folder = Path(runs).absolute() / f"{stamp}-{name}{suffix}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise ValueError(f"can't make the folder {folder}: {error.strerror}; choose another with --runs") from error
    raise ValueError(f"{runs} holds a thousand folders of this second; choose another with --runs")


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Have a run folder to oneself while the context is open; the system gives it back however the process ends."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"run {folder} is being trained by another process; wait for it, or stop it") from None
        yield


def is_locked(folder: Path) -> bool:
    """Whether a supervisor has this run folder now."""
    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
