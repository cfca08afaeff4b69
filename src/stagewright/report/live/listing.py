"""Runs as rows of a list: what each trained, how, how fast and how well, and whether it still does.

`run.report` finds the runs; this reads their files, within bounds, and sorts, filters and words the rows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from stagewright.errors import UserError, counted, did_you_mean, printable
from stagewright.events import Evaluated, Step, read_records
from stagewright.files import open_regular
from stagewright.metrics import (
    IMAGES,
    ThroughputUnit,
    format_metric,
    format_rate,
    headline_metrics,
    metric_label,
    steady_rate,
)
from stagewright.report.columns import Column, page_table, used
from stagewright.report.page import Page, Summary
from stagewright.report.read import as_number, read_object, read_tables, read_unit
from stagewright.report.words import ago, format_bytes

STATES = ("running", "finished", "failed", "stopped")
_TAIL = 2**17  # bytes of the metrics of a run without a summary


@dataclass(frozen=True, slots=True)
class Entry:
    """A run in the list; what its files do not tell is empty or None."""

    folder: Path
    name: str  # that a user gave it
    tags: tuple[str, ...]
    state: str  # one of STATES
    started: float  # seconds since the epoch
    bytes: int  # on the disk
    model: str = ""
    mode: str = ""
    shape: str = ""  # replicas of each stage: 7-1
    images_per_second: float | None = None  # samples, whatever the unit
    metric: str = ""  # the first of its last evaluation
    value: float | None = None
    fault: str = ""  # why it failed
    unit: ThroughputUnit = IMAGES

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def plan(self) -> str:
        return f"{self.mode} {self.shape}".strip()

    def describe(self) -> dict[str, Any]:
        """The entry as JSON takes it."""
        return {
            "id": self.id,
            "name": self.name or None,
            "tags": list(self.tags),
            "folder": str(self.folder),
            "model": self.model,
            "mode": self.mode,
            "plan": self.plan,
            "state": self.state,
            "fault": self.fault or None,
            "images_per_second": self.images_per_second,
            "unit": self.unit.name,
            "per_sample": self.unit.per_sample,
            "metric": self.metric or None,
            "value": self.value,
            "started": self.started,
            "bytes": self.bytes,
        }


def read_figures(folder: Path) -> dict[str, Any]:
    """What the files of a run tell of its model, its speed and its last evaluation, as fields of an `Entry`."""
    model, summary = read_tables(folder / "config.toml").get("model"), read_object(folder / "summary.json")
    name = model.get("name") if isinstance(model, dict) else None
    if summary is None:
        metrics, rate = _so_far(folder)
    else:
        made = summary.get("evaluations")
        last = made[-1] if isinstance(made, list) and made and isinstance(made[-1], dict) else {}
        metrics, rate = last.get("metrics"), as_number(summary.get("images_per_second"))
    found = metrics.items() if isinstance(metrics, dict) else ()
    numbers = {str(key): number for key, value in found if (number := as_number(value)) is not None}
    metric, value = next(iter(headline_metrics(numbers).items()), ("", None))
    return {
        "model": printable(name.rpartition(":")[2]) if isinstance(name, str) else "",
        "images_per_second": rate,
        "metric": printable(metric),
        "value": value,
        "unit": read_unit(folder),
    }


def _so_far(folder: Path) -> tuple[Any, float | None]:
    """The last metrics and the speed of a run without a summary, by the end of its records."""
    records = [record for _, record in read_records(_last_lines(folder / "metrics.jsonl"))]
    steps = [record for record in records if isinstance(record, Step)]
    evaluated = [record for record in records if isinstance(record, Evaluated)]
    batch = (read_object(folder / "plan.json") or {}).get("batch")
    speed = steady_rate(steps, batch, {record.batch for record in evaluated}) if isinstance(batch, int) else None
    return evaluated[-1].metrics if evaluated else None, speed.rate if speed else None


def read_state(folder: Path, *, is_running: bool, has_failed: bool) -> str:
    """What became of a run; one whose loss diverged has failed, though it came to its end."""
    if is_running:
        return "running"
    summary = read_object(folder / "summary.json")
    if summary is None:
        return "failed" if has_failed else "stopped"
    return "failed" if summary.get("diverged") else "finished"


def _last_lines(path: Path) -> list[bytes]:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            return file.read(_TAIL).splitlines()
    except OSError:
        return []


# --- Sorting and filtering --------------------------------------------------------------------------------------------

SORTS: dict[str, Callable[[Entry], Any]] = {  # the newest, the fastest and the largest come first
    "started": lambda entry: -entry.started,
    "name": lambda entry: (entry.name or entry.id).lower(),
    "model": lambda entry: entry.model.lower(),
    "state": lambda entry: STATES.index(entry.state),
    "speed": lambda entry: -entry.unit.of(entry.images_per_second or 0.0),
    "metric": lambda entry: (entry.metric, -(entry.value or 0.0)),
    "size": lambda entry: -entry.bytes,
}
_FILTERS: dict[str, Callable[[Entry], Sequence[str]]] = {
    "name": lambda entry: (entry.name, entry.id),
    "model": lambda entry: (entry.model,),
    "mode": lambda entry: (entry.mode,),
    "plan": lambda entry: (entry.plan,),
    "state": lambda entry: (entry.state,),
    "tag": lambda entry: entry.tags,
}


def select(entries: Sequence[Entry], filters: Sequence[str], sort: str) -> list[Entry]:
    """The runs that fit every `key=pattern`, in order."""
    wanted = [_parse_filter(word) for text in filters for word in text.replace(",", " ").split()]
    found = [
        entry
        for entry in entries
        if all(any(fnmatchcase(value, pattern) for value in _FILTERS[key](entry)) for key, pattern in wanted)
    ]
    return sorted(found, key=lambda entry: (SORTS[sort](entry), -entry.started))


def _parse_filter(text: str) -> tuple[str, str]:
    key, equals, pattern = text.partition("=")
    if not equals:
        raise UserError(f"--filter '{text}' is not KEY=VALUE; give for example model=vgg16 or state=finished")
    if key not in _FILTERS:
        raise UserError(f"--filter {text}: unknown key '{key}'; {did_you_mean(key, _FILTERS)}")
    if key == "state" and not any(fnmatchcase(state, pattern) for state in STATES):
        raise UserError(f"--filter {text}: unknown state '{pattern}'; {did_you_mean(pattern, STATES)}")
    return key, pattern


# --- Words ------------------------------------------------------------------------------------------------------------


def columns(entries: Sequence[Entry]) -> tuple[Column[Entry], ...]:
    """What a list of runs has of each; columns without any value are left out.

    The first to go where width is short is the id: it tells when the run started, of which model, by which plan.
    """
    now = time.time()
    rates = {entry.unit.rate for entry in entries if entry.images_per_second is not None}
    rate = rates.pop() if len(rates) == 1 else ""  # then it stands once, above the column
    known: tuple[Column[Entry], ...] = (
        Column("run", lambda entry: entry.name or entry.id, is_text=True),
        Column("state", lambda entry: entry.state, is_text=True),
        Column(rate or "speed", lambda entry: _speed(entry, has_unit=not rate), spare=1),
        Column("metric", _metric, is_text=True, spare=2),
        Column("model", lambda entry: entry.model or None, is_text=True, spare=6),
        Column("plan", lambda entry: entry.plan or None, is_text=True, spare=4),
        Column("started", lambda entry: ago(now - entry.started), is_text=True, spare=5),
        Column("size", lambda entry: format_bytes(entry.bytes), spare=3),
        Column("tags", lambda entry: " ".join(entry.tags) or None, is_text=True, spare=7),
        Column("id", lambda entry: entry.id if entry.name else None, is_text=True, spare=8),
    )
    return used(known, entries)


def total_words(entries: Sequence[Entry]) -> str:
    """`3 runs, 1.2 GiB on the disk`."""
    return f"{counted(len(entries), 'run')}, {format_bytes(sum(entry.bytes for entry in entries))} on the disk"


def _speed(entry: Entry, *, has_unit: bool) -> str | None:
    if entry.images_per_second is None:
        return None
    rate = format_rate(entry.unit.of(entry.images_per_second))
    return f"{rate} {entry.unit.rate}" if has_unit else rate


def _metric(entry: Entry) -> str | None:
    return None if entry.value is None else f"{metric_label(entry.metric)} {format_metric(entry.metric, entry.value)}"


def listing_page(entries: Sequence[Entry], where: str) -> Page:
    """A page that lists runs, each with a link to its own page below this one."""
    running = sum(entry.state == "running" for entry in entries)
    now = f"; {counted(running, 'run')} in training now" if running else ""
    if not entries:
        return Page("Runs", (Summary((f"There are no runs in {where} yet; stagewright train makes one.",)),))
    shown = [column for column in columns(entries) if column.head != "id"]  # the link leads there
    table = page_table("Runs", shown, entries, links=tuple(f"{entry.id}/" for entry in entries))
    return Page(f"Runs in {where}", (Summary((f"{total_words(entries)}{now}.",)), table))
