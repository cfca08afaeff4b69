"""Puts together what ranks tell: batches from their microbatches, evaluations from their replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from stagewright.metrics import Evaluated, Replaced, Score, Span, Step, Timeline
from stagewright.runtime.job import Job
from stagewright.runtime.journal import Record
from stagewright.runtime.optimize import learning_rate


class Collector:
    """Hears the ranks' events in any order; tells of steps and evaluations in theirs."""

    def __init__(
        self, job: Job, batches_per_epoch: int, tell: Callable[[Record], None], before: Iterable[Record] = ()
    ) -> None:
        before = tuple(before)
        self._job = job
        self._per_epoch = batches_per_epoch
        self._tell = tell
        self._losses: dict[int, dict[int, float]] = {}
        self._scores: dict[int, dict[int, Score]] = {}
        self._ready: set[int] = set()
        self._spans: list[Span] = []
        self._next = job.start  # the batch to tell of next
        self.steps = [record for record in before if isinstance(record, Step)]
        self.evaluations = [record for record in before if isinstance(record, Evaluated)]
        self.replaced = {record for record in before if isinstance(record, Replaced)}
        self.skipped = [0] * len(job.plan.stages)  # updates that overflowed, by stage
        self._scales: dict[int, float] = {}
        self.stopped_at: int | None = None
        self.shortage: tuple[int, int] | None = None  # the rank that ran out of memory, and what it could have had
        self._start_clock()

    def rewind(self, batch: int) -> None:
        """The ranks begin again after `batch` batches."""
        self._next = batch
        self._losses.clear()
        self._scores.clear()
        self._scales.clear()
        self._ready.clear()
        self._spans.clear()
        self.steps = [step for step in self.steps if step.batch < batch]
        self.evaluations = [evaluated for evaluated in self.evaluations if evaluated.batch <= batch]

    def hear(self, event: dict[str, Any]) -> None:
        """Take one event of one rank."""
        match event["kind"]:
            case "ready":
                self._ready.add(event["rank"])
                if len(self._ready) == self._job.plan.world:
                    self._start_clock()
            case "losses":
                self._hear_losses(event["losses"], event.get("time", time.monotonic()), event.get("scale"))
            case "score":
                self._hear_score(event["batch"], event["rank"], Score(*event["score"]))
            case "skipped":
                self.skipped[event["stage"]] += 1
            case "bad":
                self._hear_bad(Replaced(event["index"], event["reason"]))
            case "shortage":
                self.shortage = (event["rank"], event["room"])
            case "stopped":
                self.stopped_at = event["batch"]
            case "done":
                self._spans += [Span(event["rank"], *span) for span in event.get("spans", ())]

    @property
    def timeline(self) -> Timeline:
        """The last actions of every rank, from the first of them on."""
        first = min((span.start for span in self._spans), default=0.0)
        return Timeline(
            tuple(
                Span(span.rank, span.lane, span.kind, span.name, span.start - first, span.end - first)
                for span in self._spans
            )
        )

    def images_per_second(self) -> float | None:
        """Throughput of the steady state since the job began: without its first batches, nor those after a pause."""
        pauses, start = set(self._job.pauses), self._job.start
        own = [step for step in self.steps if step.batch >= start]
        warmup = min(2, len(own) - 1)
        steady = [step for step in own[warmup:] if step.batch not in pauses and step.batch > start]
        seconds = sum(self._job.plan.batch / step.images_per_second for step in steady)
        return len(steady) * self._job.plan.batch / seconds if seconds else None

    def _start_clock(self) -> None:
        """Training begins now, or goes on."""
        self._last = time.monotonic()
        self._began = self._last - (self.steps[-1].seconds if self.steps else 0.0)

    def _hear_bad(self, replaced: Replaced) -> None:
        """Tell of a bad record once, however many ranks or epochs met it."""
        if replaced not in self.replaced:
            self.replaced.add(replaced)
            self._tell(replaced)

    def _hear_losses(self, losses: list[tuple[int, float]], at: float, scale: float | None) -> None:
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
        self._tell(step)

    def _hear_score(self, batch: int, rank: int, score: Score) -> None:
        scores = self._scores.setdefault(batch, {})
        scores[rank] = score
        last_ranks = self._job.plan.stages[-1].ranks
        if len(scores) == len(last_ranks):
            evaluated = Evaluated.of(batch, [scores[rank] for rank in last_ranks])
            self.evaluations.append(evaluated)
            self._tell(evaluated)
