"""Prepare a run: from a configuration to the `Job` that ranks execute.

`prepare` resolves the defaults, opens the data and the model, chooses a plan where the placement is auto, builds the
plan, checks its schedule, probes the cuts and makes the run folder. Whatever is wrong with the options is an error
here, before a folder exists or a rank starts.
Further down: whether this machine has the devices and the memory that the options ask for.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from stagewright.cluster.topology import ANYWHERE, Cluster
from stagewright.config.groups import Group
from stagewright.config.sections import AUTO, MOST_STEPS, Config, PlanConfig
from stagewright.data.datasets import names_images
from stagewright.data.order import Order
from stagewright.data.sources import Source, cast
from stagewright.errors import UserError, counted, did_you_mean, first_line, within_memory
from stagewright.hardware.devices import with_devices
from stagewright.hardware.host import num_cores
from stagewright.model.call import Form, Inputs
from stagewright.model.cut import Chain, Piece, Way
from stagewright.model.load import is_ours, start_model
from stagewright.model.probe import Probe
from stagewright.model.prove import SAMPLES, Proof, first_proven, prove
from stagewright.model.weights import Start, count_frozen
from stagewright.objects import load_callable, shown
from stagewright.plan.estimate import Estimate
from stagewright.plan.plan import Plan
from stagewright.planning.build import Warn, build_plan, resolved_options, warn_about_lag, with_agreement
from stagewright.planning.compare import Interval
from stagewright.planning.predict import Prediction, predict
from stagewright.planning.setting import memory_setting, planning_setting, prediction_setting
from stagewright.planning.simulate import balanced_costs
from stagewright.run.defaults import few_images, is_open, resolve_model, with_sizes, with_split
from stagewright.run.dry_run import Task, build_as_authored, dry_run, memory_options
from stagewright.run.export import rehearse
from stagewright.run.folder import WEIGHTS_FILE, new_folder
from stagewright.run.groups import resolve_groups
from stagewright.run.plan import AutoPlan, auto_plan_lines, find_plan, one_device
from stagewright.run.resume import (
    Resume,
    find_checkpoint,
    keeps_plan,
    remarks,
    require_cuts,
    require_model,
    require_start,
    resumed_plan,
    start_batch,
)
from stagewright.run.samples import bind, loss_options
from stagewright.runtime.comm.device import gpu_of
from stagewright.runtime.job import Evaluation, Job, criterion_of
from stagewright.runtime.multinode.nodes import cluster_of
from stagewright.runtime.process.assemble import has_channels_last, image_workers, open_data, open_model
from stagewright.runtime.process.object_pipe import require_portable
from stagewright.runtime.stage.optimizer import OPTIMIZERS, require_factory
from stagewright.runtime.stage.precision import make_precision
from stagewright.runtime.stage.scores import load_metrics
from stagewright.schedule.check import check

_MPS_FOLDER = "/tmp/nvidia-mps"
_MOST_EVALUATIONS = 10**6
_SHORT_LINE = 100  # characters
Note = Callable[[str], None]  # tells the user something that is no warning


def _say_nothing(line: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job in a folder that exists, and the speed that its profile predicts, if it has one."""

    job: Job
    prediction: Prediction | None
    interval: Interval | None = None  # of the predicted speed, where it was measured here


