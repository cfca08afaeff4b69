"""Run the stages once before anything is trained, on tensors that have shapes but no data where the model allows it.

`dry_run` finds out what crosses each cut, in training and in evaluation, and whether model, loss, metrics and data suit
each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stagewright.config.fits import Facts, check_fits
from stagewright.config.losses import LOSSES
from stagewright.config.sections import Config
from stagewright.data.sources import Source, cast
from stagewright.errors import UserError, did_you_mean, first_line, within_memory
from stagewright.events import Score
from stagewright.metrics import Criterion, metric_values
from stagewright.model.chain import tied_parameters
from stagewright.model.load import is_ours
from stagewright.model.loss import Loss, Measured, Watched, logits_of
from stagewright.model.pieces import Piece
from stagewright.model.probe import Given, Measure, Probe, probe
from stagewright.model.prove import keeps_state
from stagewright.model.trace import is_cheap
from stagewright.plan.plan import Plan
from stagewright.run.opening import Binding, Opening, memory_options
from stagewright.runtime.job import Evaluation, Job, criterion_of
from stagewright.runtime.precision import precision_of
from stagewright.runtime.process.assemble import open_pieces
from stagewright.runtime.stage.scores import make_scorer
from stagewright.voice import SILENT, Voice

_FORWARDS = 20  # of a sample, by which a model is as cheap as by its recording


def dry_run(
    opening: Opening, plan: Plan, pieces: Sequence[Piece], facts: Facts, voice: Voice = SILENT
) -> tuple[Probe, Evaluation | None]:
    """What crosses each cut, in training and in evaluation, and whether model, loss and data suit each other."""
    config, chain = opening.config, opening.chain
    with within_memory(**memory_options(config)):
        fields = opening.fields(opening.source, opening.order(plan).microbatch(0, plan.microbatches))
    given, loss = opening.binding.given(fields), Loss(opening.loss)
    tied = {parameter.names: parameter.homes for parameter in plan.tied}
    assert tied == {names: homes for names, homes, _ in tied_parameters(chain.model, pieces)}, "the plan has other ties"
    is_known = is_ours(config.model.name)
    share = len(given.inputs) / _FORWARDS
    is_quick = config.run.device == "cpu" and is_cheap(chain.model, given.inputs, "cpu", share)
    on_values = is_known and is_quick and loss.is_builtin and ":" not in config.run.metrics
    stages = Stages(config, pieces, chain.is_conditional, is_known, on_values)
    measure = _MeasuredLogits(loss)
    training = stages.probe(given, measure, training=True)
    is_mean = training.divisor is None and (not loss.counts_alike or loss.name == "model")
    facts = replace(facts, loss=loss.name, state=_state(opening, training))
    check_fits(replace(facts, mean=loss.option if is_mean else None), voice)
    axis = LOSSES[loss.name].classes if loss.is_builtin else None
    for text, source in opening.sources:
        of_data = replace(
            facts,
            data=text,
            classes=source.classes,
            has_ignored=source.has_ignored,
            vocabulary=source.vocabulary,
            outputs=None if axis is None else measure.shape[axis],
            embeddings=_embeddings(chain.model),
        )
        check_fits(of_data, voice)
    if not facts.pauses:
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
    pieces = open_pieces(job)
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
    on_values: bool = False  # of models and losses whose code is known: what they do depends on no value

    def probe(self, given: Given, measure: Measure, *, training: bool) -> Probe:
        """What crosses each cut; an error that the model's own code raises becomes one line."""
        given = given.map(_valid) if self.on_values else given
        try:
            return probe(
                self.pieces,
                given,
                precision_of(self.config).forward_context,
                training=training,
                measure=measure,
                device=self.config.run.device,
                is_conditional=self.is_conditional,
                watches_inputs=self.watches_inputs,
                on_values=self.on_values,
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


def _valid(tensor: Tensor) -> Tensor:
    """The same, but any number a valid index or label."""
    return tensor if tensor.is_floating_point() else torch.zeros_like(tensor)


class _MeasuredLogits:
    """A loss that notes the shape of the predictions."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.shape: tuple[int, ...] = ()

    def __call__(self, outputs: Any, sample: Watched) -> Measured:
        measured = self._loss(outputs, sample)
        self.shape = tuple(logits_of(outputs).shape)
        return measured


def _state(opening: Opening, training: Probe) -> str | None:
    """A plain attribute in which the model keeps state, which replicas and checkpoints would need."""
    chain = opening.chain
    attributes = (*training.attributes, *chain.leaks)
    keeps = chain.leaks or (attributes and keeps_state(opening.build, chain.example, attributes))
    return attributes[0] if keeps else None


def _embeddings(model: nn.Module) -> int | None:
    """The tokens that the largest embedding has."""
    return max((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), default=None)


def _validation(config: Config, binding: Binding, val: Source, given: Given, samples: int) -> Given:
    """Samples of the validation data, which must have the fields that the model takes, of the same types."""
    dtype = precision_of(config).weights
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
