"""Everything that ranks tell goes through here: to the journal, the screen and the checkpoints, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from stagewright.metrics import Restarted, Resumed
from stagewright.runtime.checkpoint import clear, open_checkpoint
from stagewright.runtime.collect import Collector
from stagewright.runtime.job import Job
from stagewright.runtime.journal import Journal, Record
from stagewright.runtime.keeper import Keeper, leave_out


class Ledger:
    """Hears the events of a run, whichever thread they come from; what a run left before is there already."""

    def __init__(self, job: Job, batches_per_epoch: int, show: Callable[[Record], None]) -> None:
        self._folder = folder = Path(job.folder)
        clear(folder)
        leave_out(folder, job.start)
        self._lock = threading.Lock()
        self._show = show
        self._journal = Journal(folder / "metrics.jsonl", job.start)
        self._keeper = Keeper(job, self._tell)
        self.collector = Collector(job, batches_per_epoch, self._tell, self._journal.records)
        if job.resume is not None:
            plan = open_checkpoint(Path(job.resume)).manifest.plan
            self._tell(Resumed(job.start, job.resume, f"{plan.mode} {plan.shape}"))

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()

    def hear(self, event: dict[str, Any]) -> None:
        """Take one event of one rank."""
        with self._lock:
            match event["kind"]:
                case "saved":
                    self._keeper.hear(event)
                case "restarted":
                    self._rewind(Restarted(event["batch"], event["cause"]))
                case _:
                    self.collector.hear(event)

    def _rewind(self, restarted: Restarted) -> None:
        """The ranks have ended, and begin again."""
        self._keeper.forget()
        clear(self._folder)
        leave_out(self._folder, restarted.batch)
        self._journal.rewind(restarted.batch)
        self.collector.rewind(restarted.batch)
        self._tell(restarted)

    def _tell(self, record: Record) -> None:
        self._journal.write(record)
        try:
            self._show(record)
        except OSError:  # nobody looks any more; the run goes on
            self._show = lambda record: None
