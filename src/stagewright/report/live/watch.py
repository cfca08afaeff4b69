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

from stagewright.events import Evaluated, Restarted, Step, Use
from stagewright.report.charts import seconds, shown
from stagewright.report.live.terminal import plot
from stagewright.report.read import (
    Layout,
    as_number,
    as_record,
    as_use,
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
class Moment:
    """A run as it is now."""

    name: str
    layout: Layout
    batch: int
    batches: int | None
    is_running: bool
    is_whole: bool  # it ended as it was meant to
    is_emulated: bool  # one process, which counts as rank 0
    speed: float | None  # images a second over the whole run, by its summary
    steps: Sequence[Step]
    evaluation: Evaluated | None
    restarts: int
    use: Use | None
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
        """The moment as one object."""
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

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._folder, self._layout = folder, layout
        self._batch = int(read_plan_fields(folder).get("batch") or 0)
        self._is_emulated = is_emulated(read_tables(folder / "config.toml"))
        self._records, self._monitor = Tail(folder / "metrics.jsonl"), Tail(folder / "monitor.jsonl")
        self._steps: list[Step] = []
        self._evaluation: Evaluated | None = None
        self._restarts = 0
        self._use: Use | None = None

    def look(self, is_running: bool, doing: Sequence[str] = ()) -> Moment:
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
        uses = filter(None, map(as_use, reversed(self._monitor.read()[1])))
        self._use = next((use for use in uses if use.ranks), self._use)  # the last moment has no ranks any more
        summary = read_object(self._folder / "summary.json")
        return Moment(
            self._folder.name,
            self._layout,
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


def as_line(moment: Moment) -> str:
    """A moment in a line, for a log."""
    of = f"/{moment.batches}" if moment.batches else ""
    parts = [f"{moment.state}  step {moment.done}{of}"]
    if moment.steps:
        parts.append(f"loss {moment.steps[-1].loss:.4f}")
    if speed := moment.images_per_second:
        parts.append(f"{speed:.0f} images/s")
    if moment.evaluation:
        parts.append(f"top-1 {moment.evaluation.top1:.2%} after step {moment.evaluation.batch}")
    if moment.use:
        parts.append(f"{moment.use.cores:.1f} cores, {moment.use.memory / _MIB:,.0f} MiB")
        parts += [f"GPU {gpu.index} {gpu.utilisation:.0%}" for gpu in moment.use.gpus if gpu.utilisation is not None]
    if moment.restarts:
        parts.append(f"{moment.restarts} restarts")
    return "  ".join(parts)


def as_screen(moment: Moment, width: int) -> RenderableType:
    """A moment as it fills a terminal."""
    parts: list[RenderableType] = [
        Text(f"{moment.name}: {moment.state}", style="bold", overflow="ellipsis", no_wrap=True)
    ]
    if moment.batches:
        parts.append(_progress(moment.done / moment.batches, min(width, 80) - 1))
    parts.append(Text(_headline(moment)))
    rows = plot([step.loss for step in moment.steps], min(width, 100) - 1)
    if rows:
        parts += [Text("loss", style="dim"), *(Text(row, style="cyan", no_wrap=True) for row in rows)]
    parts.append(_ranks(moment))
    if moment.use and moment.use.gpus:
        parts.append(_gpus(moment.use))
    return Group(*parts)


def _progress(share: float, width: int) -> Text:
    done = round(width * min(1.0, share))
    return Text.assemble(("━" * done, "green"), ("─" * (width - done), "dim"))


def _headline(moment: Moment) -> str:
    of = f" of {moment.batches:,}" if moment.batches else ""
    parts = [f"step {moment.done:,}{of}"]
    speed = moment.images_per_second
    if moment.steps:
        parts += [f"loss {moment.steps[-1].loss:.4f}", seconds(moment.steps[-1].seconds)]
    if speed:
        parts.append(f"{shown(round(speed))} images/s")
        if moment.is_running and moment.batches and moment.batches > moment.done:
            parts.append(f"{seconds(round((moment.batches - moment.done) * moment.batch / speed))} left")
    if moment.evaluation:
        parts.append(f"top-1 {moment.evaluation.top1:.1%}")
    if moment.use:
        parts.append(f"{moment.use.cores:.1f} cores busy")
    return "   ".join(parts)


def _ranks(moment: Moment) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("rank", no_wrap=True)
    table.add_column("now", no_wrap=True, min_width=20)
    for name in ("cores", "MiB", "torch MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    used = {rank.rank: rank for rank in moment.use.ranks} if moment.use else {}
    for rank, label in enumerate(["all, one process"] if moment.is_emulated else moment.layout.ranks):
        use = used.get(rank)
        held = use.torch_memory if use else None
        table.add_row(
            label,
            moment.doing[rank] if rank < len(moment.doing) else "-",
            f"{use.cores:.2f}" if use else "-",
            f"{use.memory / _MIB:,.0f}" if use else "-",
            "-" if held is None else f"{held / _MIB:,.0f}",
        )
    return table


def _gpus(use: Use) -> Table:
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
