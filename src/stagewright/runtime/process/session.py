"""Drives the workers of this process through a job: that of its rank, or those of all emulated ranks, in turns.

Whatever is decided between batches is decided here: where to pause, evaluate and save, and when to end. A worker never
waits by itself (`stage.worker`), so a script's loop can hold it at any batch:

    session.run()                        the whole job
    for done in session.train(stop):     or, in a script, each batch once this process has made its updates of it
        ...                              the script looks at the loss, sets a rate, or leaves the loop

Every rank runs the same script, so all leave the loop at the same batch. By then earlier stages have begun up to
max K - 1 batches more: these are trained, on all ranks, before anything else happens.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from stagewright.data.loader import Loader
from stagewright.events import Best, Evaluated, Scored
from stagewright.plan.plan import Plan
from stagewright.runtime.comm.transport import Pending
from stagewright.runtime.gate import Feed, Gate
from stagewright.runtime.job import Evaluation, Job
from stagewright.runtime.stage.scores import Scorer, exchange_scores, make_scorer
from stagewright.runtime.stage.worker import BatchDone, Delivery, Item, StageWeights, Worker


def last_begun(plan: Plan, batch: int) -> int:
    """The end of the batches that some rank may have begun when every rank has just made its updates of `batch`."""
    size = plan.microbatches
    updates = [-(-(batch + 1) * size // stage.round) - 1 + stage.versions for stage in plan.stages]
    most = max(update * stage.round for update, stage in zip(updates, plan.stages, strict=True))
    return -(-most // (size * plan.pause_step)) * plan.pause_step


class Session:
    """The workers of this process, from the first batch of a job to the last one or to a pause that ends it."""

    def __init__(self, job: Job, workers: Sequence[Worker], wait: Callable[[Pending], None] | None = None) -> None:
        """`wait` blocks until something is complete; without it, the workers are all ranks and take turns."""
        self.job = job
        self.plan = job.plan
        self.workers = workers
        self.done = job.start  # batches
        self.is_stopped = False  # by a pause that was asked for, before the last batch
        self.current: Worker | None = None  # that was advanced last
        self._wait = wait
        self._newest = job.start - 1  # the last batch that a loop has seen
        self._last = self._stop = job.start  # the ends of the span that it is in, and of the loop
        self._saved: int | None = None  # batches in the last checkpoint
        self._evaluations = 0
        self._was_drained = False
        self._open: Iterator[Delivery | None] | None = None  # the span that a loop is in
        self._drained: deque[BatchDone] = deque()  # trained while a loop was held; it has not seen them

    @property
    def best(self) -> Best | None:
        """The best evaluation so far, where evaluations are compared; the same on every rank."""
        return self.workers[0].best

    @property
    def _gates(self) -> list[Gate]:
        return [worker.gate for worker in self.workers]

    # --- A whole job --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train, evaluate and save as the job says."""
        try:
            self.begin()
            for _ in self.train(self.job.batches):
                pass
        except BaseException:
            self._stop_loading()
            raise
        self.close()

    def begin(self) -> None:
        """Make replicas equal, before the first batch."""
        self.finish(Worker.begin)

    def train(self, stop: int, feed: Feed | None = None) -> Generator[BatchDone | None]:
        """Train up to batch `stop`, or as far as the feed has batches; a script's loop gets every batch that is done.

        None: the script has to give the next batch. Leaving early trains what was begun.
        """
        self._stop = stop = min(stop, self.job.batches)
        while self.done < stop and not self.is_stopped and not self.job.stops_early(self.best):
            begun, pause = self.done, min(stop, self.job.next_pause(self.done), *(gate.batch for gate in self._gates))
            if pause > begun:
                yield from self._span(pause, feed)
            if self.done > begun and self.done in self.job.pauses and self.job.evaluation:
                self._compare(self.job.evaluation)
            is_requested = self._is_asked_to_pause
            is_due = is_requested or self.job.next_save(begun) <= self.done
            if self.done > self.job.start and (is_due or self.job.saves_outcome(self.best, self.done)):
                self.save()
            if is_requested:
                self._end_pause()
            elif self.done < pause and not self._was_drained:
                return  # the feed has no more

    @property
    def _is_asked_to_pause(self) -> bool:
        return any(gate.batch == self.done for gate in self._gates)

    def _end_pause(self) -> None:
        self.is_stopped = self.workers[0].gate.is_last_pause
        for gate in self._gates:
            gate.reopen()

    def _begin_span(self, last: int, feed: Feed | None) -> Iterator[Delivery | None]:
        span = range(self.plan.boundary(self.done), self.plan.boundary(last))
        for gate in self._gates:
            gate.feed, gate.end = feed, span.stop
        self._open, self._last = self.drive(lambda worker: worker.train(span)), last
        return self._open

    def _span(self, last: int, feed: Feed | None) -> Iterator[BatchDone | None]:
        """Train from an empty to an empty pipeline."""
        found, self._was_drained = self._begin_span(last, feed), False
        try:
            self._be_sure(last)
            for done in self._new(found):
                yield done
                self._be_sure(last)
            if not self._was_drained:
                self._close(last)
            while self._drained:
                yield self._drained.popleft()
        except GeneratorExit:
            self.drain()
            self._drained.clear()
            raise

    def _new(self, found: Iterator[Delivery | None]) -> Iterator[BatchDone | None]:
        """The batches that are done, each as the first rank of this process has done it."""
        for done in found:
            if not isinstance(done, BatchDone):
                yield None
            elif done.batch > self._newest:
                self._newest = done.batch
                yield done

    def _be_sure(self, last: int) -> None:
        """Up to where all ranks train at least: to what is begun when a loop is left at the next batch that it sees."""
        if self.job.is_scripted:
            for gate in self._gates:
                gate.sure = self.plan.boundary(min(last, last_begun(self.plan, self._newest + 1)))

    def drain(self) -> None:
        """Train what every rank may have begun by the batch that a loop is held at; the loop continues behind it.

        That is as much wherever there are pauses on the way: of those that were asked for, the last is at its end.
        """
        stop, feed, is_asked = min(self._stop, last_begun(self.plan, self._newest)), self._gates[0].feed, False
        while self._open is not None:
            last = min(self._last, stop)
            end = self.plan.boundary(last)
            for gate in self._gates:
                assert gate.entered <= end, f"microbatch {gate.entered} has begun, but the other ranks stop at {end}"
                gate.end = min(gate.end, end)
            self._drained.extend(done for done in self._new(self._open) if done is not None)
            self._close(last)
            self._was_drained = True
            is_paused = self._is_asked_to_pause
            if is_paused:
                self._end_pause()
            is_asked |= is_paused
            if self.done < stop and (is_paused or self.done == last):
                self._begin_span(stop, feed)
        if is_asked:
            self.save()

    def _close(self, last: int) -> None:
        """The pipeline is empty again, after the batches before `last` or at a pause before that."""
        self._open = None
        reached = min(gate.limit for gate in self._gates)
        self.done = last if reached >= self.plan.boundary(last) else reached // self.plan.microbatches
        for gate in self._gates:
            gate.feed = None

    # --- Between batches ----------------------------------------------------------------------------------------------

    def evaluate(self, evaluation: Evaluation, scorer: Callable[[], Scorer], loader: Loader | None = None) -> Evaluated:
        """Score data on the newest weights; the same result on every rank.

        The samples come from `loader`, or as the job says.
        """
        return self._score(evaluation, scorer, loader, shares=True)[0]

    def _score(
        self, evaluation: Evaluation, scorer: Callable[[], Scorer], loader: Loader | None = None, *, shares: bool
    ) -> list[Evaluated]:
        """Score data; the same result on each rank, where they share what each has found."""
        self.drain()
        key, last_ranks = f"scores/{self._evaluations}", self.plan.stages[-1].ranks
        self._evaluations += 1
        found: list[Evaluated] = []

        def score(worker: Worker) -> Iterator[Item]:
            own = scorer() if worker.rank in last_ranks else None
            score = yield from worker.score(evaluation, own, worker.evaluation_loader if loader is None else loader)
            if score is not None:
                worker.emit(Scored(worker.rank, self.done, score))
            if shares:
                scores = yield from exchange_scores(worker.store, key, worker.rank, last_ranks, score)
                found.append(Evaluated.of(self.done, scores))

        self.finish(score)
        if loader is not None:
            loader.close()
        return found

    def _compare(self, evaluation: Evaluation) -> None:
        """Evaluate as the job says, and find out whether this is the best so far."""
        scorer = partial(make_scorer, self.job.config.run.metrics, self.job.loss)
        for evaluated in self._score(evaluation, scorer, shares=self.best is not None)[:1]:
            for worker in self.workers:
                worker.best = worker.best and worker.best.after(evaluated)

    def save(self) -> None:
        """Save a checkpoint of the batches done, unless that is what was saved last."""
        self.drain()
        if self.done != self._saved:
            self._saved = self.done
            self.finish(lambda worker: worker.save(self.done))

    def states(self) -> dict[int, dict[str, Tensor]]:
        """The newest weights and mean statistics of each stage whose first replica is in this process."""
        self.drain()
        found = [item for item in self.drive(Worker.states) if isinstance(item, StageWeights)]
        return {item.stage: item.tensors for item in found}

    def weights(self) -> dict[str, Tensor]:
        """The same, by the names of the whole model."""
        return {name: tensor for tensors in self.states().values() for name, tensor in tensors.items()}

    def load_from(self, loader: Loader | None) -> None:
        """Take the samples of the next batches from a loader; None on ranks that load none."""
        for worker in self.workers:
            if worker.rank in self.plan.stages[0].ranks:
                if worker.loader is not None:
                    worker.loader.close()  # its threads or processes
                worker.loader = loader

    def close(self) -> None:
        """Wait for what is being written, and stop loading."""
        for worker in self.workers:
            worker.recorder.save()
            worker.saver.close()
        self._stop_loading()

    def _stop_loading(self) -> None:
        for worker in self.workers:
            for loader in filter(None, (worker.loader, worker.evaluation_loader)):
                loader.close()
            worker.loader = worker.evaluation_loader = None

    # --- Workers ------------------------------------------------------------------------------------------------------

    def finish(self, work: Callable[[Worker], Iterator[Item]]) -> None:
        """Run the work of all workers to its end."""
        for _ in self.drive(work):
            pass

    def drive(self, work: Callable[[Worker], Iterator[Item]]) -> Iterator[Delivery | None]:
        """Run the work of all workers to its end; yields what they deliver, None where they wait for the script.

        Emulated ranks do not wait for each other at a batch: an update of an earlier stage may need later batches.
        """
        own = _Generators() if self.job.is_scripted else None
        runs = {worker: work(worker) for worker in self.workers}
        waits: dict[Worker, Pending] = {}
        while runs:
            moved = False
            for worker, run in list(runs.items()):
                self.current = worker
                while worker not in waits or self._complete(waits[worker]):
                    moved = True
                    item = next(run, None)
                    if item is None:
                        del runs[worker]
                        break
                    if isinstance(item, Delivery):
                        waits.pop(worker, None)
                        yield from _lent(own, item)
                    else:
                        waits[worker] = item
            if moved:
                continue
            if not any(gate.missing is not None for gate in self._gates):
                self.current = None
                raise RuntimeError(f"{len(runs)} of {len(self.workers)} emulated ranks wait for each other")
            yield from _lent(own, None)
        if own is not None:
            own.restore()

    def _complete(self, pending: Pending) -> bool:
        """Wait for something where this process may block; whether it is complete."""
        if isinstance(pending, Gate) and pending.missing is not None:
            return pending.feed is None or pending.feed.has(pending.missing) is not None
        if self._wait is None and not pending.is_completed():
            return False
        if self._wait is None:
            pending.wait()
        else:
            self._wait(pending)
        return True


class _Generators:
    """The state of the global generators on the host as a script has left it: what it draws is its own."""

    def __init__(self) -> None:
        self.keep()

    def keep(self) -> None:
        self._state = torch.default_generator.get_state(), random.getstate(), np.random.get_state()

    def restore(self) -> None:
        torch.default_generator.set_state(self._state[0])
        random.setstate(self._state[1])
        np.random.set_state(self._state[2])


def _lent(own: _Generators | None, item: Delivery | None) -> Iterator[Delivery | None]:
    """Yield to a script, which draws from its own generators meanwhile."""
    if own is not None:
        own.restore()
    yield item
    if own is not None:
        own.keep()
