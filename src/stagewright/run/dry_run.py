"""Run the stages once before anything is trained, on tensors that have shapes but no data where the model allows it.

`dry_run` finds out what crosses each cut, in training and in evaluation, and whether model, loss, metrics and data suit
each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from stagewright.config.sections import Config
from stagewright.data.sources import Source, cast
from stagewright.errors import UserError, did_you_mean, first_line, within_memory
from stagewright.events import Score
from stagewright.metrics import Criterion, metric_values
from stagewright.model.cut import Piece, tied_parameters
from stagewright.model.load import is_ours
from stagewright.model.loss import IGNORED, Loss, LossOptions, Measured, Watched, logits_of
from stagewright.model.probe import Given, Measure, Probe, probe
from stagewright.model.prove import keeps_state
from stagewright.plan.plan import Plan
from stagewright.run.defaults import COUNTED
from stagewright.run.opening import Binding, Opening, memory_options
from stagewright.runtime.job import Evaluation, Job, criterion_of
from stagewright.runtime.process.assemble import open_pieces
from stagewright.runtime.stage.precision import make_precision
from stagewright.runtime.stage.scores import make_scorer
from stagewright.voice import SILENT, Say, Voice


def dry_run(
    opening: Opening, plan: Plan, pieces: Sequence[Piece], voice: Voice = SILENT, *, evaluates: bool
) -> tuple[Probe, Evaluation | None]:
    """What crosses each cut, in training and in evaluation, and whether model, loss and data suit each other."""
    config, chain = opening.config, opening.chain
    with within_memory(**memory_options(config)):
        fields = opening.fields(opening.source, opening.order(plan).microbatch(0, plan.microbatches))
    given, loss = opening.binding.given(fields), Loss(opening.loss)
    tied = {parameter.names: parameter.homes for tie in plan.ties for parameter in tie.parameters}
    assert tied == {names: homes for names, homes, _ in tied_parameters(chain.model, pieces)}, "the plan has other ties"
    stages = Stages(config, pieces, chain.is_conditional, watches_inputs=is_ours(config.model.name))
    measure = _MeasuredLogits(loss)
    training = stages.probe(given, measure, training=True)
    _warn_about_means(loss, training, plan, voice.warn)
    _require_stateless(opening, plan, training)
    _require_classes(opening.loss, measure.shape, *opening.sources)
    _warn_about_classes(opening, measure.shape, voice.warn)
    _require_vocabulary(chain.model, *opening.sources)
    if not evaluates:
        return training, None
    if opening.val is not opening.source:
        given = _validation(config, opening.binding, opening.val, given, plan.samples)
    scorer = make_scorer(config.run.metrics, opening.loss)
    evaluation = stages.evaluation(given, plan.samples, opening.val, scorer.probe)
    _require_metric(criterion_of(config), scorer.score)
    return training, evaluation


def evaluation_of(job: Job, val: Source, measure: Measure) -> Evaluation:
    """What an evaluation of a script's job computes on some data."""
    inputs, names, samples = job.training.inputs, job.training.names, job.plan.samples
    pieces = open_pieces(job.config, job.plan.cuts, inputs, names, way=job.way)
    binding = Binding(tuple(value.name for value in inputs), names)
    few = binding.given({value.name: value.empty() for value in inputs})
    given = _validation(job.config, binding, val, few, samples)
    return Stages(job.config, pieces, job.is_conditional).evaluation(given, samples, val, measure)


@dataclass(frozen=True, slots=True)
class Stages:
    """The pieces of a model, to be run on samples without training them."""

    config: Config
    pieces: Sequence[Piece]
    is_conditional: bool
    watches_inputs: bool = False

    def probe(self, given: Given, measure: Measure, *, training: bool) -> Probe:
        """What crosses each cut; an error that the model's own code raises becomes one line."""
        run = self.config.run
        try:
            return probe(
                self.pieces,
                given,
                make_precision(run.precision, run.device).forward_context,
                training=training,
                measure=measure,
                device=run.device,
                is_conditional=self.is_conditional,
                watches_inputs=self.watches_inputs,
            )
        except UserError:
            raise
        except Exception as error:  # the model's code may raise anything
            raise UserError(
                f"the model can't run on input {given.inputs}: {type(error).__name__}: {first_line(error, 200)}"
            ) from error

    def evaluation(self, given: Given, samples: int, val: Source, measure: Measure) -> Evaluation:
        """What an evaluation computes: whole microbatches of so many samples, and a last one of what is left."""
        rest = len(val) % samples
        whole = self.probe(given, measure, training=False)
        return Evaluation(len(val), whole, self.probe(given.first(rest), measure, training=False) if rest else None)