def prepare(
    config: Config,
    warn: Warn = lambda warning: None,
    progress: Note = _say_nothing,
    *,
    is_host: bool = True,
    world: int | None = None,
    is_scripted: bool = False,
    keeps_weights: bool = False,
    note: Note = _say_nothing,
) -> Prepared:
    """The job of a configuration; `world` processes have been started for it, unless it is None.

    `note` is told what was assumed and chosen. `keeps_weights`: without --export the trained weights are left in the
    run folder, where a file can hold them.
    Only the host resumes in the folder of the run it resumes; other machines always get a new one. The job of a
    script's own loop has no end.
    """
    opened = _open(config, warn, note, progress, is_scripted=is_scripted)
    config, task, resume = opened.config, opened.task, opened.resume
    cluster = cluster_of(config) if world is None else ANYWHERE  # the launcher has chosen the machines

    def attempt(config: Config, warn: Warn) -> _Planned:
        progress("making the plan and proving its cut")
        chain, resolved, plan, proof = _proven_plan(config, opened.chain, cluster, resume, warn)
        progress("trying the stages on a few samples")
        _require_ranks(resolved, plan, world, warn)
        order = Order(len(task.source), plan.batch, resolved.run.seed, resolved.data.shuffle)
        batches = MOST_STEPS if is_scripted else _num_batches(resolved, order)
        plan, start = _starting(resolved, plan, task.source, order, resume, batches, warn)
        pauses = () if is_scripted else _pauses(resolved, batches, order.batches)
        _require_checkpoints(resolved, plan, pauses)
        pieces = chain.cut(plan.cuts)
        exports = not is_scripted and _exports(resolved, chain.model, pieces, keeps_weights)
        require_optimizer(resolved, chain.model, pieces)
        training, evaluation = dry_run(resolved, task, chain, pieces, plan, order, warn, evaluates=bool(pauses))
        if resume is not None:
            require_model(resume, chain.model, training.reached)
        return _Planned(chain, resolved, plan, proof, batches, start, pauses, exports, training, evaluation)

    auto = _auto_plan(opened, world, note) if is_open(config) else None
    made, auto = _attempted(attempt, config, auto, warn)
    if auto is not None:
        _tell(note, auto)
    config, plan, chain = made.config, made.plan, made.chain
    _tell_workers(note, config, plan)
    unit, per_sample = task.source.unit
    if auto is None or auto.prediction is None:
        prediction, interval = predict_job(config, plan), None  # reports an unsuitable profile before a folder is made
    else:
        prediction, interval = auto.prediction, auto.interval
    folder = _run_folder(config, plan, resume if is_host else None)
    job = Job(
        config,
        plan,
        made.batches,
        made.pauses,
        made.training,
        made.evaluation,
        str(folder),
        task.loss,
        opened.groups,
        channels_last=has_channels_last(config, chain.model),
        draws=chain.draws,
        is_conditional=chain.is_conditional,
        way=chain.way,
        proof=made.proof,
        weights=opened.weights,
        frozen=count_frozen(chain.model),
        samples=len(task.source),
        fingerprint=task.source.fingerprint,
        start=made.start,
        resume=None if resume is None else str(resume.checkpoint.folder),
        export=(config.run.export or str(folder / WEIGHTS_FILE)) if made.exports else None,
        unit=unit,
        per_sample=per_sample,
        is_scripted=is_scripted,
    )
    return Prepared(job, prediction, interval)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A configuration with everything resolved but its plan, its data and its model."""

    config: Config
    task: Task
    chain: Chain
    weights: Start | None
    groups: tuple[Group, ...]
    resume: Resume | None
    steps: int | None  # to train; None where a script decides that


@dataclass(frozen=True, slots=True)
class _Planned:
    """A plan, and what follows from it."""

    chain: Chain
    config: Config
    plan: Plan
    proof: Proof | None
    batches: int
    start: int
    pauses: tuple[int, ...]
    exports: bool
    training: Probe
    evaluation: Evaluation | None


def _open(config: Config, warn: Warn, note: Note, progress: Note = _say_nothing, *, is_scripted: bool) -> _Opened:
    """Resolve the device, the data, the model and the batch, and open data and model."""
    config = with_devices(config)
    if not (config.run.emulate or is_scripted):  # a script makes its objects on every rank
        require_portable(config)
    load_metrics(config.run.metrics)  # reports an unknown one at once
    criterion_of(config)  # so does this
    assumed: list[str] = []
    config = resolve_model(with_split(config, assumed), warn, assumed)
    task, chain, weights = _open_task(config, progress)
    groups = resolve_groups(chain.model, config.optimizer)
    resume = find_checkpoint(config.run.resume) if config.run.resume else None
    config = replace(config, run=replace(config.run, resume=None))
    if not is_scripted:
        config = with_sizes(config, len(task.source), assumed)
    for line in _assumptions(assumed):
        note(line)
    if not is_scripted and resume is None and (advice := few_images(config, len(task.source))):
        note(advice)
    threads = config.run.threads if config.run.threads or is_open(config) else 1
    config = replace(config, run=replace(config.run, threads=threads))
    steps = None if is_scripted or config.plan.batch is None else config.run.steps
    if steps is None and not is_scripted and config.plan.batch is not None:
        steps = (config.run.epochs or 1) * (len(task.source) // config.plan.batch)
    return _Opened(config, task, chain, weights, groups, resume, steps)


def _assumptions(assumed: Sequence[str]) -> list[str]:
    """What was assumed, in as few lines as are short."""
    lines: list[str] = []
    for words in assumed:
        longer = f"{lines[-1]}; {words}" if lines else f"assumed: {words}"
        if lines and len(longer) > _SHORT_LINE:
            lines.append(f"  {words}")
        else:
            lines[-1:] = [longer]
    return lines


def _auto_plan(opened: _Opened, world: int | None, note: Note, *, always: bool = False) -> AutoPlan:
    """What auto comes to on this machine."""
    _require_one_machine(opened.config, world)
    _require_unstaged(opened.config.plan)
    if world is not None:
        return one_device(opened.config, "one process was started")
    chain = opened.chain
    units = [] if chain.way is Way.WHOLE else [name for name in chain.units if name not in chain.impossible]
    return find_plan(opened.config, chain.example.form, units, opened.steps, note, always=always)


def _attempted(
    attempt: Callable[[Config, Warn], _Planned], config: Config, auto: AutoPlan | None, warn: Warn
) -> tuple[_Planned, AutoPlan | None]:
    """What follows from the chosen plan; where it can't be trained, from that of one device."""
    if auto is None:
        return attempt(config, warn), None
    warnings: list[str] = []
    try:
        made = attempt(with_auto_plan(config, auto), warnings.append)
    except UserError as error:
        if auto.plan.world == 1:
            raise
        auto, warnings = one_device(config, f"several ranks can't train it: {first_line(error, 200)}"), []
        made = attempt(with_auto_plan(config, auto), warnings.append)
    for warning in warnings:
        warn(warning)
    return made, auto


