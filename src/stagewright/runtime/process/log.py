"""The log of a run: what happens to the events that ranks send, on machine 0.

store ─► EventReader ─► Ledger ─┬─► Committer    makes a checkpoint once every rank has saved its share
                                └─► Collector    puts steps together from microbatches, evaluations from replicas
                                        └─► Journal (metrics.jsonl, one record per line) and the screen"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import Store

from stagewright.events import Evaluated, Record, Replaced, Restarted, Resumed, Saved, Score, Step, as_fields, as_record
from stagewright.metrics import Span, Timeline
from stagewright.runtime.checkpoint.commit import Committer, set_aside_after
from stagewright.runtime.checkpoint.folder import clear, open_checkpoint
from stagewright.runtime.job import Job
from stagewright.runtime.process.rank import EVENTS
from stagewright.runtime.stage.optimizer import learning_rate

OnEvent = Callable[[dict[str, Any]], None]
_POLL_SECONDS = 0.02


class EventReader:
    """A thread that takes the events of one start off the store, keeps the failures and passes on the rest."""

    def __init__(self, store: Store, on_event: OnEvent) -> None:
        self.failures: list[dict[str, Any]] = []
        self._store = store
        self._on_event = on_event
        self._closing = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Read the events that are there already, then stop; raises what the thread raised."""
        self._closing.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._closing.wait(_POLL_SECONDS):
                self._drain()
            self._drain()
        except Exception as error:
            self._error = error

    def _drain(self) -> None:
        while self._store.queue_len(EVENTS):
            event = json.loads(self._store.queue_pop(EVENTS, block=False))
            if event["kind"] == "failure":
                self.failures.append(event)
            else:
                self._on_event(event)


