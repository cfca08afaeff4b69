"""The log of a run: what happens to the events that ranks send, on machine 0.

store ─► EventReader ─► Ledger ─┬─► Committer        makes a checkpoint once every rank has saved its share, in a thread
                                ├─► Calls            compares what the ranks of a script ask for
                                └─► Steps, Scores    put steps together from microbatches, evaluations from replicas
                                        └─► Journal (metrics.jsonl, one record per line) and the screen"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch.distributed import Store

from stagewright.config.learning_rate import learning_rate
from stagewright.errors import RunFailed, UserError
from stagewright.events import (
    BatchLosses,
    Best,
    Called,
    Evaluated,
    Event,
    Failure,
    Finished,
    Ready,
    Record,
    Replaced,
    Restarted,
    Resumed,
    Saved,
    Score,
    Scored,
    ShareSaved,
    Shortage,
    Skipped,
    Step,
    Stopped,
    Unsaved,
    decode,
    encode,
    read_records,
)
from stagewright.metrics import RecentRate, Span, SteadyRate, Timeline, steady_rate
from stagewright.runtime.checkpoint.commit import Committer, set_aside_after
from stagewright.runtime.checkpoint.folder import clear, open_checkpoint
from stagewright.runtime.job import NEVER, Job
from stagewright.runtime.process.rank import EVENTS, SETTLED, clock_name
from stagewright.voice import SILENT, Voice

_POLL_SECONDS = 0.02
Write = Callable[[Record], None]
_Loss = tuple[float, float, float | None, float | None]  # total, count, loss scale, and the rate that a script has set


class EventHandler:
    """Takes the events of a run's ranks, one at a time; this default ignores them, and commits no checkpoint."""

    def handle(self, event: Event) -> None:
        """Take one rank's event, or the supervisor's on a restart."""

    def settled(self) -> int:
        """Batch of the newest checkpoint that is committed or given up."""
        return NEVER

    def drain(self) -> None:
        """Commit the checkpoints that are whole."""

    def wants_stop(self) -> bool:
        """Whether the run is to stop after a checkpoint, as after Ctrl-C."""
        return False


class EventReader:
    """A thread that takes the events of one start off the store, keeps the failures and passes on the rest.

    It also tells the ranks which checkpoint is settled.
    """

    def __init__(self, store: Store, handler: EventHandler) -> None:
        self.failures: list[Failure] = []
        self._store = store
        self._handler = handler
        self._settled: int | None = None  # what ranks know
        self._closing = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what the thread raised: an event that does not decode, or that could not be handled."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Read the events that are there already, settle their checkpoints, stop; raises what the thread raised."""
        self._closing.set()
        self._thread.join()
        self.check()
        self._handler.drain()

    def _run(self) -> None:
        try:
            while not self._closing.wait(_POLL_SECONDS):
                self._drain()
            self._drain()
        except Exception as error:
            self._error = error

    def _drain(self) -> None:
        if self._settled != (settled := self._handler.settled()):
            self._store.set(SETTLED, str(settled))
            self._settled = settled
        while self._store.queue_len(EVENTS):
            event = decode(self._store.queue_pop(EVENTS, block=False))
            if isinstance(event, Failure):
                self.failures.append(event)
            else:
                self._handler.handle(event)


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
        self._waiting += encode(record).encode() + b"\n"
        with suppress(OSError):
            self._flush()
            if isinstance(record, Saved):
                os.fsync(self._file.fileno())

    def rewind(self, batch: int) -> None:
        """Drop the records of batches after the first `batch`, as a restart from there makes them again.

        Where the disk has no room for that it raises OSError and changes nothing.
        """
        with suppress(OSError):
            self._flush()
        lines = [*self._path.read_bytes().splitlines(), *self._waiting.splitlines()]
        kept = [(line, record) for line, record in read_records(lines) if _is_before(record, batch)]
        draft = self._path.with_suffix(".draft")
        try:
            with draft.open("wb") as file:
                file.writelines(line + b"\n" for line, _ in kept)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
        finally:
            draft.unlink(missing_ok=True)
        self._file.close()
        self.records = tuple(record for _, record in kept)
        self._waiting = b""
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        try:
            self._flush()
        except OSError as error:
            lost = self._waiting.count(b"\n")
            raise UserError(
                f"{lost} records could not be written to {self._path}: {error.strerror}; free space on the disk"
            ) from error
        finally:
            self._file.close()

    def _flush(self) -> None:
        """Write the waiting lines, all of them or none."""
        if not self._path.exists():  # somebody has deleted the run folder
            self._path.parent.mkdir(0o700, parents=True, exist_ok=True)
            self._file.close()
            self._file = self._path.open("ab", buffering=0)
        size = self._path.stat().st_size
        try:
            view = memoryview(self._waiting)
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            os.truncate(self._path, size)
            raise
        self._waiting = b""


def _is_before(record: Record, batch: int) -> bool:
    if isinstance(record, Replaced):
        return True
    return record.batch < batch if isinstance(record, Step) else record.batch <= batch