def _tell(note: Note, auto: AutoPlan) -> None:
    for line in auto_plan_lines(auto):
        note(line)


def _tell_workers(note: Note, config: Config, plan: Plan) -> None:
    """Say in how many processes images are decoded, where that was left open."""
    is_asked = config.data.workers is not None or not names_images(config.data.source)
    if not is_asked and (count := image_workers(config, plan, plan.devices[plan.stages[0].ranks[0]].machine)):
        note(f"each rank that loads images decodes them in {count} processes (--workers 0: in threads)")


def with_auto_plan(config: Config, auto: AutoPlan) -> Config:
    """The configuration with the options that stand for a chosen plan, as its run and a resumed one have them."""
    plan = resolved_options(config.plan, auto.plan)
    return replace(config, plan=plan, run=replace(config.run, threads=auto.threads))


def explained(config: Config, warn: Warn, note: Note) -> AutoPlan:
    """The plan that a run would have, with every candidate; nothing is trained."""
    if not is_open(config):
        raise UserError(
            f"--explain shows what --placement auto chooses from, but the placement is "
            f"{config.plan.file or config.plan.placement}; leave it out"
        )
    opened = _open(config, warn, note, is_scripted=False)
    auto = _auto_plan(opened, None, note, always=True)
    _tell_workers(note, opened.config, auto.plan)
    return auto


def planned(config: Config, warn: Warn, note: Note) -> Config:
    """The configuration of a script with the plan that --placement auto comes to; the script's own loop trains it."""
    if not is_open(config):
        return config
    opened = _open(config, warn, note, is_scripted=True)
    auto = _auto_plan(opened, None, note)
    _tell(note, auto)
    resume = config.run.resume  # which opening has taken out
    found = with_auto_plan(opened.config, auto)
    return replace(found, run=replace(found.run, resume=resume))


def _require_unstaged(plan: PlanConfig) -> None:
    """An error for options about stages, which auto chooses."""
    asked = {"cut": plan.cut, "shares": plan.shares, "versions": plan.versions, "depths": plan.depths}
    asked["policy"] = plan.policy if plan.policy != PlanConfig().policy else None
    for name, value in asked.items():
        if value is not None:
            raise UserError(
                f"--{name} {value} needs a placement, and --placement is auto; give the devices of each stage as "
                "well, such as --placement 0:0.0:1"
            )


