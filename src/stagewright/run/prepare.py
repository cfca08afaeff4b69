"""From a configuration to a job: every default settled, the plan proven, the cuts probed. Whether this machine has the devices that a configuration asks for, and which connection suits them. What planning gives a run: the plan of a file, the cuts of the planner, the speed that a profile predicts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stagewright.config.sections import Config
from stagewright.data.order import Order
from stagewright.model.cut import Chain
from stagewright.model.load import build_model
from stagewright.model.probe import probe
from stagewright.model.zoo import ZOO
from stagewright.plan.estimate import Estimate
from stagewright.plan.make import make_plan
from stagewright.planning.build import (
    Warn,
    make_plan_for,
    warn_of_lag,
    with_agreement,
    with_plan_file,
)
from stagewright.planning.predict import predict_job
from stagewright.planning.setting import memory_setting
from stagewright.run.folder import run_folder
from stagewright.run.resume import (
    Resume,
    find_checkpoint,
    keeps_plan,
    remarks,
    require_model,
    require_start,
    resumed_plan,
    start_batch,
)
from stagewright.runtime.comm.device import gpu_of
from stagewright.runtime.job import Evaluation, Job
from stagewright.runtime.process.assemble import has_channels_last, open_data
from stagewright.runtime.stage.precision import make_precision
from stagewright.schedule.check import check

if TYPE_CHECKING:
    from torch import Tensor

    from stagewright.data.sources import Source
    from stagewright.model.cut import Piece
    from stagewright.model.probe import Probe
    from stagewright.plan.plan import Plan


_MOST_EVALUATIONS = 10**6


def prepare(config: Config, warn: Warn = lambda warning: None, *, is_host: bool = True) -> tuple[Job, int]:
    """Settle every default, plan, prove the schedule, probe the cuts, make a folder; also the batches of an epoch."""
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
        return with_agreement(config, plan)
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
    return build_model(config.model.name, config.run.seed, config.model.classes)


def _settle_model(config: Config) -> Config:
    """Fill in what the zoo knows of the model: its classes and its image size."""
    entry = ZOO.get(config.model.name)
    classes = config.model.classes or (entry.classes if entry else 10)
    image = config.data.image or (entry.image if entry else 32)
    return replace(config, model=replace(config.model, classes=classes), data=replace(config.data, image=image))


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
    rest = len(val) % plan.samples
    whole = study(example, training=False)
    short = study(example[:rest], training=False) if rest else None
    return Evaluation(len(val), whole, short)


_MPS_FOLDER = "/tmp/nvidia-mps"


@contextmanager
def within_memory(**asked: int | None) -> Iterator[None]:
    """Turn an allocation that this machine has no memory for into an error with the options that decide it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        options = ", ".join(f"--{name} {value}" for name, value in asked.items() if value is not None)
        raise ValueError(f"this machine has not the memory for {options}; give less of the largest") from error


def require_kind(config: Config) -> None:
    """An error where this machine has no device of the kind, or the kind lacks what is asked of it."""
    run = config.run
    if run.compile and run.cuda_graph == "on":
        raise ValueError("both --compile and --cuda-graph on were given; a compiled stage is not captured, so give one")
    if run.device == "cpu":
        for flag, is_set in (("--share-gpu", run.share_gpu), ("--cuda-graph on", run.cuda_graph == "on")):
            if is_set:
                raise ValueError(f"{flag} needs --device cuda, but the device is cpu; leave it out")
        if run.backend == "nccl":
            raise ValueError("--backend nccl needs --device cuda, but the device is cpu; use gloo")
    elif not torch.cuda.is_available():
        raise ValueError(f"--device cuda was asked for, but torch {torch.__version__} sees no GPU; use --device cpu")


def require_devices(config: Config, plan: Plan, warn: Callable[[str], None]) -> None:
    """An error where the placement names GPUs that are not there, or shares one where that can't be."""
    run = config.run
    if run.device != "cuda" or run.emulate:
        return
    if len({device.machine for device in plan.devices}) > 1:
        return  # each machine has its own GPUs, and its ranks say what they miss
    gpus, here = torch.cuda.device_count(), plan.devices
    beyond = [device for device in here if device.index >= gpus]
    if beyond and not run.share_gpu:
        raise ValueError(
            f"placement names device {beyond[0]} but this machine has {gpus} GPU{'s' if gpus > 1 else ''} "
            f"(0-{gpus - 1}); use --share-gpu to put several ranks on one"
        )
    ranks = Counter(gpu_of(device.index, gpus, share=run.share_gpu) for device in here)
    gpu, most = ranks.most_common(1)[0]
    if run.backend == "nccl" and run.share_gpu:
        raise ValueError(f"--backend nccl needs a GPU for each rank, but {most} ranks share GPU {gpu}; use gloo")
    if most == 1:
        return
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_FOLDER))
    if not (folder / "control").exists():
        warn(
            f"{most} ranks share GPU {gpu} and CUDA MPS is not running, so they take turns and are slower; "
            "start it with nvidia-cuda-mps-control -d"
        )


def what_fits(config: Config, plan: Plan, rank: int, room: int) -> str:
    """Advice for a rank that ran out of memory: the largest microbatch that the memory model lets into `room` bytes."""
    try:
        setting = memory_setting(config, plan)
    except ValueError:
        return "use more --microbatches, or a smaller --batch"
    for microbatches in range(plan.microbatches + 1, plan.batch + 1):
        if plan.batch % microbatches == 0:
            smaller = make_plan(
                plan.placement,
                batch=plan.batch,
                microbatches=microbatches,
                mode=plan.mode,
                versions=[stage.versions for stage in plan.stages] if plan.mode == "stale" else None,
                depths=[stage.depth for stage in plan.stages],
                cuts=plan.cuts,
            )
            if Estimate(smaller, setting).memory(rank).total <= room:
                return f"the largest microbatch that should fit is {smaller.samples}: use --microbatches {microbatches}"
    return "no microbatch should fit: give the stage fewer units, or use a device with more memory"
