"""Run the stages once before anything is trained, on tensors that have shapes but no data where the model allows it.

`dry_run` finds out what crosses each cut, in training and in evaluation, and whether model, loss, metrics and data suit
each other. `Task` is what is trained, before there is a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from stagewright.config.sections import Config
from stagewright.data.order import Indices, Order
from stagewright.data.sources import Fields, Source, cast
from stagewright.errors import UserError, did_you_mean, first_line, within_memory
from stagewright.events import Score
from stagewright.metrics import Criterion, metric_values
from stagewright.model.cut import Chain, Piece, tied_parameters
from stagewright.model.load import is_ours
from stagewright.model.loss import IGNORED, Loss, LossOptions, Measured, Watched, logits_of
from stagewright.model.probe import Given, Measure, Probe, probe
from stagewright.model.prove import keeps_state
from stagewright.plan.plan import Plan
from stagewright.planning.build import Warn
from stagewright.run.defaults import COUNTED
from stagewright.run.samples import Binding
from stagewright.runtime.job import Evaluation, Job, criterion_of
from stagewright.runtime.process.assemble import open_model, open_pieces
from stagewright.runtime.stage.precision import Precision, make_precision
from stagewright.runtime.stage.scores import make_scorer


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained, before there is a plan: the data, how the model takes it, and the loss."""

    source: Source
    val: Source  # what evaluations run on: of its own, or the training data
    binding: Binding
    loss: LossOptions
    precision: Precision

    def fields(self, source: Source, indices: Indices) -> Fields:
        """Samples as ranks get them."""
        return cast(source.batch(indices), source.targets, self.precision.weights)

    def named_sources(self, config: Config) -> tuple[tuple[str, Source], ...]:
        return ((config.data.source, self.source), (config.data.val or "", self.val))


def dry_run(
    config: Config,
    task: Task,
    chain: Chain,
    pieces: Sequence[Piece],
    plan: Plan,
    order: Order,
    warn: Warn,
    *,
    evaluates: bool,
) -> tuple[Probe, Evaluation | None]:
    """What crosses each cut, in training and in evaluation, and whether model, loss and data suit each other."""
    with within_memory(**memory_options(config)):
        fields = task.fields(task.source, order.microbatch(0, plan.microbatches))
    given, loss = task.binding.given(fields), Loss(task.loss)
    tied = {parameter.names: parameter.homes for tie in plan.ties for parameter in tie.parameters}
    assert tied == {names: homes for names, homes, _ in tied_parameters(chain.model, pieces)}, "the plan has other ties"
    context = task.precision.forward_context
    watches = is_ours(config.model.name)
    study = partial(
        _probe, pieces, chain.is_conditional, context=context, device=config.run.device, watches_inputs=watches
    )
    logits: list[tuple[int, ...]] = []
    training = study(given, training=True, measure=partial(_measure_logits, loss, logits))
    _warn_about_means(loss, training, plan, warn)
    _require_stateless(config, plan, chain, training)
    _require_classes(task.loss, logits[-1], *task.named_sources(config))
    _warn_about_classes(config, task, logits[-1], warn)
    _require_vocabulary(chain.model, *task.named_sources(config))
    if not evaluates:
        return training, None
    if task.val is not task.source:
        given = _validation(config, task.binding, task.val, given, plan.samples)
    scorer = make_scorer(config.run.metrics, task.loss)
    evaluation = _evaluation(plan, study, given, task.val, scorer.probe)
    _require_metric(criterion_of(config), scorer.score)
    return training, evaluation


def evaluation_of(job: Job, val: Source, measure: Measure) -> Evaluation:
    """What an evaluation of a script's job computes on some data."""
    config, plan, inputs = job.config, job.plan, job.training.inputs
    precision = make_precision(config.run.precision, config.run.device)
    pieces = open_pieces(config, plan.cuts, inputs, job.training.names, way=job.way)
    binding = Binding(tuple(value.name for value in inputs), job.training.names)
    few = {value.name: value.empty() for value in inputs}
    given = _validation(config, binding, val, binding.given(few), plan.samples)
    context = precision.forward_context
    study = partial(_probe, pieces, job.is_conditional, context=context, device=config.run.device)
    return _evaluation(plan, study, given, val, measure)


