"""Follows a run folder: `Watch` reads what is new and returns snapshots, which print as a line or a screen."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stagewright.errors import counted, printable
from stagewright.events import Evaluated, GpuUsage, Restarted, Resumed, Step, Usage, read_records, read_usage
from stagewright.files import open_regular
from stagewright.metrics import MIB, format_rate, metric_words, steady_rate
from stagewright.report.columns import Column
from stagewright.report.live.terminal import draw_table, plot
from stagewright.report.read import Facts, RankMap, as_number, read_facts, read_object
from stagewright.report.timeline import action_words
from stagewright.report.words import format_duration

_MOST_METRICS = 3  # in a line
_SIDE_BY_SIDE = 120  # columns in which ranks and GPUs have room beside each other
_RECENT = 20  # steps that the current speed is averaged over, after the one that they begin at


class Tail:
    """Reads the new lines of a growing file of JSON lines; starts over when the file was replaced or truncated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._at = 0
        self._torn = b""

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether it started over, so that earlier lines no longer count; and the new complete lines."""
        try:
            with os.fdopen(open_regular(self._path), "rb") as file:
                status = self._path.stat()
                starts_over = status.st_ino != self._inode or status.st_size < self._at
                if starts_over:
                    self._inode, self._at, self._torn = status.st_ino, 0, b""
                file.seek(self._at)
                new = file.read()
        except OSError:
            return False, []
        self._at += len(new)
        *lines, self._torn = (self._torn + new).split(b"\n")
        return starts_over, lines


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one moment."""

    run: Facts
    is_running: bool
    summary: dict[str, Any] | None  # of a finished run
    steps: Sequence[Step]
    interrupted: frozenset[int]  # batches right after an evaluation, a restart or a resume
    evaluation: Evaluated | None
    restarts: int
    usage: Usage | None
    actions: tuple[str, ...]  # what each rank does now; empty where unknown
    doing: str  # what the run does now: training, evaluating 3,200 of 10,000, ...; empty where unknown
    label: str = ""  # that `runs name` gave it

    @property
    def done(self) -> int:
        return self.steps[-1].batch + 1 if self.steps else 0

    @property
    def images_per_second(self) -> float | None:
        """From the summary of a finished run, else the steady rate of the last steps."""
        whole = as_number((self.summary or {}).get("images_per_second"))
        if whole is not None and not self.is_running:
            return whole
        recent = steady_rate(self.steps[-_RECENT - 1 :], self.run.batch, self.interrupted)
        return recent.rate if recent else None

    @property
    def seconds_left(self) -> float | None:
        """At the current speed, without evaluations that are still to come; None where unknown."""
        speed = self.images_per_second
        if not (speed and self.is_running and self.run.batches):
            return None
        return max(0, self.run.batches - self.done) * self.run.batch / speed

    @property
    def state(self) -> str:
        return "running" if self.is_running else "stopped" if self.summary is None else "finished"

    def describe(self) -> dict[str, Any]:
        """The snapshot as JSON takes it."""
        evaluation = self.evaluation
        return {
            "run": self.run.name,
            "name": self.label or None,
            "state": self.state,
            "step": self.done,
            "steps": self.run.batches,
            "loss": self.steps[-1].loss if self.steps else None,
            "images_per_second": self.images_per_second,  # samples, whatever the unit
            "unit": self.run.unit.name,
            "per_sample": self.run.unit.per_sample,
            "seconds": self.steps[-1].seconds if self.steps else 0.0,
            "top1": evaluation.metrics.get("top1") if evaluation else None,
            "metrics": dict(evaluation.metrics) if evaluation else None,
            "evaluated_on": self.run.evaluated_on if evaluation else None,
            "restarts": self.restarts,
            "now": self.doing or None,
            "doing": list(self.actions),
            "seconds_left": self.seconds_left,
            "cores": self.usage.cores if self.usage else None,
            "memory": self.usage.memory if self.usage else None,
        }


class Watch:
    """Follows the files of a run and keeps what it has read."""

    def __init__(self, folder: Path, rank_map: RankMap) -> None:
        self._folder, self._rank_map = folder, rank_map
        self._records, self._monitor = Tail(folder / "metrics.jsonl"), Tail(folder / "monitor.jsonl")
        self._usage: Usage | None = None
        self._begin()

    def _begin(self) -> None:
        self._steps: list[Step] = []
        self._interrupted: set[int] = set()
        self._evaluation: Evaluated | None = None
        self._restarts = 0

    def snapshot(self, is_running: bool, actions: Sequence[str] = (), doing: str = "") -> Snapshot:
        """Read what is new, and return the state of the run."""
        starts_over, lines = self._records.read()
        if starts_over:
            self._begin()
        for _, record in read_records(lines):
            if isinstance(record, Step):
                self._steps.append(record)
            elif isinstance(record, Evaluated | Restarted | Resumed):
                self._interrupted.add(record.batch)
                self._evaluation = record if isinstance(record, Evaluated) else self._evaluation
                self._restarts += isinstance(record, Restarted)
        samples = read_usage(reversed(self._monitor.read()[1]))
        # The last sample of a run is taken when its ranks have ended.
        self._usage = next((sample for sample in samples if sample.ranks), self._usage)
        run = read_facts(self._folder, self._rank_map)
        return Snapshot(
            run,
            is_running,
            read_object(self._folder / "summary.json"),
            self._steps,
            frozenset(self._interrupted),
            self._evaluation,
            self._restarts,
            self._usage,
            () if run.is_emulated else tuple(actions),
            "" if run.is_emulated else doing,
        )


