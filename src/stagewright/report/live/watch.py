"""What is new in a file of JSON lines that grows, and may be taken back. A run while it runs: what its folder says now, as values, as a line and as a screen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stagewright.events import Evaluated, Restarted, Step, Usage
from stagewright.report.charts import seconds, shown
from stagewright.report.live.terminal import plot
from stagewright.report.read import (
    RankMap,
    as_number,
    as_record,
    as_usage,
    is_emulated,
    read_batches,
    read_object,
    read_plan_fields,
    read_tables,
)


class Tail:
    """Reads a file from where it read before; from its beginning where it was replaced or cut."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._at = 0
        self._torn = b""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether what was read before counts no more, and the objects of the whole lines since then."""
        try:
            with self._path.open("rb") as file:
                status = self._path.stat()
                is_other = status.st_ino != self._inode or status.st_size < self._at
                if is_other:
                    self._inode, self._at, self._torn = status.st_ino, 0, b""
                file.seek(self._at)
                new = file.read()
        except OSError:
            return False, []
        self._at += len(new)
        *lines, self._torn = (self._torn + new).split(b"\n")
        return is_other, [found for line in lines if isinstance(found := _parse(line), dict)]


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


_RECENT = 20  # steps that the speed is read over
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run as it is now."""

    name: str
    rank_map: RankMap
    batch: int
    batches: int | None
    is_running: bool
    is_whole: bool  # it ended as it was meant to
    is_emulated: bool  # one process, which counts as rank 0
    speed: float | None  # images a second over the whole run, by its summary
    steps: Sequence[Step]
    evaluation: Evaluated | None
    restarts: int
    use: Usage | None
    doing: tuple[str, ...]  # of each rank, where that is known

    @property
    def done(self) -> int:
        return self.steps[-1].batch + 1 if self.steps else 0

    @property
    def images_per_second(self) -> float | None:
        """The summary's of a run that has ended, else that of the last steps."""
        if self.speed is not None and not self.is_running:
            return self.speed
        recent = [step for step in self.steps[-_RECENT:] if step.images_per_second > 0]
        spent = sum(self.batch / step.images_per_second for step in recent)
        return len(recent) * self.batch / spent if spent else None

    @property
    def state(self) -> str:
        return "running" if self.is_running else "finished" if self.is_whole else "stopped"

    def describe(self) -> dict[str, Any]:
        """The snapshot as one object."""
        evaluation = self.evaluation
        return {
            "run": self.name,
            "state": self.state,
            "step": self.done,
            "steps": self.batches,
            "loss": self.steps[-1].loss if self.steps else None,
            "images_per_second": self.images_per_second,
            "seconds": self.steps[-1].seconds if self.steps else 0.0,
            "top1": evaluation.top1 if evaluation else None,
            "restarts": self.restarts,
            "doing": list(self.doing),
            "cores": self.use.cores if self.use else None,
            "memory": self.use.memory if self.use else None,
        }


class Watch:
    """Follows a run's files; keeps what it has read."""

    def __init__(self, folder: Path, rank_map: RankMap) -> None:
        self._folder, self._rank_map = folder, rank_map
        self._batch = int(read_plan_fields(folder).get("batch") or 0)
        self._is_emulated = is_emulated(read_tables(folder / "config.toml"))
        self._records, self._monitor = Tail(folder / "metrics.jsonl"), Tail(folder / "monitor.jsonl")
        self._steps: list[Step] = []
        self._evaluation: Evaluated | None = None
        self._restarts = 0
        self._use: Usage | None = None

    def look(self, is_running: bool, doing: Sequence[str] = ()) -> Snapshot:
        """The run as it is now."""
        is_other, lines = self._records.read()
        if is_other:
            self._steps, self._evaluation, self._restarts = [], None, 0
        for record in filter(None, map(as_record, lines)):
            if isinstance(record, Step):
                self._steps.append(record)
            elif isinstance(record, Evaluated):
                self._evaluation = record
            elif isinstance(record, Restarted):
                self._restarts += 1
        uses = filter(None, map(as_usage, reversed(self._monitor.read()[1])))
        self._use = next((use for use in uses if use.ranks), self._use)  # the last snapshot has no ranks any more
        summary = read_object(self._folder / "summary.json")
        return Snapshot(
            self._folder.name,
            self._rank_map,
            self._batch,
            read_batches(self._folder),
            is_running,
            summary is not None,
            self._is_emulated,
            as_number((summary or {}).get("images_per_second")),
            self._steps,
            self._evaluation,
            self._restarts,
            self._use,
            () if self._is_emulated else tuple(doing),
        )