class Journal:
    """metrics.jsonl: one record per line. A record that does not fit on the disk is kept and written with the next."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        path.touch()
        self._file = path.open("ab", buffering=0)
        self._waiting = b""  # for space on the disk
        self.records: tuple[Record, ...] = ()  # of the batches before `start`
        self.rewind(start)

    def write(self, record: Record) -> None:
        self._waiting += json.dumps(as_fields(record)).encode() + b"\n"
        with suppress(OSError):
            self._flush()
            if isinstance(record, Saved):
                os.fsync(self._file.fileno())

    def rewind(self, batch: int) -> None:
        """Drop the records of batches after the first `batch`, as a restart from there makes them again."""
        with suppress(OSError):
            self._flush()
        self._file.close()
        lines = [*self._path.read_bytes().splitlines(), *self._waiting.splitlines()]
        kept = [(line, record) for line, record in _read(lines) if _is_before(record, batch)]
        draft = self._path.with_suffix(".draft")
        with draft.open("wb") as file:
            file.writelines(line + b"\n" for line, _ in kept)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)
        self.records = tuple(record for _, record in kept)
        self._waiting = b""
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        try:
            self._flush()
        except OSError as error:
            lost = self._waiting.count(b"\n")
            raise ValueError(
                f"{lost} records could not be written to {self._path}: {error.strerror}; free space on the disk"
            ) from error
        finally:
            self._file.close()

    def _flush(self) -> None:
        """Write the waiting lines, all of them or none."""
        size = self._path.stat().st_size
        try:
            view = memoryview(self._waiting)
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            os.truncate(self._path, size)
            raise
        self._waiting = b""


def _read(lines: Iterable[bytes]) -> Iterator[tuple[bytes, Record]]:
    """Each line that is complete, with its record; a run that was killed may leave half a line."""
    for line in lines:
        try:
            yield line, as_record(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue


def _is_before(record: Record, batch: int) -> bool:
    if isinstance(record, Replaced):
        return True
    return record.batch < batch if isinstance(record, Step) else record.batch <= batch


class Collector:
    """Takes the ranks' events in any order and passes on steps and evaluations in the order of batches."""

    def __init__(self, job: Job, write: Callable[[Record], None], before: Iterable[Record] = ()) -> None:
        before = tuple(before)
        self._job = job
        self._per_epoch = job.order.batches
        self._write = write
        self._losses: dict[int, dict[int, float]] = {}
        self._scores: dict[int, dict[int, Score]] = {}
        self._ready: set[int] = set()
        self._spans: list[Span] = []
        self._next = job.start  # the batch of the next step
        self.steps = [record for record in before if isinstance(record, Step)]
        self.evaluations = [record for record in before if isinstance(record, Evaluated)]
        self.replaced = {record for record in before if isinstance(record, Replaced)}
        self.skipped = [0] * len(job.plan.stages)  # updates that overflowed, by stage
        self._scales: dict[int, float] = {}
        self.stopped_at: int | None = None
        self.shortage: tuple[int, int] | None = None  # rank out of GPU memory, and the bytes it could have had
        self._start_clock()

    def rewind(self, batch: int) -> None:
        """The ranks start again after the first `batch` batches."""
        self._next = batch
        self._losses.clear()
        self._scores.clear()
        self._scales.clear()
        self._ready.clear()
        self._spans.clear()
        self.steps = [step for step in self.steps if step.batch < batch]
        self.evaluations = [evaluated for evaluated in self.evaluations if evaluated.batch <= batch]

    def handle(self, event: dict[str, Any]) -> None:
        """Take one rank's event."""
        match event["kind"]:
            case "ready":
                self._ready.add(event["rank"])
                if len(self._ready) == self._job.plan.world:
                    self._start_clock()
            case "losses":
                self._add_losses(event["losses"], event.get("time", time.monotonic()), event.get("scale"))
            case "score":
                self._add_score(event["batch"], event["rank"], Score(*event["score"]))
            case "skipped":
                self.skipped[event["stage"]] += 1
            case "bad":
                replaced = Replaced(event["index"], event["reason"])
                if replaced not in self.replaced:  # however many ranks or epochs met it
                    self.replaced.add(replaced)
                    self._write(replaced)
            case "shortage":
                self.shortage = (event["rank"], event["room"])
            case "stopped":
                self.stopped_at = event["batch"]
            case "done":
                self._spans += [Span(event["rank"], *span) for span in event.get("spans", ())]

    @property
    def timeline(self) -> Timeline:
        """The last actions of every rank; the first of them starts at 0 s."""
        first = min((span.start for span in self._spans), default=0.0)
        return Timeline(tuple(replace(span, start=span.start - first, end=span.end - first) for span in self._spans))

    def images_per_second(self) -> float | None:
        """Steady throughput of this job: without its first two batches and those right after a pause."""
        pauses, start = set(self._job.pauses), self._job.start
        own = [step for step in self.steps if step.batch >= start]
        warmup = min(2, len(own) - 1)
        steady = [step for step in own[warmup:] if step.batch not in pauses and step.batch > start]
        seconds = sum(self._job.plan.batch / step.images_per_second for step in steady)
        return len(steady) * self._job.plan.batch / seconds if seconds else None

    def _start_clock(self) -> None:
        """Training starts or resumes now."""
        self._last = time.monotonic()
        self._began = self._last - (self.steps[-1].seconds if self.steps else 0.0)

    def _add_losses(self, losses: list[tuple[int, float]], at: float, scale: float | None) -> None:
        microbatches = self._job.plan.microbatches
        for number, loss in losses:
            self._losses.setdefault(number // microbatches, {})[number] = loss
            if scale is not None:
                self._scales[number // microbatches] = scale
        while len(self._losses.get(self._next, {})) == microbatches and self._next < self._job.batches:
            ordered = [loss for _, loss in sorted(self._losses.pop(self._next).items())]
            self._step(self._next, sum(ordered) / microbatches, at)
            self._next += 1

    def _step(self, batch: int, loss: float, at: float) -> None:
        config = self._job.config
        rate = learning_rate(config.optimizer.lr, config.schedule, batch, self._job.batches)
        speed = self._job.plan.batch / max(at - self._last, 1e-9)
        self._last = at
        scale = self._scales.pop(batch, None)
        step = Step(batch, batch // self._per_epoch, loss, rate, at - self._began, speed, scale)
        self.steps.append(step)
        self._write(step)

    def _add_score(self, batch: int, rank: int, score: Score) -> None:
        scores = self._scores.setdefault(batch, {})
        scores[rank] = score
        last_ranks = self._job.plan.stages[-1].ranks
        if len(scores) == len(last_ranks):
            evaluated = Evaluated.of(batch, [scores[rank] for rank in last_ranks])
            self.evaluations.append(evaluated)
            self._write(evaluated)


class Ledger:
    """Takes all events of a run, from any thread, one at a time; begins with the records that the run has already."""

    def __init__(self, job: Job, show: Callable[[Record], None]) -> None:
        self._folder = folder = Path(job.folder)
        clear(folder)
        set_aside_after(folder, job.start)
        self._lock = threading.Lock()
        self._show = show
        self._journal = Journal(folder / "metrics.jsonl", job.start)
        self._committer = Committer(job, self._write)
        self.collector = Collector(job, self._write, self._journal.records)
        if job.resume is not None:
            plan = open_checkpoint(Path(job.resume)).manifest.plan
            self._write(Resumed(job.start, job.resume, f"{plan.mode} {plan.shape}"))

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    def handle(self, event: dict[str, Any]) -> None:
        """Take one rank's event, or the supervisor's on a restart."""
        with self._lock:
            match event["kind"]:
                case "saved":
                    self._committer.add(event)
                case "restarted":
                    self._rewind(Restarted(event["batch"], event["cause"]))
                case _:
                    self.collector.handle(event)

    def _rewind(self, restarted: Restarted) -> None:
        """The ranks have ended and start again."""
        self._committer.discard()
        clear(self._folder)
        set_aside_after(self._folder, restarted.batch)
        self._journal.rewind(restarted.batch)
        self.collector.rewind(restarted.batch)
        self._write(restarted)

    def _write(self, record: Record) -> None:
        self._journal.write(record)
        try:
            self._show(record)
        except OSError:  # the screen is gone; the run continues
            self._show = lambda record: None