def _probe(
    pieces: Sequence[Piece],
    is_conditional: bool,
    given: Given,
    *,
    context: Callable[[], AbstractContextManager[object]],
    device: str,
    training: bool,
    measure: Measure,
    watches_inputs: bool = False,
) -> Probe:
    """Probe the pieces; an error that the model's own code raises becomes one line."""
    study = partial(probe, measure=measure, device=device, is_conditional=is_conditional, watches_inputs=watches_inputs)
    try:
        return study(pieces, given, context, training=training)
    except UserError:
        raise
    except Exception as error:  # the model's code may raise anything
        raise UserError(
            f"the model can't run on input {given.inputs}: {type(error).__name__}: {first_line(error, 200)}"
        ) from error


def _require_stateless(config: Config, plan: Plan, chain: Chain, training: Probe) -> None:
    """An error where replicas or checkpoints would need state that the model keeps in plain attributes."""
    attributes = (*training.attributes, *chain.leaks)
    if not attributes or not (
        chain.leaks or keeps_state(partial(build_as_authored, config), chain.example, attributes)
    ):
        return
    name = attributes[0]
    most = max(stage.replicas for stage in plan.stages)
    if most > 1:
        raise UserError(
            f"the model's forward changes its attribute '{name}', of which each of {most} replicas would have its own; "
            "register it as a buffer, or give every stage one device"
        )
    if config.checkpoint.every or config.checkpoint.minutes or config.checkpoint.best:
        raise UserError(
            f"the model's forward changes its attribute '{name}', which no checkpoint holds; register it as a buffer, "
            "or train without checkpoints"
        )


def _measure_logits(loss: Loss, shapes: list[tuple[int, ...]], outputs: Any, sample: Watched) -> Measured:
    """The loss; and note the shape of the predictions."""
    measured = loss(outputs, sample)
    shapes.append(tuple(logits_of(outputs).shape))
    return measured


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


def _warn_about_classes(config: Config, task: Task, logits: tuple[int, ...], warn: Warn) -> None:
    """Warn where the model has outputs for classes that the data does not have."""
    text, found = config.data.source, task.source.classes
    if task.loss.name == "cross-entropy" and text.partition(":")[0] in COUNTED and 1 < found < logits[1]:
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


def _warn_about_means(loss: Loss, training: Probe, plan: Plan, warn: Warn) -> None:
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


def _evaluation(plan: Plan, study: Callable[..., Probe], given: Given, val: Source, measure: Measure) -> Evaluation:
    """What an evaluation computes: whole microbatches, and a last one of what is left."""
    rest = len(val) % plan.samples
    whole = study(given, training=False, measure=measure)
    short = study(given.first(rest), training=False, measure=measure) if rest else None
    return Evaluation(len(val), whole, short)


def _require_metric(criterion: Criterion | None, score: Score) -> None:
    """An error where evaluations are compared by a metric that they do not measure."""
    known = metric_values({name: (total, count or 1.0) for name, (total, count) in score.totals.items()})
    if criterion is not None and criterion.metric not in known:
        raise UserError(
            f"--best names metric '{criterion.metric}', which the evaluations do not measure; add it with --metric "
            f"({did_you_mean(criterion.metric, known)})"
        )


def build_as_authored(config: Config) -> nn.Module:
    """The model as its author's factory builds it, in single precision on the CPU."""
    return open_model(replace(config, run=replace(config.run, precision="fp32", device="cpu")))


def memory_options(config: Config) -> dict[str, int | None]:
    """The options that decide how much memory preparing takes."""
    return {"image": config.data.image, "classes": config.model.classes, "batch": config.plan.batch}
