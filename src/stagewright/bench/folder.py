"""What a bench leaves: bench.json, report.md, report.html and logs.zip in its folder, and rows for others (`--row`)."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from stagewright.bench.anonymous import Clean, anonymous, make_cleaner
from stagewright.bench.result import FILE, Found, Outcome, Row
from stagewright.cluster.placement import parse_placement
from stagewright.errors import Interrupted, UserError, counted
from stagewright.hardware import rows
from stagewright.report.live.progress import ProgressLine
from stagewright.report.live.terminal import open_console
from stagewright.report.page import Page
from stagewright.run.folder import new_folder
from stagewright.run.report import write_page
from stagewright.voice import Voice

LOGS = "logs.zip"
_NO_LOGS = {"checkpoints", ".lock", "ranks", "report.html"}  # left out of the zip


@contextmanager
def bench_folder(name: str, runs: str, clean: Clean) -> Iterator[Path]:
    """A new folder for a bench. However the bench ends, the logs of its runs are zipped; an empty folder goes."""
    folder = new_folder(runs, f"bench-{Path(name).stem}")
    try:
        yield folder
    finally:
        _zip_logs(folder / "runs", folder, clean)
        if not any(folder.iterdir()):
            folder.rmdir()


def _zip_logs(runs: Path, folder: Path, clean: Clean) -> None:
    """Move what the runs left into logs.zip, every text and name through `clean`; runs go once the zip is complete."""
    if not runs.is_dir():
        return
    draft = folder / f"{LOGS}.draft"
    with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(path for path in runs.rglob("*") if path.is_file()):
            name = path.relative_to(runs)
            if not _NO_LOGS & set(name.parts):
                file.writestr(clean(str(name)), clean(path.read_text(errors="replace")))
    draft.replace(folder / LOGS)
    shutil.rmtree(runs)


@contextmanager
def speaking(name: str) -> Iterator[Voice]:
    """A voice whose warnings and progress are lines on standard error."""
    with ProgressLine(name, patience=0) as line:
        yield Voice(warn=line, progress=line)


def measure_and_show(
    name: str,
    measure: Callable[[Path, Callable[[Found], None], Voice], Found],
    command: str,
    page: Callable[[Found], Page],
    show: Callable[[Console, Found, Path], None],
    *,
    runs: str = "runs",
    anonymise: bool = False,
    as_json: bool,
) -> tuple[Found, Path]:
    """Measure into a new folder, and print the tables or one JSON object; returns the outcome and the folder.

    `measure` is given a folder for its runs and a function to keep what it has, which writes bench.json and the
    reports: an interrupted bench leaves what it had.
    """
    clean: Clean = make_cleaner() if anonymise else str
    latest: list[Found] = []
    with speaking(name) as voice, bench_folder(name, runs, clean) as folder:

        def keep(outcome: Found) -> None:
            outcome = replace(outcome, command=command)
            latest[:] = [anonymous(outcome, clean) if anonymise else outcome]
            write_json(asdict(latest[0]), folder / FILE)
            write_page(page(latest[0]), folder / "report.html")

        try:
            keep(measure(folder / "runs", keep, voice))
        except KeyboardInterrupt as error:
            done = sum(len(row.repeats) for row in latest[0].rows) if latest else 0
            kept = f"what was measured is in {folder}" if latest else "nothing was measured"
            raise Interrupted(f"after {counted(done, 'run')}", kept) from error
    if as_json:
        print(json.dumps(asdict(latest[0]) | {"folder": str(folder)}))
    else:
        show(open_console(), latest[0], folder)
    return latest[0], folder


def write_json(tables: Any, path: Path) -> None:
    """Write a file that is never half of one."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(json.dumps(tables, indent=1))
    draft.replace(path)


def require_none_failed(outcome: Outcome, folder: Path) -> None:
    """An error that names the first configuration that failed."""
    if failed := [row for row in outcome.rows if row.kind == "failed"]:
        first, count = failed[0], f"{len(failed)} of {len(outcome.rows)} configurations"
        raise UserError(f"{count} failed, first {first.group}, {first.label}: {first.reason}; the rest is in {folder}")


def append_rows(outcome: Outcome, path: str) -> int:
    """`--row FILE`: append what was measured of plain data parallel, for others; returns how many rows those are."""
    found = [row for measured in outcome.rows if (row := _row_of(outcome, measured)) is not None]
    if not found:
        what = f"none of the {len(outcome.rows)} configurations was measured in mode dp; rows are of those"
        raise UserError(f"--row {path}: {what}")
    rows.append_rows(found, path)
    return len(found)


def _row_of(outcome: Outcome, row: Row) -> rows.Row | None:
    if row.kind != "measured" or row.rate is None or row.mode != "dp" or not row.placement:
        return None
    devices = [device for stage in parse_placement(row.placement) for device in stage]
    return rows.Row(
        hardware=rows.hardware_of(outcome.machine, row.device),
        gpus=len(devices),
        nodes=len({device.machine for device in devices}),
        software=rows.software_of(outcome.machine),
        model=row.model,
        precision=row.precision,
        batch_per_gpu=max(1, row.batch // len(devices)),
        images_per_second=round(row.rate.value, 2),
        source=f"{outcome.command}, {outcome.date}",
        note=f"{row.data or 'synthetic'} data, median of {len(row.repeats)}",
    )
