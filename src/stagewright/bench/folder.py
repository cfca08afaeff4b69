"""Where a bench leaves its files: bench.json, report.md, report.html and the logs of its runs in logs.zip."""

from __future__ import annotations

import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from stagewright.bench.outcome import Outcome, write_outcome
from stagewright.bench.pages import outcome_page

LOGS = "logs.zip"
_LEFT_OUT = {"checkpoints", ".lock", "ranks", "report.html"}  # no logs
_NUMBERS = range(2, 1000)


def make_folder(runs: str, suite: str) -> Path:
    """A folder of its own for a bench of this second."""
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-bench-{suite}"
    for suffix in ("", *(f"-{number}" for number in _NUMBERS)):
        folder = Path(runs).absolute() / f"{stamp}{suffix}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise ValueError(f"can't make the folder {folder}: {error.strerror}; choose another with --runs") from error
    raise ValueError(f"{runs} holds a thousand benches of this second; choose another with --runs")


def write_reports(outcome: Outcome, folder: Path) -> None:
    """The outcome in full, and as a page in both forms."""
    from stagewright.reporting import write_page

    write_outcome(outcome, folder)
    write_page(outcome_page(outcome), folder / "report.html")


def zip_logs(runs: Path, folder: Path, clean: Callable[[str], str]) -> None:
    """Move what the runs left into one file; it is whole before they go. Every text and name passes through `clean`."""
    if not runs.is_dir():
        return
    draft = folder / f"{LOGS}.draft"
    with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(path for path in runs.rglob("*") if path.is_file()):
            name = path.relative_to(runs)
            if not _LEFT_OUT & set(name.parts):
                file.writestr(clean(str(name)), clean(path.read_text(errors="replace")))
    draft.replace(folder / LOGS)
    shutil.rmtree(runs)
