"""The worker of one rank: interprets its programs, one action after another.

A worker never waits. What it does is a generator that yields whatever must be complete before it can continue, and
the caller waits for that (`process.session`). So the same worker runs in its own process, where waiting blocks, or with
others in one process, where they take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from stagewright.data.loader import Loader
from stagewright.events import Best, Emit, Score
from stagewright.model.probe import Probe
from stagewright.runtime.comm.boundary import Activations, Boundary, expect
from stagewright.runtime.comm.device import Reading
from stagewright.runtime.comm.transport import AllOf, Collective, Pending
from stagewright.runtime.gate import Gate
from stagewright.runtime.job import Evaluation, Job
from stagewright.runtime.stage.dynamic import DynamicScheduler
from stagewright.runtime.stage.equality import begin_equal, compare_homes, require_equal
from stagewright.runtime.stage.gradients import Norms
from stagewright.runtime.stage.loss_scaling import LossScaling
from stagewright.runtime.stage.recorder import Recorder
from stagewright.runtime.stage.replica import Replica
from stagewright.runtime.stage.scores import Losses, Scorer
from stagewright.runtime.stage.ties import TieOnRank
from stagewright.schedule.action import TRANSFERS, Action, Op
from stagewright.schedule.lower import evaluation_program, last_of, program
from stagewright.schedule.policy import overlapped_backward


class Saver:
    """Saves the state of a worker's replicas; this default saves nothing."""

    def save(self, batch: int) -> None:
        """Copy the state after `batch` batches; writing it may continue in the background."""

    def close(self) -> None:
        """Wait until everything is written."""


class Delivery:
    """What a worker gives to its caller; it is nothing to wait for."""


class BatchDone(Delivery):
    """This rank has made its updates of a batch of a script's loop."""

    def __init__(self, batch: int, figures: Sequence[tuple[Reading, slice]]) -> None:
        self.batch = batch
        self._figures = figures

    def loss(self) -> float:
        """The loss of the batch, the same bits on every rank; waits until the device has computed it."""
        rows = [row for reading, own in self._figures for row in reading.value()[own].tolist()]
        counts = [row[0] if len(row) > 1 else 1.0 for row in rows]
        return sum(row[-1] for row in rows) / count if (count := sum(counts)) else 0.0


class StageWeights(Delivery):
    """A stage's newest or averaged weights and mean statistics, in memory of their own on the host."""

    def __init__(self, stage: int, tensors: Mapping[str, Tensor]) -> None:
        self.stage = stage
        self.tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


Item = Pending | Delivery  # what a worker yields


