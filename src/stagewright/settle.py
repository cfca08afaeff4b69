"""From a configuration to a job: every default settled, the plan proven, the cuts probed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from stagewright.config.sections import Config, PlanConfig
from stagewright.equip import require_devices, require_kind, within_memory
from stagewright.foresee import machines_of, planned_cuts, predict_job, require_all_machines, with_plan_file
from stagewright.lag import least_stale, warn_of_lag
from stagewright.layout import plan_at, stage_numbers
from stagewright.resume import (
    Resume,
    find_checkpoint,
    keeps_plan,
    remarks,
    require_model,
    require_start,
    resumed_plan,
    start_batch,
)
from stagewright.runfolder import run_folder

if TYPE_CHECKING:
    from torch import Tensor

    from stagewright.cluster import Placement
    from stagewright.data.sources import Source
    from stagewright.model.probe import Probe
    from stagewright.model.units import Chain, Piece
    from stagewright.plan.plan import Plan
    from stagewright.runtime.job import Evaluation, Job
    from stagewright.simulate import Costs

Warn = Callable[[str], None]
_MOST_EVALUATIONS = 10**6


def prepare(config: Config, warn: Warn = lambda warning: None, *, is_host: bool = True) -> tuple[Job, int]:
    """Settle every default, plan, prove the schedule, probe the cuts, make a folder; also the batches of an epoch."""
    from stagewright.data.order import Order
    from stagewright.model.units import Chain
    from stagewright.runtime.assemble import has_channels_last, open_data
    from stagewright.runtime.job import Job
    from stagewright.runtime.precision import make_precision
    from stagewright.schedule.check import check

    require_kind(config)
    _require_rates(config)
    config = _settle_model(with_plan_file(config))
    precision = make_precision(config.run.precision, config.run.device)
    asked = {"image": config.data.image, "classes": config.model.classes, "batch": config.plan.batch}
    with within_memory(**asked, samples=config.data.samples):
        source = open_data(config, config.data.source)
        order = Order(len(source), config.plan.batch, config.run.seed, config.data.shuffle)
        chain = Chain(_build(config).to(precision.weights))
    resume = find_checkpoint(config.run.resume) if config.run.resume else None
    config = replace(config, run=replace(config.run, resume=None))
    plan = _plan_for(config, chain, resume, warn)
    require_devices(config, plan, warn)
    check(plan.starting_at(0))
    batches = _num_batches(config, order)
    start = 0 if resume is None else start_batch(resume, order, source.fingerprint)
    if resume is not None:
        require_start(plan, start, batches)
        if not plan.computes_as(resume.checkpoint.manifest.plan):
            plan = plan.starting_at(start)
        for remark in remarks(config, resume, plan):
            warn(remark)
    with within_memory(**asked):
        inputs, labels = source.batch(order.microbatch(0, plan.microbatches))
    example = inputs.to(precision.weights) if inputs.is_floating_point() else inputs
    pieces = chain.cut(plan.cuts)
    study = partial(_probe, pieces, context=precision.forward_context, device=config.run.device)
    training = study(example, training=True)
    if resume is not None:
        require_model(resume, chain.model, training.reached)
    val = open_data(config, config.data.val) if config.data.val else source
    _require_classes(training.output, (config.data.source, source), (config.data.val or "", val))
    pauses = _pauses(config, batches, order.batches)
    evaluation = _evaluation(plan, study, example, val) if pauses else None
    predict_job(config, plan)  # what is wrong with a profile is said before a folder is made
    folder = str(run_folder(config, plan, resume if is_host else None))
    job = Job(
        config,
        plan,
        batches,
        pauses,
        tuple(labels.shape[1:]),
        training,
        evaluation,
        folder,
        channels_last=has_channels_last(config, chain.model),
        samples=len(source),
        fingerprint=source.fingerprint,
        start=start,
        resume=None if resume is None else str(resume.checkpoint.folder),
    )
    return job, order.batches


def _plan_for(config: Config, chain: Chain, resume: Resume | None, warn: Warn) -> Plan:
    """The plan that the options describe, or the one that a run to resume has settled on."""
    if resume is not None and keeps_plan(config, resume):
        plan = resume.checkpoint.manifest.plan
        warn_of_lag(config, plan, warn)  # the rate may be another one
        return _with_agreement(config, plan)
    plan = make_plan_for(config, chain, warn)
    return plan if resume is None else resumed_plan(plan, resume)


def _require_rates(config: Config) -> None:
    """An error where options of the learning rate or of momentum lack the one that they go with."""
    schedule, optimizer = config.schedule, config.optimizer
    falls = schedule.steps.strip(", ")
    if schedule.kind == "step" and not falls:
        raise ValueError("--lr-schedule step has no --lr-steps, so the rate would never fall; give them, as 100,200")
    if falls and schedule.kind != "step":
        raise ValueError(
            f"--lr-steps {falls} was given with --lr-schedule {schedule.kind}; it goes with --lr-schedule step alone"
        )
    if optimizer.nesterov and not (optimizer.name == "sgd" and optimizer.momentum):
        raise ValueError(
            f"--nesterov was given with --optimizer {optimizer.name} --momentum {optimizer.momentum:g}; "
            "it goes with sgd and a momentum above 0"
        )


def _build(config: Config) -> Any:
    from stagewright.model.load import build_model

    return build_model(config.model.name, config.run.seed, config.model.classes)


def _settle_model(config: Config) -> Config:
    """Fill in what the zoo knows of the model: its classes and its image size."""
    from stagewright.model.zoo import ZOO

    entry = ZOO.get(config.model.name)
    classes = config.model.classes or (entry.classes if entry else 10)
    image = config.data.image or (entry.image if entry else 32)
    return replace(config, model=replace(config.model, classes=classes), data=replace(config.data, image=image))


def make_plan_for(
    config: Config,
    chain: Chain | None,
    warn: Warn = lambda warning: None,
    costs: Callable[[Plan], Costs] | None = None,
) -> Plan:
    """The plan that the options describe; without a model, one without cuts. `costs` say what its stages take."""
    from stagewright.cluster import parse_placement
    from stagewright.plan.plan import Mode

    options = config.plan
    mode = Mode(options.mode)
    placement = parse_placement(options.placement, machines_of(config))
    require_all_machines(config, placement)
    _refuse_unused(options)
    cuts = () if chain is None or mode is Mode.DP else _cuts(config, chain, placement)
    clip = config.optimizer.clip is not None
    plan = plan_at(options, placement, cuts)
    if options.policy == "gpipe":
        plan = _with_gpipe_depths(plan)
    if mode is Mode.STALE and options.staleness is None and options.versions is None and len(plan.stages) > 1:
        plan = least_stale(config, chain, plan, warn, costs)
    if remark := idle_remark(plan):
        warn(remark)
    if clip and not plan.is_synchronous:
        warn("stages lag, so each clips its own gradient norm, not the whole model's")
    warn_of_lag(config, plan, warn)
    return _with_agreement(config, plan)


def _refuse_unused(options: PlanConfig) -> None:
    """An error for what a plan would ignore."""
    for flag, value in (("--cut", options.cut), ("--weights", options.weights)):
        if options.mode == "dp" and value is not None:
            raise ValueError(f"{flag} {value} cuts the model into stages but mode dp has one; leave it out")
    if options.policy == "gpipe" and options.depths is not None:
        raise ValueError(f"--depths {options.depths} was given with --policy gpipe, which sets them; give one")


def idle_remark(plan: Plan) -> str | None:
    """A warning where a batch has too few microbatches to give every replica one."""
    most = max(stage.replicas for stage in plan.stages)
    if plan.microbatches >= most:
        return None
    return (
        f"{plan.microbatches} microbatches for {most} replicas: some have nothing to do in each batch; "
        "raise --microbatches"
    )


def _with_agreement(config: Config, plan: Plan) -> Plan:
    """Add what stages must tell each other before an update: norms to clip by, and overflows of fp16."""
    scaled = config.run.precision == "fp16"
    most = max(stage.replicas for stage in plan.stages)
    if scaled and plan.mode == "pipedream":
        raise ValueError("precision fp16 goes with sync, stale and dp, but the mode is pipedream; use bf16")
    if scaled and plan.microbatches < most:
        raise ValueError(
            f"precision fp16 needs a microbatch for each of the {most} replicas, but a batch has {plan.microbatches}; "
            "raise --microbatches"
        )
    if len(plan.stages) == 1:
        return plan
    clip = config.optimizer.clip is not None
    return replace(plan, agree=(clip or scaled) and plan.is_synchronous, flags=scaled and not plan.is_synchronous)


def _with_gpipe_depths(plan: Plan) -> Plan:
    """All forwards of a batch before its first backward."""
    stages = tuple(replace(stage, depth=-(-plan.microbatches // stage.replicas)) for stage in plan.stages)
    return replace(plan, stages=stages)


def _cuts(config: Config, chain: Chain, placement: Placement) -> tuple[str, ...]:
    """The first unit of each later stage: named, by weights, or where the planner puts it."""
    replicas = [len(devices) for devices in placement]
    if config.plan.cut is not None and config.plan.weights is not None:
        raise ValueError(f"both --cut {config.plan.cut} and --weights {config.plan.weights} were given; give one")
    if config.plan.cut is not None:
        names = [name.strip() for name in config.plan.cut.split(",")]
        if len(names) != len(replicas) - 1:
            raise ValueError(
                f"--cut {config.plan.cut} makes {len(names) + 1} stages but the placement has {len(replicas)}; "
                "name the first unit of each later stage"
            )
        return chain.by_names(names)
    weights = stage_numbers(config.plan.weights, "weights", ":")
    if weights is None:
        return () if len(replicas) == 1 else planned_cuts(config, chain, placement)
    if len(weights) != len(replicas):
        raise ValueError(
            f"weights {config.plan.weights} name {len(weights)} stages but the placement has {len(replicas)}; "
            "give one number a stage"
        )
    return chain.by_weights(weights)


def _num_batches(config: Config, order: Any) -> int:
    if config.run.steps is not None and config.run.epochs is not None:
        raise ValueError(f"both --steps {config.run.steps} and --epochs {config.run.epochs} were given; give one")
    epochs = 1 if config.run.epochs is None else config.run.epochs
    batches: int = epochs * order.batches if config.run.steps is None else config.run.steps
    if batches < 1:
        raise ValueError(f"{batches} batches to train; give --steps or --epochs of at least 1")
    return batches


def _pauses(config: Config, batches: int, per_epoch: int) -> tuple[int, ...]:
    """Batch numbers after which to evaluate: every so many, or each epoch and the end when evaluation data is given."""
    every = config.run.eval_every
    if every is None:
        return tuple(sorted({*range(per_epoch, batches, per_epoch), batches})) if config.data.val else ()
    if every < 0:
        raise ValueError(f"--eval-every is {every}; give the batches between evaluations, or 0 for the end alone")
    if every and batches // every > _MOST_EVALUATIONS:
        raise ValueError(
            f"--eval-every {every} means {batches // every} evaluations in {batches} batches; "
            f"give at least {-(-batches // _MOST_EVALUATIONS)}"
        )
    return tuple(sorted({*(range(every, batches, every) if every else ()), batches}))


def _probe(pieces: Sequence[Piece], example: Tensor, *, context: Any, device: str, training: bool) -> Any:
    """Probe, with the user's own model errors as one line."""
    from stagewright.model.probe import probe

    try:
        return probe(pieces, example, context, training=training, device=device)
    except ValueError:
        raise
    except Exception as error:  # the model's own code ran: whatever it raises is the user's to read
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"the model can't run on input {list(example.shape)} {str(example.dtype).removeprefix('torch.')}: "
            f"{type(error).__name__}: {reason[:200]}"
        ) from error


def _require_classes(output: tuple[int, ...], *sources: tuple[str, Source]) -> None:
    for text, source in sources:
        if source.classes > output[1]:
            raise ValueError(
                f"data {text} has labels up to {source.classes - 1} but the model has {output[1]} outputs; "
                f"use --classes {source.classes}"
            )


def _evaluation(plan: Plan, study: Callable[..., Probe], example: Tensor, val: Source) -> Evaluation:
    from stagewright.runtime.job import Evaluation

    rest = len(val) % plan.samples
    whole = study(example, training=False)
    short = study(example[:rest], training=False) if rest else None
    return Evaluation(len(val), whole, short)
