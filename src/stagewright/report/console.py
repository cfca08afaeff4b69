"""A run's progress: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import os
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from stagewright.metrics import Evaluated, Replaced, Restarted, Resumed, Saved, Step, Unsaved


class LastingConsole(Console):
    """One whose reader may leave (`| head`): what is said then is lost, and nothing else."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


class RunConsole:
    """Shows steps and evaluations as they come."""

    def __init__(self, console: Console, batches: int, batch_size: int, log_every: int) -> None:
        self._console = console
        self._batches = batches
        self._batch_size = batch_size
        self._log_every = log_every
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("training", total=batches)
        self._shown: tuple[int, float] | None = None

    def __enter__(self) -> RunConsole:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """A line that is no record."""
        self._print(line)

    def warn(self, warning: str) -> None:
        self._print(f"warning: {warning}")

    def show(self, record: Step | Evaluated | Replaced | Saved | Unsaved | Restarted | Resumed) -> None:
        if isinstance(record, Restarted | Resumed):
            self._shown = None  # what it was about has been said
            return
        if isinstance(record, Unsaved):
            self._print(f"warning: no checkpoint after step {record.batch}: {record.reason}; training goes on")
            return
        if isinstance(record, Saved):
            self._print(
                f"checkpoint after step {record.batch}: {record.bytes / 2**20:.1f} MiB, "
                f"training stood still for {record.seconds * 1e3:.0f} ms"
            )
            return
        if isinstance(record, Replaced):
            self._print(f"warning: bad record replaced by the next: {record.reason}")
            return
        if isinstance(record, Evaluated):
            self._print(
                f"evaluation after step {record.batch}: loss {record.loss:.4f}  top-1 {record.top1:.2%}  "
                f"top-5 {record.top5:.2%}  ({record.samples} samples)"
            )
            self._shown = None  # the pause does not count as training time
            return
        done = record.batch + 1
        self._progress.update(self._task, completed=done, description=f"loss {record.loss:.4f}")
        if done % self._log_every == 0 or done in (1, self._batches):
            self._print(
                f"epoch {record.epoch + 1}  step {done}/{self._batches}  loss {record.loss:.4f}  "
                f"lr {record.lr:.4g}{self._speed(done)}"
            )

    def _speed(self, done: int) -> str:
        now, shown = time.monotonic(), self._shown
        self._shown = (done, now)
        if shown is None or done == shown[0]:
            return ""
        return f"  {(done - shown[0]) * self._batch_size / (now - shown[1]):.0f} images/s"

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