def as_line(snapshot: Snapshot) -> str:
    """A snapshot in a line, for a log."""
    of = f"/{snapshot.batches}" if snapshot.batches else ""
    parts = [f"{snapshot.state}  step {snapshot.done}{of}"]
    if snapshot.steps:
        parts.append(f"loss {snapshot.steps[-1].loss:.4f}")
    if speed := snapshot.images_per_second:
        parts.append(f"{speed:.0f} images/s")
    if snapshot.evaluation:
        parts.append(f"top-1 {snapshot.evaluation.top1:.2%} after step {snapshot.evaluation.batch}")
    if snapshot.use:
        parts.append(f"{snapshot.use.cores:.1f} cores, {snapshot.use.memory / _MIB:,.0f} MiB")
        parts += [f"GPU {gpu.index} {gpu.utilisation:.0%}" for gpu in snapshot.use.gpus if gpu.utilisation is not None]
    if snapshot.restarts:
        parts.append(f"{snapshot.restarts} restarts")
    return "  ".join(parts)


def as_screen(snapshot: Snapshot, width: int) -> RenderableType:
    """A snapshot as it fills a terminal."""
    parts: list[RenderableType] = [
        Text(f"{snapshot.name}: {snapshot.state}", style="bold", overflow="ellipsis", no_wrap=True)
    ]
    if snapshot.batches:
        parts.append(_progress(snapshot.done / snapshot.batches, min(width, 80) - 1))
    parts.append(Text(_headline(snapshot)))
    rows = plot([step.loss for step in snapshot.steps], min(width, 100) - 1)
    if rows:
        parts += [Text("loss", style="dim"), *(Text(row, style="cyan", no_wrap=True) for row in rows)]
    parts.append(_ranks(snapshot))
    if snapshot.use and snapshot.use.gpus:
        parts.append(_gpus(snapshot.use))
    return Group(*parts)


def _progress(share: float, width: int) -> Text:
    done = round(width * min(1.0, share))
    return Text.assemble(("━" * done, "green"), ("─" * (width - done), "dim"))


def _headline(snapshot: Snapshot) -> str:
    of = f" of {snapshot.batches:,}" if snapshot.batches else ""
    parts = [f"step {snapshot.done:,}{of}"]
    speed = snapshot.images_per_second
    if snapshot.steps:
        parts += [f"loss {snapshot.steps[-1].loss:.4f}", seconds(snapshot.steps[-1].seconds)]
    if speed:
        parts.append(f"{shown(round(speed))} images/s")
        if snapshot.is_running and snapshot.batches and snapshot.batches > snapshot.done:
            parts.append(f"{seconds(round((snapshot.batches - snapshot.done) * snapshot.batch / speed))} left")
    if snapshot.evaluation:
        parts.append(f"top-1 {snapshot.evaluation.top1:.1%}")
    if snapshot.use:
        parts.append(f"{snapshot.use.cores:.1f} cores busy")
    return "   ".join(parts)


def _ranks(snapshot: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("rank", no_wrap=True)
    table.add_column("now", no_wrap=True, min_width=20)
    for name in ("cores", "MiB", "torch MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    used = {rank.rank: rank for rank in snapshot.use.ranks} if snapshot.use else {}
    for rank, label in enumerate(["all, one process"] if snapshot.is_emulated else snapshot.rank_map.labels):
        use = used.get(rank)
        held = use.torch_memory if use else None
        table.add_row(
            label,
            snapshot.doing[rank] if rank < len(snapshot.doing) else "-",
            f"{use.cores:.2f}" if use else "-",
            f"{use.memory / _MIB:,.0f}" if use else "-",
            "-" if held is None else f"{held / _MIB:,.0f}",
        )
    return table


def _gpus(use: Usage) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("GPU", "busy", "MiB", "W", "°C"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("slowed down by")
    for gpu in use.gpus:
        table.add_row(
            str(gpu.index),
            "-" if gpu.utilisation is None else f"{gpu.utilisation:.0%}",
            "-" if gpu.memory is None else f"{gpu.memory / _MIB:,.0f}",
            "-" if gpu.power is None else f"{gpu.power:.0f}",
            "-" if gpu.temperature is None else f"{gpu.temperature:.0f}",
            ", ".join(gpu.throttled),
        )
    return table