def _require_one_machine(config: Config, world: int | None) -> None:
    """An error where auto would have to plan for other machines than this one."""
    if config.nodes.list is not None:
        raise UserError(
            f"--placement auto plans for this machine, but --nodes names {config.nodes.list}; give the devices of each "
            "stage: --placement 0:0-3.1:0-3"
        )
    if world is not None and world > 1:
        raise UserError(
            f"--placement auto starts its own ranks, but {world} processes were started; give the devices of each "
            f"stage, such as --placement 0:0-{world - 1}"
        )


def _open_task(config: Config, progress: Note) -> tuple[Task, Chain, Start | None]:
    """Open the data and build the model, traced on a few samples; with where its first weights came from."""
    precision = make_precision(config.run.precision, config.run.device)
    with within_memory(**memory_options(config), samples=config.data.samples):
        progress(f"opening {config.data.source}")
        source = open_data(config, config.data.source)
        val = open_data(config, config.data.val) if config.data.val else source
        progress(f"building and tracing {shown(config.model.name)}")
        model, weights = start_model(
            config.model.name,
            config.run.seed,
            config.model.classes,
            precision.weights,
            image=config.data.image,
            init=None if config.run.resume else config.model.init,  # a checkpoint has all weights
            frozen=config.model.freeze,
        )
        few = cast(source.batch(np.arange(SAMPLES) % len(source)), source.targets, precision.weights)
        binding = bind(model, tuple(few), source, config)
        task = Task(source, val, binding, loss_options(config, source, val, few), precision)
        way = Way.WHOLE if _is_uncut(config) else None
        return task, _chain(config, model, binding.given(few).inputs, way), weights


def _is_uncut(config: Config) -> bool:
    """Whether one of our own models is not cut, which the options tell before there is a plan."""
    plan = config.plan
    options = (plan.file, plan.cut, plan.shares, plan.profile, config.run.resume)
    return (
        is_ours(config.model.name)
        and plan.placement != AUTO
        and len(plan.placement.split(".")) == 1
        and all(option is None for option in options)
    )


def require_optimizer(config: Config, model: nn.Module, pieces: Sequence[Piece]) -> None:
    """An error where a user's optimizer can't train a model in these pieces."""
    if ":" not in config.optimizer.name:
        if config.optimizer.name not in OPTIMIZERS:
            raise UserError(
                f"--optimizer '{config.optimizer.name}' is unknown (a factory is package.module:name); "
                f"{did_you_mean(config.optimizer.name, OPTIMIZERS)}"
            )
        return
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    held = [[name for name, _ in piece.training.named_parameters() if name in trained] for piece in pieces]
    factory = load_callable(config.optimizer.name, "optimizer")
    require_factory(config.optimizer, factory, trained, [names for names in held if names])


def _require_ranks(config: Config, plan: Plan, world: int | None, warn: Warn) -> None:
    """An error where the plan's ranks can't run, or could wait for each other for ever."""
    if world is not None and plan.world != world:
        raise UserError(
            f"the plan has {counted(plan.world, 'rank')} but {counted(world, 'process', 'es')} were started; "
            "start one process per rank, or change --placement"
        )
    require_devices(config, plan, warn)
    if world is None:
        _warn_about_cores(config, plan, warn)
    check(plan.starting_at(0))


def _starting(
    config: Config, plan: Plan, source: Source, order: Order, resume: Resume | None, batches: int, warn: Warn
) -> tuple[Plan, int]:
    """The plan, from the batch that it starts at: 0, or where the run that is resumed has stopped."""
    if resume is None:
        return plan, 0
    start = start_batch(resume, order, source.fingerprint)
    best = resume.checkpoint.manifest.best_by(criterion_of(config))
    require_start(plan, start, batches, best, config.run.early_stop)
    if not plan.computes_as(resume.checkpoint.manifest.plan):
        plan = plan.starting_at(start)
    for remark in remarks(config, resume, plan):
        warn(remark)
    return plan, start


