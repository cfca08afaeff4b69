"""Where a bench leaves its files: bench.json, report.md, report.html and the logs of its runs in logs.zip."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from stagewright.bench.outcome import Outcome, write_outcome
from stagewright.bench.pages import outcome_page

LOGS = "logs.zip"
_LEFT_OUT = {"checkpoints", ".lock", "ranks", "report.html"}  # no logs


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
