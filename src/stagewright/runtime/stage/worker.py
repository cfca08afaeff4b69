"""One rank: interprets its programs, one action after another.

A worker never waits by itself. Its `run` yields whatever must be over before it can go on; the caller waits for it.
So the same worker runs in a process of its own, where waiting blocks, and among others in one process, where the
others go on meanwhile. What a worker can keep of its state, as the worker sees it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from stagewright.data.loader import Loader
from stagewright.events import Score
from stagewright.model.probe import Probe
from stagewright.plan.plan import Stage
from stagewright.runtime.comm.boundary import CARRIED, Arrival, Cut, expect
from stagewright.runtime.comm.transport import AllOf, Collective, Pending
from stagewright.runtime.job import Job
from stagewright.runtime.stage.dynamic import Chooser
from stagewright.runtime.stage.gate import Gate
from stagewright.runtime.stage.loss_scaling import Overflow
from stagewright.runtime.stage.losses import Losses, score_of
from stagewright.runtime.stage.norms import Norms, norm_of
from stagewright.runtime.stage.optimizer import clip_factor
from stagewright.runtime.stage.recorder import Recorder
from stagewright.runtime.stage.replica import Replica
from stagewright.schedule.action import Action, Op
from stagewright.schedule.lower import evaluation_program, last_of, program

Emit = Callable[[dict[str, Any]], None]


class Worker:
    """Carries the replicas of one rank through a job."""

    def __init__(
        self,
        job: Job,
        rank: int,
        replicas: Mapping[int, Replica],
        collectives: Mapping[int, Collective],
        world: Collective,
        overflow: Overflow,
        emit: Emit,
        recorder: Recorder | None = None,
    ) -> None:
        self.job = job
        self.plan = job.plan
        self.rank = rank
        self.replicas = replicas
        self.recorder = recorder or Recorder()
        self._collectives = collectives
        self._emit = emit
        self._norms = Norms(len(job.plan.stages), rank, world)
        self._losses = Losses(job.plan, rank, emit)
        self.overflow = overflow
        self.loader: Loader | None = None  # ranks of the first stage have one
        self.evaluation_loader: Loader | None = None
        self.start = self.done = job.start  # batches that were trained before, and so far
        self.is_stopped = False  # before the end
        self.gate = Gate(self.plan.microbatches)
        self.saver = Saver()
        self._score = Score()
        self._handlers: dict[Op, Callable[[Action], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            **dict.fromkeys(CARRIED, lambda a: replicas[a.stage].exchange.carry(a)),
            Op.REDUCE: lambda a: replicas[a.stage].reduce(a.version),  # type: ignore[arg-type]
            Op.AGREE: self._agree,
            Op.UPDATE: self._update,
        }

    def run(self) -> Iterator[Pending]:
        """Train, evaluate and save as the job says, from its first batch to its last or until a pause is the last."""
        self.done = self.start
        self.gate.start_at(self.done)
        try:
            while self.done < self.job.batches and not self.is_stopped:
                self.done = yield from self._advance(self.done)
            self.recorder.save()
            self.saver.close()
        finally:
            for loader in filter(None, (self.loader, self.evaluation_loader)):
                loader.close()

    def _advance(self, done: int) -> Generator[Pending, None, int]:
        """Train to the next pause, planned or asked for, and do what it is for; the batches that are done then."""
        pause = min(self.job.next_pause(done), self.gate.batch)
        span = range(self.plan.boundary(done), self.plan.boundary(pause))
        if span:
            yield from self.train(span)
        if self.plan.boundary(self.gate.batch) < span.stop:
            pause = self.gate.batch  # asked for on the way
        is_asked_for = pause == self.gate.batch
        if self.job.evaluation and pause in self.job.pauses and pause > done:
            yield from self.evaluate(pause)
        if pause > self.start and (is_asked_for or pause == self.job.next_save(done)):
            self.recorder.save()
            self.saver.save(pause)
        if is_asked_for:
            self.is_stopped = self.gate.is_last_pause
            self.gate.reopen()
        return pause

    def train(self, span: range) -> Iterator[Pending]:
        """Train a span of microbatches, from empty pipeline to empty pipeline; the gate may cut it short."""
        self._open(self.job.training, span)
        if self.job.config.run.dynamic:
            chooser = Chooser(self.plan, self.rank, span, self.awaits, self.job.patience, self.gate)
            while not chooser.is_finished:
                yield chooser
                for action in chooser.take():
                    yield from self._run_action(action)
        else:
            for action in program(self.plan, self.rank, span, lambda: self.gate.limit):
                last = last_of(self.plan, action)
                while not self.gate.enter(last) and last < self.gate.limit:
                    yield self.gate
                if last < self.gate.limit:
                    yield from self._run_action(action)
        self._flush()
        stop = min(span.stop, self.gate.limit) // self.plan.microbatches
        verdicts = self.overflow.awaits_verdicts(stop)
        if verdicts is not None:
            yield verdicts
        self.overflow.settle(stop)

    def evaluate(self, pause: int) -> Iterator[Pending]:
        """Score every evaluation sample once, on the newest weights and the mean statistics."""
        job = self.job.evaluation
        assert job is not None
        whole, rest = divmod(job.samples, self.plan.samples)
        with ExitStack() as stack:
            for stage, replica in self.replicas.items():
                rows, pending = replica.statistics.gather(
                    self._collectives[stage], replica.stage.ranks.index(self.rank), replica.stage.replicas
                )
                yield pending
                stack.enter_context(replica.statistics.averaged(rows))
                stack.enter_context(replica.evaluating())
            self._score = Score()
            yield from self._evaluate_pieces(job.whole, range(whole))
            if rest:
                assert job.short is not None
                yield from self._evaluate_pieces(job.short, range(whole, whole + 1))
        if any(replica.stage.is_last for replica in self.replicas.values()):
            self._emit({"kind": "score", "batch": pause, "rank": self.rank, "score": _as_list(self._score)})

    def states(self) -> Iterator[Pending | tuple[Stage, Mapping[str, Tensor]]]:
        """Each stage's newest weights and mean statistics, from its first replica; every rank takes part."""
        for stage, replica in self.replicas.items():
            index = replica.stage.ranks.index(self.rank)
            rows, pending = replica.statistics.gather(self._collectives[stage], index, replica.stage.replicas)
            yield pending
            with replica.statistics.averaged(rows):
                if index == 0:
                    yield replica.stage, replica.state()

    def awaits(self, action: Action) -> Pending | None:
        """What must be over before the action can be done without waiting."""
        replica = self.replicas[action.stage]
        if action.op in CARRIED:
            return replica.exchange.awaits(action)
        if action.op is Op.BACKWARD and replica.stage.is_last:
            assert action.microbatch is not None
            return self.overflow.awaits_scale(action.microbatch // self.plan.microbatches)
        if action.op is Op.UPDATE:
            assert action.version is not None
            if self.plan.agree:
                return self._norms.pending(action.version)
            return None if self.plan.flags else replica.reducer.pending(action.version)
        if action.op is Op.AGREE:
            return AllOf(list(self._awaits_agreement(action)))
        return None

    def _awaits_agreement(self, action: Action) -> Iterator[Pending]:
        assert action.version is not None
        stages = [action.stage] if self.plan.flags else self.replicas
        for stage in stages:
            yield self.replicas[stage].reducer.pending(action.version)
        flag = self.overflow.awaits_flag(action.stage, action.version)
        if flag is not None and not self.replicas[action.stage].stage.is_last:
            yield flag

    def _run_action(self, action: Action) -> Iterator[Pending]:
        self.recorder.begin(action)
        pending = self.awaits(action)
        if pending is not None:
            yield pending
        self.recorder.ready(action)
        self._handlers[action.op](action)
        self.recorder.end(action)

    def _forward(self, action: Action) -> None:
        replica, microbatch = self.replicas[action.stage], action.microbatch
        assert microbatch is not None
        self._load(replica, microbatch, self.loader)
        assert action.version is not None
        replica.forward(microbatch, action.version)
        if not replica.stage.is_last:
            self._hand_over(replica, microbatch)

    @staticmethod
    def _load(replica: Replica, microbatch: int, loader: Loader | None) -> None:
        """Give the samples to the first stage."""
        if replica.stage.is_first:
            assert loader is not None
            inputs, labels = loader.microbatch(microbatch)
            replica.exchange.arrivals[microbatch] = Arrival([inputs], labels)

    def _hand_over(self, replica: Replica, microbatch: int) -> None:
        """Give the outputs to the next stage where this rank carries it too."""
        behind = self.plan.stages[replica.stage.index + 1]
        if behind.rank_of(microbatch) == self.rank:
            self.replicas[behind.index].exchange.arrivals[microbatch] = replica.exchange.outputs.pop(microbatch)

    def _backward(self, action: Action) -> None:
        replica, microbatch = self.replicas[action.stage], action.microbatch
        assert microbatch is not None and action.version is not None
        stage = replica.stage
        is_last_of_round = stage.update_of(microbatch + stage.replicas) != stage.update_of(microbatch)
        overlap = stage.replicas > 1 and is_last_of_round and len(self.replicas) == 1
        scale = self.overflow.scale_of(microbatch // self.plan.microbatches) if stage.is_last else None
        replica.backward(microbatch, action.version, overlap, scale)
        if stage.is_last:
            self._report_losses(replica, microbatch, scale)
        if not stage.is_first:
            before = self.plan.stages[stage.index - 1]
            if before.rank_of(microbatch) == self.rank:
                self.replicas[before.index].exchange.returned[microbatch] = replica.exchange.gradients.pop(microbatch)

    def _agree(self, action: Action) -> None:
        """Look whether gradients are finite; where all K = 1, exchange norms, each from its stage's first replica."""
        assert action.version is not None
        if self.plan.flags:
            self.overflow.unscale(self.replicas[action.stage], action.version)
            return
        for replica in self.replicas.values():
            self.overflow.unscale(replica, action.version)
        self._norms.exchange(self.replicas.values(), action.version)

    def _update(self, action: Action) -> None:
        replica, update = self.replicas[action.stage], action.version
        assert update is not None
        limit = self.job.config.optimizer.clip
        clip = None if limit is None else lambda gradient: clip_factor(self._norm(gradient, update), limit)
        if not self.plan.agree and not self.plan.flags:
            self.overflow.unscale(replica, update)
        skipping = self.overflow.outcome(replica, update, self._norms.squares(update) if self.plan.agree else None)
        if skipping is True:
            replica.skip(update)
        else:
            replica.update(update, clip, skipping if isinstance(skipping, Tensor) else None)

    def _norm(self, gradient: Tensor, update: int) -> Tensor:
        """The norm that is clipped: of the whole model where ranks agree on it, otherwise of the stage."""
        return self._norms.squares(update).sum().sqrt() if self.plan.agree else norm_of(gradient)

    def _report_losses(self, replica: Replica, microbatch: int, scale: float | None) -> None:
        """Pass on a batch's losses once this replica has its last one."""
        batch = microbatch // self.plan.microbatches
        if (microbatch + replica.stage.replicas) // self.plan.microbatches != batch:
            whole = [number for number in replica.losses if number // self.plan.microbatches <= batch]
            self._losses.add([(number, replica.losses.pop(number)) for number in whole], scale)

    def _evaluate_pieces(self, probe: Probe, pieces: range) -> Iterator[Pending]:
        """Forward over some pieces, all of one size."""
        self._open(probe, pieces, forward_only=True)
        for action in evaluation_program(self.plan, self.rank, pieces):
            if action.op is not Op.FORWARD:
                yield from self._run_action(action)
                continue
            self.recorder.begin(action)
            replica, microbatch = self.replicas[action.stage], action.microbatch
            assert microbatch is not None
            self._load(replica, microbatch, self.evaluation_loader)
            replica.evaluate(microbatch, self._add_score)
            if not replica.stage.is_last:
                self._hand_over(replica, microbatch)
        self._flush()

    def _add_score(self, logits: Tensor, labels: Tensor) -> None:
        self._score += score_of(logits, labels)

    def _open(self, probe: Probe, span: range, *, forward_only: bool = False) -> None:
        """Tell the channels what messages hold and which will come in a span."""
        form = next(iter(self.replicas.values())).rules.form
        cuts = [Cut.of(values, probe.samples, self.job.label_shape, form) for values in probe.cuts]
        for stage, replica in self.replicas.items():
            replica.exchange.open(cuts[stage - 1] if stage > 0 else None, cuts[stage] if stage < len(cuts) else None)
        for stage, replica in self.replicas.items():
            expect(replica.exchange.activations_from, self.rank, replica.stage, self.plan, stage - 1, span)
            if not forward_only:
                expect(replica.exchange.gradients_from, self.rank, replica.stage, self.plan, stage + 1, span)

    def _flush(self) -> None:
        for replica in self.replicas.values():
            replica.exchange.flush()
        self._losses.flush()


def _as_list(score: Score) -> Sequence[float]:
    return [score.samples, score.loss, score.top1, score.top5]


class Saver:
    """Told to keep the replicas' state as it is now; the default keeps nothing."""

    def save(self, batch: int) -> None:
        """Have a copy of what `batch` batches have made; writing it goes on meanwhile."""

    def close(self) -> None:
        """Everything is written."""