class Steps:
    """Puts the losses of microbatches together to steps, in the order of batches."""

    def __init__(self, job: Job, write: Write, voice: Voice, before: Sequence[Record]) -> None:
        self.done = [record for record in before if isinstance(record, Step)]
        self.starts = {job.start} - {0}  # batches that a resume or a restart began with
        self.pauses: set[int] = set()  # batches before which there was an evaluation
        self._job = job
        self._per_epoch = job.order.batches
        self._write = write
        self._voice = voice
        self._has_warned = False  # of a batch without targets
        self._begin(job.start)

    def rewind(self, batch: int) -> None:
        """The ranks start again after the first `batch` batches."""
        self.done = [step for step in self.done if step.batch < batch]
        self.starts.add(batch)
        self._begin(batch)

    def _begin(self, batch: int) -> None:
        self._next = batch
        self._waiting: dict[int, dict[int, _Loss]] = defaultdict(dict)  # by batch and microbatch
        self._recent = RecentRate()
        self.start_clock()

    def start_clock(self) -> None:
        """Training starts or resumes now."""
        self._last = time.monotonic()
        self._began = self._last - (self.done[-1].seconds if self.done else 0.0)

    def add(self, event: BatchLosses, at: float) -> None:
        """Take the losses of some microbatches, which were computed at this time of our clock."""
        microbatches = self._job.plan.microbatches
        for number, total, count in event.losses:
            self._waiting[number // microbatches][number] = (total, count, event.scale, event.rate)
        while len(self._waiting[self._next]) == microbatches and self._next < self._job.batches:
            losses = self._waiting.pop(self._next)
            self._step([losses[number] for number in sorted(losses)], at)
            self._next += 1

    def _step(self, losses: list[_Loss], at: float) -> None:
        config, number = self._job.config, self._next
        totals, counts, scales, rates = zip(*losses, strict=True)
        rate = rates[-1]
        if rate is None:
            rate = learning_rate(config.optimizer.lr, config.schedule, number, self._job.batches)
        at = max(at, self._last)  # replicas may report in another order than they compute
        if not (number in self.starts or number in self.pauses):  # else the time includes the start or the evaluation
            self._recent.add(at - self._last)
        self._last = at
        speed, loss = self._recent.rate(self._job.plan.batch), self._mean(sum(totals), sum(counts))
        step = Step(number, number // self._per_epoch, loss, rate, at - self._began, speed, scales[-1])
        self.done.append(step)
        self._write(step)

    def _mean(self, total: float, count: float) -> float:
        """The loss of a batch; 0 where there was nothing to count."""
        if not count and not self._has_warned:
            self._has_warned = True
            self._voice.warn(f"batch {self._next} has no targets that count, so its loss and its gradient are 0")
        return total / count if count else 0.0

    def speed(self) -> SteadyRate | None:
        """Of the batches since the run was last resumed: those of its current plan."""
        own = [step for step in self.done if step.batch >= self._job.start]
        return steady_rate(own, self._job.plan.batch, self.starts | self.pauses)


class Scores:
    """Puts the scores of replicas together to evaluations."""

    def __init__(self, job: Job, write: Write, best: Best | None, before: Sequence[Record]) -> None:
        """`best`: the best evaluation before this job, where evaluations are compared."""
        self.done = [record for record in before if isinstance(record, Evaluated)]
        self._job = job
        self._write = write
        self._best = best
        self._waiting: dict[int, dict[int, Score]] = defaultdict(dict)  # by batch and rank

    def rewind(self, batch: int) -> None:
        self.done = [evaluated for evaluated in self.done if evaluated.batch <= batch]
        self._waiting.clear()

    def add(self, event: Scored) -> None:
        scores, last_ranks = self._waiting[event.batch], self._job.plan.stages[-1].ranks
        scores[event.rank] = event.score
        if len(scores) == len(last_ranks):
            del self._waiting[event.batch]  # a script may evaluate again at this batch, on other data
            self.done.append(Evaluated.of(event.batch, [scores[rank] for rank in last_ranks]))
            self._write(self.done[-1])

    @property
    def best(self) -> Best | None:
        """The best evaluation so far, as every rank finds it."""
        best = self._best
        for evaluated in self.done:
            if best is not None and evaluated.batch > self._job.start:
                best = best.after(evaluated)
        return best


class Calls:
    """Compares what the ranks of a script ask for."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._open: dict[int, tuple[Called, set[int]]] = {}  # the first of a number, and who made it

    def add(self, call: Called) -> None:
        """RunFailed where a rank's script asks for something else than another's."""
        first, ranks = self._open.setdefault(call.number, (call, set()))
        if first.what == call.what and first.contents != call.contents:
            raise RunFailed(
                f"{call.what} at {call.where} is given something else on rank {call.rank} than on rank {first.rank}: "
                "every process makes its own model and data; call torch.manual_seed before they are made"
            )
        if first.what != call.what:
            raise RunFailed(
                f"the script took different branches on two ranks: rank {call.rank} calls {call.what} at {call.where}, "
                f"rank {first.rank} calls {first.what} at {first.where}; every rank must call the engine alike"
            )
        ranks.add(call.rank)
        if len(ranks) == self._world:
            del self._open[call.number]


class Ledger(EventHandler):
    """Takes all events of a run, from any thread, one at a time; begins with the records that the run has already."""

    def __init__(
        self,
        job: Job,
        show: Write,
        voice: Voice = SILENT,
        wants_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._wants_stop = wants_stop
        self._job = job
        self._folder = folder = Path(job.folder)
        clear(folder)
        set_aside_after(folder, job.start)
        self._lock = threading.Lock()
        self._show = show
        self._journal = Journal(folder / "metrics.jsonl", job.start)
        self._committer = Committer(job, self._report)
        before = self._journal.records
        manifest = None if job.resume is None else open_checkpoint(Path(job.resume)).manifest
        new = None if job.criterion is None else Best(job.criterion)
        self.scores = Scores(job, self._write, new if manifest is None else manifest.best_by(job.criterion), before)
        self.steps = Steps(job, self._write, voice, before)
        self.replaced = {record for record in before if isinstance(record, Replaced)}
        self.skipped = [0] * len(job.plan.stages)  # updates that overflowed, by stage
        self.stopped_at: int | None = None
        self.shortage: Shortage | None = None
        self._begin()
        if manifest is not None:
            plan = manifest.plan
            self._write(Resumed(job.start, str(job.resume), f"{plan.mode} {plan.shape}"))

    def _begin(self) -> None:
        """The ranks start."""
        self._calls = Calls(self._job.plan.world)
        self._ready: set[int] = set()
        self._offsets: dict[int, float] = {}  # seconds from the clock of a rank of another machine to ours
        self._spans: list[Span] = []

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._committer.close()
        finally:
            self._journal.close()

    def settled(self) -> int:
        return self._committer.settled

    def drain(self) -> None:
        self._committer.drain()

    def wants_stop(self) -> bool:
        return self._wants_stop()

    def handle(self, event: Event) -> None:
        if isinstance(event, Restarted):
            self.drain()  # its reports need the lock
        with self._lock:
            self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case ShareSaved():
                self._committer.add(event)
            case Restarted():
                self._rewind(event)
            case Ready():
                self._ready.add(event.rank)
                if event.clock != clock_name():
                    self._offsets[event.rank] = time.monotonic() - event.time
                if len(self._ready) == self._job.plan.world:
                    self.steps.start_clock()
            case BatchLosses():
                self.steps.add(event, self._local_time(event))
            case Scored():
                self.scores.add(event)
                self.steps.pauses.add(event.batch)
            case Skipped():
                self.skipped[event.stage] += 1
            case Replaced():
                if event not in self.replaced:  # however many ranks or epochs met it
                    self.replaced.add(event)
                    self._write(event)
            case Called():
                self._calls.add(event)
            case Shortage():
                self.shortage = event
            case Stopped():
                self.stopped_at = event.batch
            case Finished():
                offset = self._offsets.get(event.rank, 0.0)
                self._spans += (replace(s, start=s.start + offset, end=s.end + offset) for s in event.spans)
            case _:
                raise TypeError(f"the ledger takes no {type(event).__name__}")

    def _local_time(self, event: BatchLosses) -> float:
        """When a rank sent an event, by our clock.

        The delay of a message makes an offset too large, never too small, so the smallest that was seen is the best.
        """
        if event.rank not in self._offsets:
            return event.time
        offset = min(self._offsets[event.rank], time.monotonic() - event.time)
        self._offsets[event.rank] = offset
        return event.time + offset

    def _rewind(self, restarted: Restarted) -> None:
        """The ranks have ended and start again."""
        self._committer.discard()
        clear(self._folder)
        set_aside_after(self._folder, restarted.batch)
        for part in (self._journal, self.steps, self.scores):
            part.rewind(restarted.batch)
        self._begin()
        self._write(restarted)

    def _report(self, record: Saved | Unsaved) -> None:
        """Take a record of the committer's thread."""
        with self._lock:
            self._write(record)

    def _write(self, record: Record) -> None:
        self._journal.write(record)
        try:
            self._show(record)
        except OSError:  # the screen is gone; the run continues
            self._show = lambda record: None

    @property
    def timeline(self) -> Timeline:
        """The last actions of every rank; the first of them starts at 0 s."""
        first = min((span.start for span in self._spans), default=0.0)
        return Timeline(tuple(replace(span, start=span.start - first, end=span.end - first) for span in self._spans))

    @property
    def stopped_early(self) -> str | None:
        """One line about a run that ended before its last batch as evaluations no longer got better."""
        best, last = self.scores.best, self.scores.done[-1].batch if self.scores.done else 0
        if best is None or not self._job.stops_early(best) or last >= self._job.batches or self.stopped_at is not None:
            return None
        return f"stopped early after step {last}: {best.stall()}"
