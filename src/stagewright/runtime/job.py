"""The job: everything that a rank needs to know, as the supervisor writes it to job.json and every rank reads it."""

from __future__ import annotations

import secrets
import sys
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from stagewright.config.groups import Group
from stagewright.config.sections import Config
from stagewright.data.order import Order
from stagewright.events import Best
from stagewright.metrics import LOSS, Criterion, ThroughputUnit
from stagewright.model.chain import Way
from stagewright.model.loss import LossOptions
from stagewright.model.networks.weights import Start
from stagewright.model.probe import Probe
from stagewright.model.prove import Proof
from stagewright.plan.plan import Plan

_DEFAULT_RESTARTS = 3
NEVER = sys.maxsize  # a batch or microbatch that never comes


def criterion_of(config: Config) -> Criterion | None:
    """By what a configuration compares evaluations, if it does: by --best, else with --early-stop by the loss."""
    text = config.checkpoint.best or (LOSS if config.run.early_stop else None)
    return None if text is None else Criterion.parse(text)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The probes of evaluation microbatches: full ones, and a shorter one at the end where there is one."""

    samples: int
    whole: Probe
    short: Probe | None


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a plan: configuration, plan, what crosses each cut, and where to start."""

    config: Config
    plan: Plan
    batches: int  # to train
    pauses: tuple[int, ...]  # batch numbers after which the pipeline drains for an evaluation
    training: Probe
    evaluation: Evaluation | None
    folder: str
    loss: LossOptions = field(default_factory=LossOptions)
    groups: tuple[Group, ...] = ()  # of all parameters; none where they all move by the options themselves
    channels_last: bool = False  # the memory layout of images
    draws: frozenset[str] = frozenset()  # generators, beside torch's, that the model's forward draws from
    way: Way = Way.GRAPH  # how the model is cut
    proof: Proof | None = None  # that its pieces compute what it does
    weights: Start | None = None  # where its first weights came from, if they are not new
    frozen: int = 0  # numbers of the model that are not trained
    is_conditional: bool = True  # which parameters get a gradient may differ between batches
    samples: int = 0  # of the training data
    fingerprint: str = ""  # of the training data
    start: int = 0  # batches trained before this job
    resume: str | None = None  # the checkpoint folder with their state
    export: str | None = None  # the file to write the trained weights to
    unit: str = "images"  # what its throughput counts
    per_sample: int = 1  # of them
    is_scripted: bool = False  # a script's own loop drives every rank, and sees the loss of each batch

    @property
    def throughput_unit(self) -> ThroughputUnit:
        return ThroughputUnit(self.unit, self.per_sample)

    @property
    def order(self) -> Order:
        return Order(self.samples, self.plan.batch, self.config.run.seed, self.config.data.shuffle)

    def next_pause(self, done: int) -> int:
        """The first batch number after `done` at which the pipeline is planned to drain."""
        after = bisect_right(self.pauses, done)
        evaluation = self.pauses[after] if after < len(self.pauses) else self.batches
        return min(evaluation, self.next_save(done), self.batches)

    def next_save(self, done: int) -> int:
        """The first batch number after `done` with a planned checkpoint: every so many batches, and the last."""
        every, step = self.config.checkpoint.every, self.plan.pause_step
        if not every:
            return NEVER
        due = -(-(done // every + 1) * every // step) * step
        return self.batches if done < self.batches < due and self.batches % step == 0 else due

    @property
    def criterion(self) -> Criterion | None:
        return criterion_of(self.config)

    def stops_early(self, best: Best | None) -> bool:
        """Whether the run ends here because evaluations no longer get better."""
        most = self.config.run.early_stop
        return most is not None and best is not None and best.since >= most

    def saves_outcome(self, best: Best | None, batch: int) -> bool:
        """Whether the evaluation after `batch` batches is a reason to save: a new best, or an early end."""
        if best is None or batch % self.plan.pause_step:
            return False
        is_new = best.batch == batch and self.config.checkpoint.best is not None
        return is_new or (self.stops_early(best) and self.config.checkpoint.every > 0)

    @property
    def patience(self) -> float:
        """Seconds that a rank waits for another: longer than the watchdog does, which can name the rank at fault."""
        return 2 * max(self.config.run.timeout, self.config.run.start_timeout)

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether the run saves checkpoints regularly."""
        checkpoint = self.config.checkpoint
        return bool(checkpoint.every or checkpoint.minutes or checkpoint.best)

    @property
    def max_restarts(self) -> int:
        """How many restarts follow faults; by default 3 where there are checkpoints to start from, otherwise none."""
        if self.config.run.max_restarts is not None:
            return self.config.run.max_restarts
        return _DEFAULT_RESTARTS if self.keeps_checkpoints or self.resume else 0

    def save(self, path: Path) -> None:
        """Write the whole file at once: where machines share a run folder, others may be reading it."""
        draft = path.with_name(f".{secrets.token_hex(8)}")
        draft.write_bytes(TypeAdapter(Job).dump_json(self, indent=1))
        draft.replace(path)

    @staticmethod
    def load(path: Path) -> Job:
        return TypeAdapter(Job).validate_json(path.read_bytes())
