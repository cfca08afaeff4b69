"""Ranks that a script's own loop drives, batch by batch: the rank of this process, or all emulated ranks.

A worker never waits by itself (`stage.worker`), so the script's loop can hold it at any batch:

    for done in session.train(stop):      each batch, once this process has made its updates of it
        ...                               the script looks at the loss, sets a rate, or leaves the loop

Every rank runs the same script, so all leave the loop at the same batch. By then earlier stages have begun up to
max K - 1 batches more: these are trained, on all ranks, before anything else happens.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stagewright.data.loader import Loader
from stagewright.events import Evaluated, Score
from stagewright.plan.plan import Plan
from stagewright.runtime.comm.transport import Pending
from stagewright.runtime.gate import Feed, ScriptGate
from stagewright.runtime.job import Evaluation, Job
from stagewright.runtime.stage.scores import Scorer
from stagewright.runtime.stage.worker import BatchDone, Worker

Wait = Callable[[Pending], None]
Exchange = Callable[[Mapping[int, Score]], Mapping[int, Score]]


def last_begun(plan: Plan, batch: int) -> int:
    """The end of the batches that some rank may have begun when every rank has just made its updates of `batch`."""
    size = plan.microbatches
    updates = [-(-(batch + 1) * size // stage.round) - 1 + stage.versions for stage in plan.stages]
    most = max(update * stage.round for update, stage in zip(updates, plan.stages, strict=True))
    return -(-most // (size * plan.pause_step)) * plan.pause_step


class Stopped(Exception):
    """The run was asked to stop, and did so at a batch that all ranks agreed on."""


class Session:
    """Drives the workers of this process through a job without a fixed end."""

    def __init__(self, job: Job, workers: Sequence[Worker], wait: Wait | None = None) -> None:
        """`wait` blocks until something is complete; without it, the workers are all ranks and take turns."""
        self.job = job
        self.plan = job.plan
        self.workers = workers
        self.done = job.start  # batches
        self._newest = job.start - 1  # the last batch that a loop has seen
        self._last = job.start  # the end of the span that it is in
        self._was_drained = False
        self._wait = wait
        self._open: Iterator[BatchDone | None] | None = None  # the span that a loop is in
        self._drained: deque[BatchDone] = deque()  # trained while a loop was held; it has not seen them
        self._gates: list[ScriptGate] = []
        for worker in workers:
            worker.gate = ScriptGate(job.plan.microbatches)
            self._gates.append(worker.gate)

    def begin(self) -> None:
        """Make replicas equal, before the first batch."""
        self._run([worker.begin() for worker in self.workers])

    def load_from(self, loader: Loader | None) -> None:
        """Take the samples of the next batches from a loader; None on ranks that load none."""
        for worker in self.workers:
            if worker.rank in self.plan.stages[0].ranks:
                if worker.loader is not None:
                    worker.loader.close()  # its threads or processes
                worker.loader = loader

    def train(self, stop: int, feed: Feed | None = None) -> Iterator[BatchDone | None]:
        """Train up to batch `stop`, or as far as the feed has batches; yields every batch that is done.

        None: the script has to give the next batch. Leaving early trains what was begun.
        """
        while self.done < stop:
            planned = min(stop, self.job.next_save(self.done))
            pause = min(planned, *(gate.batch for gate in self._gates))
            if pause > self.done:
                yield from self._span(pause, feed)
            ended_early = self.done < pause and not self._was_drained
            requested = next((gate for gate in self._gates if gate.batch == self.done), None)
            if requested is not None or self.done == self.job.next_save(self.done - 1):
                self.save()
            if requested is not None:
                is_last = requested.is_last_pause
                for gate in self._gates:
                    gate.reopen()
                if is_last:
                    raise Stopped
            elif ended_early:
                return

    def _span(self, last: int, feed: Feed | None) -> Iterator[BatchDone | None]:
        """Train from an empty to an empty pipeline."""
        span = range(self.plan.boundary(self.done), self.plan.boundary(last))
        for gate in self._gates:
            gate.feed, gate.end = feed, span.stop
        self._open = self._drive([worker.train(span) for worker in self.workers])
        self._last, self._was_drained = last, False
        try:
            self._be_sure(last)
            for done in self._open:
                yield done
                self._be_sure(last)
            self._close(span)
            while self._drained:
                yield self._drained.popleft()
        except GeneratorExit:
            self.drain()
            self._drained.clear()
            raise

    def _be_sure(self, last: int) -> None:
        """Up to where all ranks train at least: to what is begun when a loop is left at the next batch that it sees."""
        for gate in self._gates:
            gate.sure = self.plan.boundary(min(last, last_begun(self.plan, self._newest + 1)))

    def drain(self) -> None:
        """Train what every rank may have begun by the batch that a loop is held at; the loop continues behind it."""
        if self._open is None:
            return
        end = self.plan.boundary(min(self._last, last_begun(self.plan, self._newest)))
        for gate in self._gates:
            assert gate.entered <= end, f"microbatch {gate.entered} has begun, but the other ranks stop at {end}"
            gate.end = min(gate.end, end)
        self._drained.extend(done for done in self._open if done is not None)
        self._close(range(end))
        self._was_drained = True

    def _close(self, span: range) -> None:
        """The pipeline is empty again."""
        self._open = None
        reached = min(gate.limit for gate in self._gates)
        self.done = min(span.stop, reached) // self.plan.microbatches
        for gate in self._gates:
            gate.feed = None

    def evaluate(
        self,
        evaluation: Evaluation,
        loader: Loader | None,
        make_scorer: Callable[[], Scorer],
        exchange: Exchange = lambda scores: scores,
    ) -> Evaluated:
        """Score data on the newest weights; the same result on every rank.

        `exchange` adds the scores of other processes' ranks to those of this one.
        """
        self.drain()
        scores: dict[int, Score] = {}

        def scored(worker: Worker) -> Iterator[Pending]:
            is_last = worker.rank in self.plan.stages[-1].ranks
            before, worker.evaluation_loader = worker.evaluation_loader, loader
            score = yield from worker.score(evaluation, make_scorer() if is_last else None)
            worker.evaluation_loader = before
            if score is not None:
                scores[worker.rank] = score

        self._run([scored(worker) for worker in self.workers])
        if loader is not None:
            loader.close()
        everywhere = exchange(scores)
        return Evaluated.of(self.done, [everywhere[rank] for rank in self.plan.stages[-1].ranks])

    def save(self) -> None:
        """Save a checkpoint of the batches done."""
        self.drain()
        self._run([worker.save(self.done) for worker in self.workers])

    def states(self) -> dict[str, Tensor]:
        """The newest weights and mean statistics of the stages whose first replica is in this process."""
        self.drain()
        found: dict[str, Tensor] = {}

        def collect(worker: Worker) -> Iterator[Pending]:
            for item in worker.states():
                if isinstance(item, tuple):
                    found.update({name: tensor.clone().cpu() for name, tensor in item[1].items()})
                else:
                    yield item

        self._run([collect(worker) for worker in self.workers])
        return found

    def close(self) -> None:
        """Wait for what is being written, and stop loading."""
        for worker in self.workers:
            worker.recorder.save()
            worker.saver.close()
            for loader in filter(None, (worker.loader, worker.evaluation_loader)):
                loader.close()

    def _run(self, runs: Sequence[Iterator[Pending]]) -> None:
        for _ in self._drive(runs):
            pass

    def _drive(self, runs: Sequence[Iterator[Pending]]) -> Iterator[BatchDone | None]:
        """Run all to their end; yields each batch when the first of them has done it, None where they wait for one.

        Emulated ranks do not wait for each other at a batch: an update of an earlier stage may need later batches.
        """
        state = _generators()  # what a script draws is its own, the same on every rank
        waiting = {run: next(run, None) for run in runs}
        while waiting:
            moved = False
            for run, pending in list(waiting.items()):
                while pending is not None and self._complete(pending):
                    if isinstance(pending, BatchDone) and pending.batch > self._newest:
                        self._newest = pending.batch
                        _restore(state)
                        yield pending
                        state = _generators()
                    pending = next(run, None)
                    moved = True
                waiting[run] = pending
                if pending is None:
                    del waiting[run]
                    moved = True
            if moved:
                continue
            if not any(gate.missing is not None for gate in self._gates):
                raise RuntimeError(f"{len(waiting)} of {len(runs)} emulated ranks wait for each other")
            _restore(state)
            yield None
            state = _generators()
        _restore(state)

    def _complete(self, pending: Pending) -> bool:
        """Wait for something where this process may block; whether it is complete."""
        if isinstance(pending, ScriptGate) and pending.missing is not None:
            return pending.feed is None or pending.feed.has(pending.missing) is not None
        if self._wait is not None:
            self._wait(pending)
            return True
        if pending.is_completed():
            pending.wait()
            return True
        return False


def _generators() -> tuple[Any, ...]:
    """The state of the global generators on the host."""
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state()


def _restore(state: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