class _MeasuredLogits:
    """A loss that notes the shape of the predictions."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.shape: tuple[int, ...] = ()

    def __call__(self, outputs: Any, sample: Watched) -> Measured:
        measured = self._loss(outputs, sample)
        self.shape = tuple(logits_of(outputs).shape)
        return measured


def _require_stateless(opening: Opening, plan: Plan, training: Probe) -> None:
    """An error where replicas or checkpoints would need state that the model keeps in plain attributes."""
    chain, checkpoint = opening.chain, opening.config.checkpoint
    attributes = (*training.attributes, *chain.leaks)
    if not attributes or not (chain.leaks or keeps_state(opening.build, chain.example, attributes)):
        return
    name = attributes[0]
    most = max(stage.replicas for stage in plan.stages)
    if most > 1:
        raise UserError(
            f"the model's forward changes its attribute '{name}', of which each of {most} replicas would have its own; "
            "register it as a buffer, or give every stage one device"
        )
    if checkpoint.every or checkpoint.minutes or checkpoint.best:
        raise UserError(
            f"the model's forward changes its attribute '{name}', which no checkpoint holds; register it as a buffer, "
            "or train without checkpoints"
        )


def _require_classes(options: LossOptions, logits: tuple[int, ...], *sources: tuple[str, Source]) -> None:
    """An error where data has a label that the model has no output for, or none that counts."""
    for text, source in sources:
        if options.name == "binary" and source.classes > 2:
            raise UserError(
                f"data {text} has targets up to {source.classes - 1} but --loss binary takes 0 and 1; use "
                "--loss cross-entropy for class numbers, or store each class as a yes or no of its own"
            )
    axis = {"cross-entropy": 1, "next-token": -1}.get(options.name)
    if axis is None:
        return
    outputs = logits[axis]
    for text, source in sources:
        if source.has_ignored and not source.classes:
            raise UserError(
                f"data {text} has no label that counts: all are {IGNORED} or --ignore-index; give labels of 0 to "
                f"{outputs - 1}"
            )
        if source.classes > outputs:
            raise UserError(
                f"data {text} has labels up to {source.classes - 1} but the model has {outputs} outputs; "
                f"use --classes {source.classes}"
            )


def _warn_about_classes(opening: Opening, logits: tuple[int, ...], warn: Say) -> None:
    """Warn where the model has outputs for classes that the data does not have."""
    config, text, found = opening.config, opening.config.data.source, opening.source.classes
    if opening.loss.name == "cross-entropy" and text.partition(":")[0] in COUNTED and 1 < found < logits[1]:
        advice = f"--classes {found} would fit" if ":" not in config.model.name else "the others are never right"
        warn(f"the model has {logits[1]} outputs but data {text} has {found} classes; {advice}")


def _require_vocabulary(model: nn.Module, *sources: tuple[str, Source]) -> None:
    """An error where text has a token that the model has no embedding for."""
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    for text, source in sources:
        if sizes and source.vocabulary > max(sizes):
            raise UserError(
                f"data {text} has tokens up to {source.vocabulary - 1} but the model's largest embedding has "
                f"{max(sizes)}; use a model with {source.vocabulary}, or data made with its tokenizer"
            )


def _warn_about_means(loss: Loss, training: Probe, plan: Plan, warn: Say) -> None:
    """Say that a user's mean is a mean of microbatches' means."""
    if training.divisor is None and plan.microbatches > 1 and (not loss.counts_alike or loss.name == "model"):
        warn(
            f"{loss.option} is a mean over each of {plan.microbatches} microbatches: where they count different "
            "numbers of targets, or compare samples, the result depends on --microbatches; return (total, count)"
        )


def _validation(config: Config, binding: Binding, val: Source, given: Given, samples: int) -> Given:
    """Samples of the validation data, which must have the fields that the model takes, of the same types."""
    dtype = make_precision(config.run.precision, config.run.device).weights
    fields = cast(val.batch(np.arange(samples) % len(val)), val.targets, dtype)
    for name in binding.fields:
        if name not in fields:
            raise UserError(
                f"--val {config.data.val} has no field '{name}', which the model takes from --data "
                f"{config.data.source}; it has {', '.join(fields)}"
            )
        trained, found = given.fields[name].dtype, fields[name].dtype
        if trained != found:
            raise UserError(
                f"field '{name}' is {str(found).removeprefix('torch.')} in --val {config.data.val} but "
                f"{str(trained).removeprefix('torch.')} in --data {config.data.source}; store both alike"
            )
    return binding.given(fields)


def _require_metric(criterion: Criterion | None, score: Score) -> None:
    """An error where evaluations are compared by a metric that they do not measure."""
    known = metric_values({name: (total, count or 1.0) for name, (total, count) in score.totals.items()})
    if criterion is not None and criterion.metric not in known:
        raise UserError(
            f"--best names metric '{criterion.metric}', which the evaluations do not measure; add it with --metric "
            f"({did_you_mean(criterion.metric, known)})"
        )
