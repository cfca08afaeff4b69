"""An Engine's run once it is open: the steps of the script's loops, evaluations, files, and its end.

Every rank runs the script from its first line. What was trained before a resume is seen again, from the record; what
the script asks for is told to the supervisor, which compares the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stagewright.api.steps import OneBatch, Step
from stagewright.config.sections import MOST_STEPS
from stagewright.data.order import Order
from stagewright.errors import UserError
from stagewright.events import Evaluated
from stagewright.run.dry_run import evaluation_of
from stagewright.run.script import Ranks
from stagewright.runtime.job import Evaluation
from stagewright.runtime.process.assemble import ScriptParts, open_data
from stagewright.runtime.process.session import last_begun
from stagewright.runtime.script.feed import (
    Batches,
    EpochSampler,
    batch_loader,
    epoch_loader,
    evaluation_loader,
    loading_worker,
)
from stagewright.runtime.script.rank import is_rank
from stagewright.runtime.script.rates import Panel
from stagewright.runtime.stage.equality import hash_of
from stagewright.runtime.stage.scores import make_scorer
from stagewright.runtime.stage.worker import BatchDone
from stagewright.torch_internals import version_of
from stagewright.voice import SILENT, Voice


class OpenRun:
    """The ranks of this process, at the batch that the script has come to."""

    def __init__(
        self, ranks: Ranks, model: nn.Module, rates: Panel | None, made_at: str, voice: Voice = SILENT
    ) -> None:
        """Build the workers; `made_at` is where the script has made its engine."""
        self.ranks = ranks
        self.job = job = ranks.job
        self.plan = job.plan
        self.folder = Path(job.folder)
        self.is_ended = False
        self.position = 0  # the next batch that the script will see
        self._model = model
        self._rates = rates
        self._voice = voice
        self._epochs = 0
        self._evaluations = 0
        self._probes: dict[Any, Evaluation] = {}
        self._feed: Batches | None = None  # of `step`
        self._stepping: Iterator[BatchDone | None] = iter(())
        self._seen: dict[int, Step] = {}
        if rates is not None:
            rates.begin(self.plan)
        self._compare_model(made_at)
        self.session = ranks.open(ScriptParts(None if rates is None else rates.of, keeps_model=True))
        self.session.begin()
        self.trains_copy = bool(self.plan.cuts) or len(self.session.workers) > 1  # not the script's model itself
        self._taken = self._facts()

    @property
    def is_stepping(self) -> bool:
        """Whether the script brings its batches one by one."""
        return self._feed is not None

    @property
    def is_replaying(self) -> bool:
        """Whether the script is where the run that it resumes has been."""
        return self.position < self.job.start

    # --- Loops --------------------------------------------------------------------------------------------------------

    def epoch(self, name: str, where: str) -> Iterator[Step]:
        """The steps of an epoch of a source."""
        self.require_same_model()
        source = open_data(self.job.config, name)
        order = Order(len(source), self.plan.batch, self.job.config.run.seed, self.job.config.data.shuffle)
        step, first = self.plan.pause_step, self.position
        last = first + order.batches // step * step
        self.ranks.call(f"engine.epoch of {len(source)} samples", where, source.fingerprint)
        epoch, self._epochs = self._epochs, self._epochs + 1
        yield from self._replay(last, epoch)
        if self.position < last:
            sampler = EpochSampler(order, epoch, first, self.plan.microbatches)
            self.session.load_from(epoch_loader(self.session, source, sampler, last))
            yield from self._train(last, None, epoch)

    def batches(self, batches: Iterator[Any], where: str) -> Iterator[Step]:
        """The steps of any iterable of batches; at its end, the samples that are left out because no batch is whole."""
        self.require_same_model()
        if self.plan.pause_step > 1:
            raise UserError(
                f"mode {self.plan.mode} ends its rounds together only every {self.plan.pause_step} batches, and "
                "an iterable may end anywhere; give a map-style dataset"
            )
        if self.job.config.run.dynamic:
            raise UserError("dynamic=True can't train batches of an iterable; give a map-style dataset")
        self.ranks.call("engine.epoch of an iterable", where)
        self._voice.note(
            "batches of an iterable are in its own order: a repeat and a resume are as exact as the script makes that"
        )
        epoch, self._epochs = self._epochs, self._epochs + 1

        def is_whole() -> bool:
            batch = next(batches, None)
            return batch is not None and len(OneBatch(batch)) >= self.plan.batch

        yield from self._replay(MOST_STEPS, epoch, is_whole)
        if self.is_replaying:
            return
        feed = self._new_feed(batches, where)
        yield from self._train(MOST_STEPS, feed, epoch)
        if feed.left_out:
            self._voice.note(
                f"the last {feed.left_out} samples are no whole batch of {self.plan.batch} and are left out, as in "
                "every epoch"
            )

    def _replay(self, last: int, epoch: int, has_batch: Callable[[], bool] = lambda: True) -> Iterator[Step]:
        """The steps that were trained before the run was resumed, from the record."""
        try:
            while self.position < min(last, self.job.start) and has_batch():
                batch, self.position = self.position, self.position + 1
                self._advance_rates(batch)
                yield self._recorded(batch, epoch)
                self._advance_rates(batch + 1)
        except GeneratorExit:
            self.position = min(last, last_begun(self.plan, self.position - 1))
            raise

    def _train(self, last: int, feed: Batches | None, epoch: int) -> Iterator[Step]:
        self._advance_rates(self.session.done)
        training = self.session.train(last, feed)
        try:
            for done in training:
                if done is not None:
                    self.position = done.batch + 1
                    yield self._step(done, epoch)
                    self._advance_rates(done.batch + 1)
            self._end_if_asked()
        finally:
            training.close()
            self.position = self.session.done

    def _new_feed(self, source: Iterable[Any] | None, where: str) -> Batches:
        """What the script brings, as the samples of the next batches."""

        def tell(number: int, fingerprint: str) -> None:
            self.ranks.call(f"the engine with batch {number}", where, fingerprint)

        loads = loading_worker(self.session) is not None
        feed = Batches(self.job, self.session.done, source, loads=loads, tell=tell)
        self.session.load_from(batch_loader(self.session, feed))
        return feed

    def step(self, batch: Any, where: str) -> Step | None:
        """Train on a batch of the script; the newest step that every rank has finished by then."""
        if self._feed is None:
            self.require_same_model()
            self._feed = self._new_feed(None, where)
            self._stepping = self.session.train(MOST_STEPS, self._feed)
        number, is_replayed, self.position = self.position, self.is_replaying, self.position + 1
        if is_replayed:
            self._advance_rates(number + 1)
            known: Sequence[int] = range(number, -1, -1)
        else:
            self._advance_rates(number)
            self._feed.give(batch)
            self._run_feed()
            known = sorted(self._seen, reverse=True)
        newest = next((done for done in known if last_begun(self.plan, done) <= number + 1), None)
        if newest is None:
            return None
        if is_replayed:
            return self._recorded(newest, self._epochs)
        self._seen = {done: step for done, step in self._seen.items() if done >= newest}
        return self._seen[newest]

    def wait(self) -> Step | None:
        """Finish all batches that `step` was given; the last step."""
        if self._feed is None:
            return None
        self._feed.end()
        self._run_feed()
        self._feed = None
        last = self._seen.get(self.position - 1)
        self._seen.clear()
        return last

    def _run_feed(self) -> None:
        for done in self._stepping:
            if done is None:
                return
            self._seen[done.batch] = self._step(done, self._epochs)
        self._end_if_asked()

    def _step(self, done: BatchDone, epoch: int) -> Step:
        return Step(done.batch, epoch, self._rate(done.batch), done.loss, is_replayed=False)

    def _recorded(self, batch: int, epoch: int) -> Step:
        loss = partial(self.ranks.history.losses.__getitem__, batch)
        return Step(batch, epoch, self._rate(batch), loss, is_replayed=True)

    def _advance_rates(self, batch: int) -> None:
        """What the script has set by now acts from this batch on."""
        if self._rates is not None:
            self._rates.advance(batch)

    def _rate(self, batch: int) -> float:
        return self.job.config.optimizer.lr if self._rates is None else self._rates.rate(batch)

    # --- Between steps ------------------------------------------------------------------------------------------------

    def evaluate(self, name: str, metrics: str, where: str) -> Evaluated:
        """Score every sample of a source on the newest weights."""
        self.require_same_model()
        source = open_data(self.job.config, name)
        self.ranks.call(f"engine.evaluate of {len(source)} samples", where, source.fingerprint)
        number, self._evaluations = self._evaluations, self._evaluations + 1
        if number < len(self.ranks.history.evaluations):
            return self.ranks.history.evaluations[number]
        key = (source.fingerprint, len(source), metrics)
        if key not in self._probes:
            self._probes[key] = evaluation_of(self.job, source, make_scorer(metrics, self.job.loss).probe)
        scorer, loader = partial(make_scorer, metrics, self.job.loss), evaluation_loader(self.session, source)
        return self.session.evaluate(self._probes[key], scorer, loader)

    def _end_if_asked(self) -> None:
        """Where the run was asked to stop, and its checkpoint is saved, the script ends here."""
        if self.session.is_stopped:
            self.end()
            raise SystemExit(0)

    def end(self) -> None:
        """Wait for what is being written, and write the report."""
        self.is_ended = True
        self.ranks.close()

    # --- The script's model -------------------------------------------------------------------------------------------

    def load_model(self, state: dict[str, torch.Tensor]) -> None:
        """Give the script's model the weights that its copies have now."""
        self._model.load_state_dict(state)
        self._taken = self._facts()

    def _facts(self) -> dict[str, tuple[Any, ...]]:
        """What must stay as it is: parameters and their shapes; where a copy is trained, their values too."""
        return {
            name: (tuple(p.shape), p.requires_grad, version_of(p) if self.trains_copy else None)
            for name, p in self._model.named_parameters()
        }

    def require_same_model(self) -> None:
        """An error where the script has changed its model."""
        now = self._facts()
        if now == self._taken:
            return
        changed = next(name for name in {**now, **self._taken} if now.get(name) != self._taken.get(name))
        raise UserError(
            f"parameter '{changed}' of the model was changed after the engine took it; change the model before "
            "Engine(...), or make a new one"
        )

    def _compare_model(self, made_at: str) -> None:
        """Tell the supervisor what this process's model holds: stages of models that differ would train together.

        Replicas of a whole model take the first one's weights, and a checkpoint's or a file's replace them all.
        """
        job = self.job
        if is_rank() and len(job.plan.stages) > 1 and job.resume is None and job.config.model.init is None:
            held = [value for value in self._model.state_dict().values() if isinstance(value, torch.Tensor)]
            self.ranks.call("Engine", made_at, str(hash_of(held).tolist()))