def predict_job(config: Config, plan: Plan) -> Prediction | None:
    """The speed that the profile of a configuration predicts; None where it has none."""
    setting = prediction_setting(config, plan)
    return None if setting is None else predict(plan, setting)


def _chain(config: Config, model: nn.Module, example: Inputs, way: Way | None = None) -> Chain:
    precision = make_precision(config.run.precision, config.run.device)
    build = partial(open_model, config)
    return Chain(
        model,
        example,
        context=precision.forward_context,
        device=config.run.device,
        way=way,
        build=build,
        is_plain=is_ours(config.model.name),
    )


def _proven_plan(
    config: Config, chain: Chain, cluster: Cluster, resume: Resume | None, warn: Warn
) -> tuple[Chain, Config, Plan, Proof | None]:
    """The plan to train, by the first way of cutting the model whose pieces are proven to compute what it does."""

    def attempt(chain: Chain) -> tuple[Chain, Config, Plan, Proof | None]:
        resolved, plan = _plan_for(config, chain, cluster, resume, warn)
        if not plan.cuts or config.run.unproven:
            return chain, resolved, plan, None
        identity = f"{resolved.model.name} {resolved.model.classes}"
        return chain, resolved, plan, prove(partial(build_as_authored, resolved), chain, plan.cuts, identity)

    def chain_by(way: Way | None) -> Chain:
        return chain if way is None else _chain(config, chain.model, chain.example, way)

    return first_proven(chain_by, attempt)


def _plan_for(config: Config, chain: Chain, cluster: Cluster, resume: Resume | None, warn: Warn) -> tuple[Config, Plan]:
    """The plan to train, and the configuration with the options that a plan file stands for.

    On resume, the plan is the checkpoint's own where the options have not changed.
    """
    if resume is not None and keeps_plan(config, resume):
        plan = resume.checkpoint.manifest.plan
        if chain.way is not Way.WHOLE:  # else the model can't be cut at all, which is said where it is
            require_cuts(resume, plan, chain.units)
    else:
        plan = build_plan(
            config.plan,
            cluster,
            chain,
            partial(planning_setting, config, chain),
            costs=balanced_costs,
            never_waits=config.run.emulate,  # emulated ranks take turns
            warn=warn,
        )
        if config.plan.file is not None:
            config = replace(config, plan=resolved_options(config.plan, plan))
        config = replace(config, plan=replace(config.plan, mode=plan.mode.value, batch=plan.batch))
        _require_all_machines(config, cluster, plan)
        plan = plan if resume is None else resumed_plan(plan, resume)
    warn_about_lag(config, plan, warn)
    return config, with_agreement(config, plan)


def _require_all_machines(config: Config, cluster: Cluster, plan: Plan) -> None:
    """Raise if a machine of --nodes has no stage: it would have nothing to do."""
    used = {device.machine for device in plan.devices}
    idle = [machine for machine in range(len(cluster.machines)) if machine not in used]
    if config.nodes.list is not None and idle:
        raise UserError(
            f"--nodes names machine {idle[0]} but placement {config.plan.placement} has no device of it; "
            f"place a stage on {idle[0]}:0, or leave the machine out"
        )


def _num_batches(config: Config, order: Order) -> int:
    """How many batches to train, from --steps or --epochs."""
    epochs = 1 if config.run.epochs is None else config.run.epochs
    batches = epochs * order.batches if config.run.steps is None else config.run.steps
    if batches < 1:
        raise UserError(f"there are {batches} batches to train; give --steps or --epochs of at least 1")
    return batches


def _pauses(config: Config, batches: int, per_epoch: int) -> tuple[int, ...]:
    """The batch numbers after which to evaluate: every --eval-every, or with --val each epoch; and at the end."""
    every = config.run.eval_every
    if every is None:
        return tuple(sorted({*range(per_epoch, batches, per_epoch), batches})) if config.data.val else ()
    if every < 0:
        raise UserError(
            f"--eval-every is {every}; give the batches between evaluations, or 0 to evaluate only at the end"
        )
    if every and batches // every > _MOST_EVALUATIONS:
        raise UserError(
            f"--eval-every {every} means {batches // every} evaluations in {batches} batches; "
            f"give at least {-(-batches // _MOST_EVALUATIONS)}"
        )
    return tuple(sorted({*(range(every, batches, every) if every else ()), batches}))


