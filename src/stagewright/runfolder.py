"""Where a run leaves its files."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.config.sections import Config

if TYPE_CHECKING:
    from stagewright.plan.plan import Plan
    from stagewright.resume import Resume


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
