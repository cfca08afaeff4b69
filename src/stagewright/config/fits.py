"""What must fit together once data, model and plan are known: one table over plain facts.

`rules` has what options exclude or need by themselves. A `Fit` is about what data, model, plan and checkpoint turned
out to be. Facts become known one after the other, and the table is read each time: what is not known yet breaks no row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stagewright.config.sections import AUTO, Config, PlanConfig
from stagewright.config.sources import knows_classes
from stagewright.errors import UserError, counted
from stagewright.voice import SILENT, Voice

_MOST_EVALUATIONS = 10**6


@dataclass(frozen=True, slots=True)
class Facts:
    """What a run turned out to be."""

    config: Config
    world: int | None = None  # processes, where another launcher has started them
    # One of the data sets
    data: str = ""
    classes: int = 0  # of its labels; 0 where it does not know them
    has_ignored: bool = False
    vocabulary: int = 0  # of its tokens
    # The model
    loss: str = ""
    mean: str | None = None  # the loss, where it is a mean and microbatches may count unequally
    outputs: int | None = None  # for the classes or tokens of a label
    embeddings: int | None = None  # tokens that the largest one has
    state: str | None = None  # an attribute that the forward changes, on which its output depends
    # The plan
    mode: str = ""
    ranks: int | None = None
    idle: int | None = None  # a machine of --nodes without a stage
    microbatches: int = 1
    replicas: int = 1  # of the widest stage
    pause_step: int = 1
    pauses: tuple[int, ...] = ()
    batches: int | None = None  # to train
    # The checkpoint that is resumed
    start: int | None = None
    since: int = 0  # evaluations since the best one
    stall: str = ""  # the same in words

    @property
    def is_open(self) -> bool:
        """Whether the placement is left to the planner."""
        return self.config.plan.placement == AUTO and self.config.plan.file is None

    @property
    def staged(self) -> str | None:
        """An option about stages."""
        plan, default = self.config.plan, PlanConfig()
        names = ("cut", "shares", "versions", "depths", "policy")
        asked = ((name, getattr(plan, name)) for name in names if getattr(plan, name) != getattr(default, name))
        return next((f"--{name} {value}" for name, value in asked), None)

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints."""
        checkpoint = self.config.checkpoint
        return bool(checkpoint.every or checkpoint.minutes or checkpoint.best)

    @property
    def counts(self) -> str:
        return f"{counted(self.ranks or 0, 'rank')} but {counted(self.world or 0, 'process', 'es')} were started"

    @property
    def evaluations(self) -> int:
        """By --eval-every."""
        return (self.batches or 0) // (self.config.run.eval_every or self.batches or 1)

    @property
    def rarest(self) -> int:
        """The least --eval-every for which evaluations are not too many."""
        return -(-(self.batches or 0) // _MOST_EVALUATIONS)

    @property
    def highest(self) -> int:
        """The highest label."""
        return self.classes - 1

    @property
    def last_token(self) -> int:
        return self.vocabulary - 1

    @property
    def has_few_classes(self) -> bool:
        """Whether the training data knows all its classes, and the model has outputs for more."""
        is_known = self.data == self.config.data.source and knows_classes(self.data)
        return is_known and self.loss == "cross-entropy" and 1 < self.classes < (self.outputs or 0)

    @property
    def odd_pause(self) -> int | None:
        """An evaluation in the middle of a stage's round."""
        return next((batch for batch in self.pauses if batch % self.pause_step), None)


@dataclass(frozen=True, slots=True)
class Fit:
    """Facts that do not fit, and what to say of them."""

    breaks: Callable[[Facts], object]
    says: str  # with {f.NAME} for a fact
    is_error: bool = True


def check_fits(facts: Facts, voice: Voice = SILENT) -> None:
    """Raise for the first row that the facts break; warn of those that are no errors."""
    for fit in FITS:
        if fit.breaks(facts):
            said = fit.says.format(f=facts)
            if fit.is_error:
                raise UserError(said)
            voice.warn(said)


FITS: tuple[Fit, ...] = (
    # Placement auto
    Fit(
        lambda f: f.is_open and f.config.nodes.list is not None,
        "--placement auto plans for this machine, but --nodes names {f.config.nodes.list}; give the devices of each "
        "stage: --placement 0:0-3.1:0-3",
    ),
    Fit(
        lambda f: f.is_open and f.world is not None and f.world > 1,
        "--placement auto starts its own ranks, but {f.world} processes were started; give the devices of each stage, "
        "such as --placement 0:0.0:1",
    ),
    Fit(
        lambda f: f.is_open and f.staged,
        "{f.staged} needs a placement, and --placement is auto; give the devices of each stage as well, such as "
        "--placement 0:0.0:1",
    ),
    # Plan
    Fit(
        lambda f: f.idle is not None,
        "--nodes names machine {f.idle} but placement {f.config.plan.placement} has no device of it; place a stage on "
        "{f.idle}:0, or leave the machine out",
    ),
    Fit(
        lambda f: f.ranks is not None and f.world is not None and f.ranks != f.world,
        "the plan has {f.counts}; start one process per rank, or change --placement",
    ),
    Fit(
        lambda f: f.batches is not None and f.batches < 1,
        "there are {f.batches} batches to train; give --steps or --epochs of at least 1",
    ),
    Fit(
        lambda f: f.evaluations > _MOST_EVALUATIONS,
        "--eval-every {f.config.run.eval_every} means {f.evaluations} evaluations in {f.batches} batches; give at "
        "least {f.rarest}",
    ),
    Fit(
        lambda f: f.config.checkpoint.best is not None and f.odd_pause is not None,
        "--best needs a checkpoint at every evaluation, but that after step {f.odd_pause} is not at a multiple of "
        "{f.pause_step}, where rounds of mode {f.mode} end together; change --eval-every and --steps",
    ),
    # Resume
    Fit(
        lambda f: f.start is not None and f.batches is not None and f.start >= f.batches,
        "the checkpoint is at batch {f.start} and the run ends at {f.batches}; give more with --steps or --epochs",
    ),
    Fit(
        lambda f: f.stall and f.since >= (f.config.run.early_stop or f.since + 1),
        "the run stopped early at batch {f.start}: {f.stall}; give an --early-stop above {f.config.run.early_stop} to "
        "go on",
    ),
    Fit(
        lambda f: (f.start or 0) % f.pause_step,
        "the checkpoint is at batch {f.start}, but with mode {f.mode} on this placement rounds end together only every "
        "{f.pause_step} batches; use another placement, or a checkpoint at such a batch",
    ),
    # Model
    Fit(
        lambda f: f.state and f.replicas > 1,
        "the model's forward changes its attribute '{f.state}', of which each of {f.replicas} replicas would have its "
        "own; register it as a buffer, or give every stage one device",
    ),
    Fit(
        lambda f: f.state and f.saves,
        "the model's forward changes its attribute '{f.state}', which no checkpoint holds; register it as a buffer, or "
        "train without checkpoints",
    ),
    Fit(
        lambda f: f.mean and f.microbatches > 1,
        "{f.mean} is a mean over each of {f.microbatches} microbatches: where they count different numbers of targets, "
        "or compare samples, the result depends on --microbatches; return (total, count)",
        is_error=False,
    ),
    # Labels and tokens
    Fit(
        lambda f: f.loss == "binary" and f.classes > 2,
        "data {f.data} has targets up to {f.highest} but --loss binary takes 0 and 1; use --loss cross-entropy for "
        "class numbers, or store each class as a yes or no of its own",
    ),
    Fit(
        lambda f: f.outputs is not None and f.has_ignored and not f.classes,
        "data {f.data} has no label that counts: all are -100 or --ignore-index; give labels that the {f.outputs} "
        "outputs of the model are for",
    ),
    Fit(
        lambda f: f.outputs is not None and f.classes > f.outputs,
        "data {f.data} has labels up to {f.highest} but the model has {f.outputs} outputs; use --classes {f.classes}",
    ),
    Fit(
        lambda f: f.has_few_classes and ":" not in f.config.model.name,
        "the model has {f.outputs} outputs but data {f.data} has {f.classes} classes; --classes {f.classes} would fit",
        is_error=False,
    ),
    Fit(
        lambda f: f.has_few_classes and ":" in f.config.model.name,
        "the model has {f.outputs} outputs but data {f.data} has {f.classes} classes; the others are never right",
        is_error=False,
    ),
    Fit(
        lambda f: f.embeddings is not None and f.vocabulary > f.embeddings,
        "data {f.data} has tokens up to {f.last_token} but the model's largest embedding has {f.embeddings}; use a "
        "model with {f.vocabulary}, or data made with its tokenizer",
    ),
)