class Worker:
    """Runs the replicas of one rank through a job."""

    def __init__(
        self,
        job: Job,
        rank: int,
        replicas: Mapping[int, Replica],
        world: Collective,
        loss_scaling: LossScaling,
        store: Store,
        emit: Emit,
        recorder: Recorder | None = None,
        ties: Mapping[int, TieOnRank] | None = None,
    ) -> None:
        self.job = job
        self.plan = job.plan
        self.rank = rank
        self.replicas = replicas
        self.recorder = recorder or Recorder()
        self.ties = ties or {}  # by stage; several stages may have one
        self.emit = emit
        self.store = store
        self.best = None if job.criterion is None else Best(job.criterion)  # evaluation so far
        self._norms = Norms(len(job.plan.stages), world)
        self._losses = Losses(job.plan, rank, emit)
        self.loss_scaling = loss_scaling
        self.loader: Loader | None = None  # only on ranks of the first stage
        self.evaluation_loader: Loader | None = None
        self._updated = dict.fromkeys(replicas, self.plan.boundary(job.start))  # microbatches in each stage's weights
        self.gate = Gate(self.plan.microbatches)
        self.saver = Saver()
        self._handlers: dict[Op, Callable[[Action], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            **dict.fromkeys(TRANSFERS, lambda a: replicas[a.stage].exchange.transfer(a)),
            Op.REDUCE: lambda a: replicas[a.stage].gradients.reduce(a.version),  # type: ignore[arg-type]
            Op.TIE: lambda a: self.ties[a.stage].sum(a.version),  # type: ignore[arg-type]
            Op.AGREE: self._agree,
            Op.UPDATE: self._update,
        }

    @property
    def device(self) -> torch.device:
        """Where its replicas are."""
        return next(iter(self.replicas.values())).device.device

    def begin(self) -> Iterator[Pending]:
        """Before the first batch: replicas, and homes of tied parameters, begin equal."""
        start = self.job.start
        self.gate.start_at(start)
        for replica in self.replicas.values():
            yield from begin_equal(replica) if start == 0 else require_equal(replica, start)
        yield from self._compare_ties(None if start == 0 else start)
        for replica in self.replicas.values() if start == 0 else ():
            replica.statistics.share_counts()
            replica.average.restart()  # replicas and homes may have got their weights only now

    def save(self, batch: int) -> Iterator[Pending]:
        """Save the state after `batch` batches, between which and the next nothing is in flight."""
        self.recorder.save()
        for replica in self.replicas.values():
            yield from require_equal(replica, batch)
        yield from self._compare_ties(batch)
        self.saver.save(batch)

    def _compare_ties(self, batch: int | None) -> Iterator[Pending]:
        """Compare the homes of tied parameters; before the first step, make them equal."""
        for tie in dict.fromkeys(self.ties.values()):
            for parameter in tie.parameters:
                yield from compare_homes(parameter, self.replicas, self.rank, batch)

    def train(self, span: range) -> Iterator[Item]:
        """Train a span of microbatches, from empty pipeline to empty pipeline; the gate may cut it short."""
        self._open(self.job.training, span)
        if self.job.config.run.dynamic:
            scheduler = DynamicScheduler(self.plan, self.rank, span, self.awaits, self.job.patience, self.gate)
            while not scheduler.is_finished:
                yield scheduler
                for action in scheduler.take():
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
        decisions = self.loss_scaling.awaits_decisions(stop)
        if decisions is not None:
            yield decisions
        self.loss_scaling.record_decisions(stop)

    def score(
        self, job: Evaluation, scorer: Scorer | None, loader: Loader | None
    ) -> Generator[Item, None, Score | None]:
        """Score every sample of an evaluation once, with the newest or averaged weights and the mean statistics.

        The scorer, and the score that it adds up, are of a rank of the last stage; the loader is of one of the first.
        """
        whole, rest = divmod(job.samples, self.plan.samples)
        with ExitStack() as stack:
            for replica in self.replicas.values():
                rows, pending = replica.statistics.gather()
                yield pending
                stack.enter_context(replica.statistics.averaged(rows))
                stack.enter_context(replica.evaluating())
            if scorer is not None:
                scorer.score = Score()
            yield from self._evaluate_pieces(job.whole, range(whole), scorer, loader)
            if rest:
                assert job.short is not None
                yield from self._evaluate_pieces(job.short, range(whole, whole + 1), scorer, loader)
        return None if scorer is None else scorer.score

    def states(self) -> Iterator[Item]:
        """The weights of the stages whose first replica is here; all ranks take part."""
        for replica in self.replicas.values():
            rows, pending = replica.statistics.gather()
            yield pending
            with replica.statistics.averaged(rows), replica.average.in_use():
                if replica.stage.ranks[0] == self.rank:
                    yield StageWeights(replica.stage.index, replica.state())

    def awaits(self, action: Action) -> Pending | None:
        """What must be complete before the action can run without waiting."""
        replica = self.replicas[action.stage]
        if action.op in TRANSFERS:
            return replica.exchange.awaits(action)
        if action.op is Op.BACKWARD and replica.stage.is_last:
            assert action.microbatch is not None
            return self.loss_scaling.awaits_scale(action.microbatch // self.plan.microbatches)
        if action.op is Op.UPDATE:
            assert action.version is not None
            if self.plan.agree:
                return self._norms.pending(action.version)
            if self.plan.ties_agree and action.stage in self.ties:
                return self.ties[action.stage].norms.pending(action.version)
            return None if self.plan.flags else replica.gradients.pending(action.version)
        if action.op is Op.AGREE:
            return AllOf(list(self._awaits_agreement(action)))
        return None

    def _awaits_agreement(self, action: Action) -> Iterator[Pending]:
        assert action.version is not None
        stages: Iterable[int] = [action.stage] if self.plan.flags else self.replicas
        if self.plan.ties_agree:
            stages = self.ties[action.stage].stages
        for stage in stages:
            yield self.replicas[stage].gradients.pending(action.version)
        flag = self.loss_scaling.awaits_flag(action.stage, action.version)
        if flag is not None and not self.replicas[action.stage].stage.is_last:
            yield flag

    def _run_action(self, action: Action) -> Iterator[Item]:
        self.recorder.begin(action)
        pending = self.awaits(action)
        if pending is not None:
            yield pending
        self.recorder.ready(action)
        self._handlers[action.op](action)
        self.recorder.end(action)
        if action.op is Op.UPDATE and self.job.is_scripted:
            yield from self.batches_done(action)

    def batches_done(self, action: Action) -> Iterator[BatchDone]:
        """The batches that are in the weights of all this rank's stages with an update, and were not before it."""
        assert action.version is not None
        before = min(self._updated.values()) // self.plan.microbatches
        self._updated[action.stage] = (action.version + 1) * self.plan.stages[action.stage].round
        for batch in range(before, min(self._updated.values()) // self.plan.microbatches):
            yield BatchDone(batch, self._reported(batch))

    def _reported(self, batch: int) -> list[tuple[Reading, slice]]:
        """The figures of a batch's microbatches, with the rows that they have in those of updates."""
        found, size = [], self.plan.microbatches
        for replica in self.replicas.values():
            round = replica.stage.round
            first, last = batch * size, (batch + 1) * size  # microbatches
            updates = range(first // round, (last - 1) // round + 1)
            rows = [(update, max(first - update * round, 0), min(last - update * round, round)) for update in updates]
            found = [(replica.reported[update], slice(begin, end)) for update, begin, end in rows]
            for update in [number for number in replica.reported if (number + 1) * round <= last]:
                del replica.reported[update]
        return found

    def _forward(self, action: Action) -> None:
        replica, microbatch = self.replicas[action.stage], action.microbatch
        assert microbatch is not None
        self._load(replica, microbatch, self.loader)
        assert action.version is not None
        replica.forward(microbatch, action.version)
        if not replica.stage.is_last:
            self._hand_over(replica, microbatch)

    def _load(self, replica: Replica, microbatch: int, loader: Loader | None) -> None:
        """Pass the samples to the first stage."""
        if replica.stage.is_first:
            assert loader is not None
            fields = loader.microbatch(microbatch)
            inputs = [fields[value.name] for value in self.job.training.inputs]
            replica.exchange.inputs[microbatch] = Activations(inputs, fields)

    def _hand_over(self, replica: Replica, microbatch: int) -> None:
        """Pass the outputs to the next stage where this rank runs it too."""
        following = self.plan.stages[replica.stage.index + 1]
        if following.rank_of(microbatch) == self.rank:
            self.replicas[following.index].exchange.inputs[microbatch] = replica.exchange.outputs.pop(microbatch)

    def _backward(self, action: Action) -> None:
        replica, microbatch = self.replicas[action.stage], action.microbatch
        assert microbatch is not None and action.version is not None
        stage = replica.stage
        overlap = microbatch == overlapped_backward(self.plan, stage, self.rank, stage.update_of(microbatch))
        scale = self.loss_scaling.scale_of(microbatch // self.plan.microbatches) if stage.is_last else None
        replica.backward(microbatch, action.version, overlap, scale)
        if stage.is_last:
            self._report_losses(replica, microbatch, scale)
        if not stage.is_first:
            previous = self.plan.stages[stage.index - 1]
            if previous.rank_of(microbatch) == self.rank:
                gradients = replica.exchange.input_gradients.pop(microbatch)
                self.replicas[previous.index].exchange.output_gradients[microbatch] = gradients

    def _agree(self, action: Action) -> None:
        """Check that gradients are finite; where all K = 1, exchange the norms, each from its stage's first replica."""
        assert action.version is not None
        if self.plan.flags:
            self.loss_scaling.unscale(self.replicas[action.stage], action.version)
            return
        if self.plan.ties_agree:
            self.ties[action.stage].agree(action.version, self.rank)
            return
        for replica in self.replicas.values():
            self.loss_scaling.unscale(replica, action.version)
        first = [replica for replica in self.replicas.values() if replica.stage.ranks[0] == self.rank]
        norms = {replica.stage.index: replica.gradients.norm(action.version, once=True) for replica in first}
        self._norms.exchange(norms, action.version)

    def _update(self, action: Action) -> None:
        replica, update = self.replicas[action.stage], action.version
        assert update is not None
        if not self.plan.agree and not self.plan.flags:
            self.loss_scaling.unscale(replica, update)
        squares = self._norms.squares(update) if self.plan.agree else None
        skipping = self.loss_scaling.skip_decision(replica, update, squares)
        if skipping is True:
            replica.advance(update)
        else:
            norm = None if squares is None else squares.sum().sqrt()
            tied_norms = None
            if self.plan.ties_agree and action.stage in self.ties:
                norm, tied_norms = self.ties[action.stage].norms_of(action.stage, update)
            replica.update(update, norm, skipping if isinstance(skipping, Tensor) else None, tied_norms)

    def _report_losses(self, replica: Replica, microbatch: int, scale: float | None) -> None:
        """Report a batch's losses once this replica has computed its last one."""
        batch = microbatch // self.plan.microbatches
        if (microbatch + replica.stage.replicas) // self.plan.microbatches != batch:
            whole = [number for number in replica.losses if number // self.plan.microbatches <= batch]
            is_own = self.job.is_scripted or replica.optimizer.has_own_rates
            rate = replica.optimizer.rate(replica.stage.update_of(microbatch)) if is_own else None
            self._losses.add([(number, replica.losses.pop(number)) for number in whole], scale, rate)

    def _evaluate_pieces(
        self, probe: Probe, pieces: range, scorer: Scorer | None, loader: Loader | None
    ) -> Iterator[Item]:
        """Run forward over some pieces, all of one size."""
        self._open(probe, pieces, forward_only=True)
        for action in evaluation_program(self.plan, self.rank, pieces):
            if action.op is not Op.FORWARD:
                yield from self._run_action(action)
                continue
            self.recorder.begin(action)
            replica, microbatch = self.replicas[action.stage], action.microbatch
            assert microbatch is not None
            self._load(replica, microbatch, loader)
            replica.evaluate(microbatch, partial(_add_score, scorer, probe.samples))
            if not replica.stage.is_last:
                self._hand_over(replica, microbatch)
        self._flush()

    def _open(self, probe: Probe, span: range, *, forward_only: bool = False) -> None:
        """Set the channels' message formats, and announce the microbatches of a span."""
        options = next(iter(self.replicas.values())).options.format
        boundaries = [Boundary.of(values, probe.fields, options) for values in probe.cuts]
        for stage, replica in self.replicas.items():
            before = boundaries[stage - 1] if stage > 0 else None
            replica.exchange.open(before, boundaries[stage] if stage < len(boundaries) else None)
        limit = None if forward_only else self.gate.sure_limit
        for stage, replica in self.replicas.items():
            expect(replica.exchange.activations_from, self.rank, replica.stage, self.plan, stage - 1, span, limit)
            if not forward_only:
                expect(replica.exchange.gradients_from, self.rank, replica.stage, self.plan, stage + 1, span, limit)

    def _flush(self) -> None:
        for replica in self.replicas.values():
            replica.exchange.flush()
        self._losses.flush()


def _add_score(scorer: Scorer | None, samples: int, outputs: Any, fields: Mapping[str, Tensor]) -> None:
    assert scorer is not None
    scorer.add(outputs, fields, samples)