def _require_checkpoints(config: Config, plan: Plan, pauses: Sequence[int]) -> None:
    """An error where --best could not save what an evaluation has found: in the middle of a stage's round."""
    bad = [batch for batch in pauses if batch % plan.pause_step]
    if config.checkpoint.best is not None and bad:
        raise UserError(
            f"--best needs a checkpoint at every evaluation, but that after step {bad[0]} is not at a multiple of "
            f"{plan.pause_step}, where rounds of mode {plan.mode} end together; change --eval-every and --steps"
        )


def _run_folder(config: Config, plan: Plan, resume: Resume | None) -> Path:
    """A new folder, or on resume from a run's newest checkpoint with the same batch size, that run's folder."""
    if resume is not None and resume.is_newest and resume.checkpoint.manifest.plan.batch == plan.batch:
        return resume.run
    model = Path(config.model.name.rpartition(":")[2]).name  # hf: may have a path
    return new_folder(config.run.runs, f"{model}-{plan.mode}-{plan.shape}")


def _exports(config: Config, model: nn.Module, pieces: Sequence[Piece], keeps_weights: bool) -> bool:
    """Whether trained weights are written: to --export, or where they are kept and can be, to the run folder."""
    if config.run.export:
        rehearse(model, pieces, Path(config.run.export))
        return True
    if not keeps_weights:
        return False
    try:
        rehearse(model, pieces, Path(config.run.runs) / WEIGHTS_FILE)
    except UserError:
        return False
    return True


def require_devices(config: Config, plan: Plan, warn: Callable[[str], None]) -> None:
    """An error where the placement names GPUs that this machine lacks, or shares one that can't be shared."""
    run = config.run
    if run.device != "cuda" or run.emulate:
        return
    if len({device.machine for device in plan.devices}) > 1:
        return  # each machine has its own GPUs; its ranks report those it lacks
    gpus, here = torch.cuda.device_count(), plan.devices
    beyond = [device for device in here if device.index >= gpus]
    if beyond and not run.share_gpu:
        raise UserError(
            f"placement names device {beyond[0]} but this machine has {counted(gpus, 'GPU')} "
            f"(0-{gpus - 1}); use --share-gpu to put several ranks on one"
        )
    ranks = Counter(gpu_of(device.index, gpus, share=run.share_gpu) for device in here)
    gpu, most = ranks.most_common(1)[0]
    if most == 1:
        return
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_FOLDER))
    if not (folder / "control").exists():
        warn(
            f"{most} ranks share GPU {gpu} and CUDA MPS is not running, so they take turns and are slower; "
            "start it with nvidia-cuda-mps-control -d"
        )


def _warn_about_cores(config: Config, plan: Plan, warn: Warn) -> None:
    """Warn where the CPU ranks of this machine have more threads than it has cores."""
    run, cores, threads = config.run, num_cores(), config.run.threads or 1
    is_one_machine = len({device.machine for device in plan.devices}) == 1
    if run.device == "cpu" and not run.emulate and is_one_machine and plan.world * threads > cores:
        each = f" with {threads} threads each" if threads > 1 else ""
        warn(
            f"{counted(plan.world, 'CPU rank')}{each} share {counted(cores, 'core')} and take turns, so their speed "
            "says little; use fewer ranks, or --emulate to try a plan"
        )


def memory_advice(config: Config, plan: Plan, rank: int, capacity: int, form: Form | None = None) -> str:
    """Advice for a rank that ran out of memory: the largest microbatch that should fit into `capacity` bytes."""
    try:
        setting = memory_setting(config, plan, form)
    except UserError:
        return "use more --microbatches, or a smaller --batch"
    for microbatches in range(plan.microbatches + 1, plan.batch + 1):
        if plan.batch % microbatches == 0:
            smaller = plan.with_microbatches(microbatches)
            if Estimate(smaller, setting).memory(rank).total <= capacity:
                return f"the largest microbatch that should fit is {smaller.samples}: use --microbatches {microbatches}"
    return "no microbatch should fit: give the stage fewer units, or use a device with more memory"