def as_line(snapshot: Snapshot) -> str:
    """A snapshot as one line, for a log."""
    of = f"/{snapshot.run.batches}" if snapshot.run.batches else ""
    parts = [f"{snapshot.doing or snapshot.state}  step {snapshot.done}{of}", *_figures(snapshot)]
    if snapshot.evaluation:
        after = f"after step {snapshot.evaluation.batch}"
        parts.append(f"{_score(snapshot.evaluation, 2)} on {snapshot.run.evaluated_on} {after}")
    if usage := snapshot.usage:
        parts.append(f"{usage.cores:.1f} cores, {_mib(usage.memory)} MiB")
        parts += [f"GPU {gpu.index} {gpu.utilisation:.0%}" for gpu in usage.gpus if gpu.utilisation is not None]
    if snapshot.restarts:
        parts.append(counted(snapshot.restarts, "restart"))
    return "  ".join(parts)


def _figures(snapshot: Snapshot, *more: str) -> Iterator[str]:
    """Loss, speed and the time that is left, with `more` behind the loss."""
    if snapshot.steps:
        yield from (f"loss {snapshot.steps[-1].loss:.4f}", *more)
    if speed := snapshot.images_per_second:
        yield f"{format_rate(snapshot.run.unit.of(speed))} {snapshot.run.unit.rate}"
    if left := snapshot.seconds_left:
        yield f"{format_duration(round(left))} left"


def _score(evaluation: Evaluated, digits: int) -> str:
    """The first metrics of an evaluation; its loss where it has none."""
    words = metric_words(evaluation.metrics, digits)[:_MOST_METRICS]
    return "  ".join(map(printable, words)) or f"evaluation loss {evaluation.loss:.4f}"


def as_screen(snapshot: Snapshot, width: int) -> RenderableType:
    """A snapshot as a screen of a terminal."""
    run = snapshot.run
    name = f"{snapshot.label} ({run.name})" if snapshot.label else run.name
    title = printable(f"{name}: {snapshot.doing or snapshot.state}")
    parts: list[RenderableType] = [Text(title, style="bold", overflow="ellipsis", no_wrap=True)]
    if run.batches:
        done = round((width - 1) * min(1.0, snapshot.done / run.batches))
        parts.append(Text.assemble(("━" * done, "green"), ("─" * (width - 1 - done), "dim")))
    parts += [Text(line) for line in _wrapped(_headline(snapshot), width)]
    if rows := plot([step.loss for step in snapshot.steps], width - 1):
        parts += [Text("loss", style="dim"), *(Text(row, style="cyan", no_wrap=True) for row in rows)]
    ranks = _ranks(snapshot)
    if not (snapshot.usage and snapshot.usage.gpus):
        return Group(*parts, ranks)
    gpus = draw_table(_GPUS, snapshot.usage.gpus)
    if width < _SIDE_BY_SIDE:
        return Group(*parts, ranks, gpus)
    both = Table.grid(padding=(0, 4))
    both.add_row(ranks, gpus)
    return Group(*parts, both)


def _headline(snapshot: Snapshot) -> Iterator[str]:
    yield f"step {snapshot.done:,}{f' of {snapshot.run.batches:,}' if snapshot.run.batches else ''}"
    yield from _figures(snapshot, format_duration(round(snapshot.steps[-1].seconds)) if snapshot.steps else "")
    if snapshot.evaluation:
        yield f"{_score(snapshot.evaluation, 1)} on {snapshot.run.evaluated_on}"
    if snapshot.usage:
        yield f"{snapshot.usage.cores:.1f} cores busy"


def _wrapped(parts: Iterable[str], width: int) -> list[str]:
    """Figures in lines of this width, none of them on two lines."""
    lines: list[str] = []
    for part in parts:
        longer = f"{lines[-1]} · {part}" if lines else part
        if lines and len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def _short(action: str) -> str:
    """What a rank does now, in a few words: `forward of 66`, a microbatch, or `waits: receive gradients of 71`."""
    _, waits, code = action.rpartition("waits for ")
    words, _, _ = action_words(code).partition(" at stage ")
    return f"{'waits: ' if waits else ''}{words.replace('microbatch ', '')}"


def _ranks(snapshot: Snapshot) -> Table:
    used = {rank.rank: rank for rank in snapshot.usage.ranks} if snapshot.usage else {}
    labels = ["all, one process"] if snapshot.run.is_emulated else snapshot.run.rank_map.labels
    doing = dict(enumerate(map(_short, snapshot.actions)))
    columns: tuple[Column[int], ...] = (
        Column("rank", lambda rank: labels[rank], is_text=True),
        Column("now", doing.get, is_text=True),
        Column("cores", lambda rank: getattr(used.get(rank), "cores", None), "{:.2f}"),
        Column("MiB", lambda rank: getattr(used.get(rank), "memory", None), _mib),
        Column("torch MiB", lambda rank: getattr(used.get(rank), "torch_memory", None), _mib),
    )
    table = draw_table(columns, range(len(labels)))
    table.columns[1].min_width = 32  # so that the table keeps its width while actions change
    return table


def _mib(size: float) -> str:
    return f"{size / MIB:,.0f}"


_GPUS: tuple[Column[GpuUsage], ...] = (
    Column("GPU", lambda gpu: gpu.index),
    Column("busy", lambda gpu: gpu.utilisation, "{:.0%}"),
    Column("MiB", lambda gpu: gpu.memory, _mib),
    Column("W", lambda gpu: gpu.power, "{:.0f}"),
    Column("°C", lambda gpu: gpu.temperature, "{:.0f}"),
    Column("throttled by", lambda gpu: ", ".join(gpu.throttled), is_text=True, wraps=True),
)
