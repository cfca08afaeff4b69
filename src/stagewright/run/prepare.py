"""Prepare a run: from a configuration to the `Job` that ranks execute.

open (`run.opening`)   defaults are resolved, data and model opened; where the placement is auto, one is chosen
plan                   the options become a plan, whose cut is proven
try                    its stages run once, without training (`run.dry_run`)
job                    everything that ranks need, in a new folder

Whatever is wrong with the options is an error here, before a folder exists or a rank starts.
Further down: whether this machine has the devices and the memory that the options ask for.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from stagewright.cluster.placement import format_devices
from stagewright.cluster.topology import ANYWHERE, Cluster
from stagewright.config.fits import Facts, check_fits
from stagewright.config.optimizers import OPTIMIZERS
from stagewright.config.sections import MOST_STEPS, Config
from stagewright.config.sources import names_images
from stagewright.config.toml import as_toml
from stagewright.data.order import Order
from stagewright.errors import UserError, counted, did_you_mean, first_line, printable
from stagewright.hardware.environment import read_environment
from stagewright.hardware.host import num_cores
from stagewright.model.call import Form
from stagewright.model.chain import Chain, Way
from stagewright.model.networks.weights import count_frozen
from stagewright.model.pieces import Piece
from stagewright.model.prove import Proof, first_proven, prove
from stagewright.objects import MODULE, load_callable
from stagewright.plan.estimate import Estimate
from stagewright.plan.plan import Plan
from stagewright.planning.build import build_plan, resolved_options, warn_about_lag, with_agreement
from stagewright.planning.compare import Interval
from stagewright.planning.predict import Prediction, predict
from stagewright.planning.question import Question
from stagewright.planning.run_setting import memory_setting, planning_setting, prediction_setting
from stagewright.planning.simulate import balanced_costs
from stagewright.run.defaults import is_open
from stagewright.run.dry_run import dry_run
from stagewright.run.export import rehearse
from stagewright.run.folder import PLAN_FILE, PROOF_FILE, WEIGHTS_FILE, new_folder
from stagewright.run.opening import Launch, Opening, open_run
from stagewright.run.plan import AutoPlan, auto_plan_lines, find_plan, one_device
from stagewright.runtime.comm.device import gpu_of
from stagewright.runtime.faults import append_log
from stagewright.runtime.job import Job
from stagewright.runtime.multinode.nodes import cluster_of
from stagewright.runtime.process.assemble import has_channels_last, image_workers
from stagewright.runtime.stage.optimizer import require_factory
from stagewright.schedule.check import check
from stagewright.voice import SILENT, Voice

_MPS_FOLDER = "/tmp/nvidia-mps"


@dataclass(slots=True)
class Prepared:
    """A job in a folder that exists, and the speed that its profile predicts, if it has one."""

    job: Job
    prediction: Prediction | None = None
    interval: Interval | None = None  # of the predicted speed, where it was measured here
    chain: Chain | None = None  # the model, for ranks of this process

    def take_chain(self) -> Chain | None:
        """The model as it was opened, of which nothing is kept here: it may be large."""
        chain, self.chain = self.chain, None
        return chain


def prepare(
    given: Config | Opening,
    voice: Voice = SILENT,
    launch: Launch | None = None,
) -> Prepared:
    """The job of a configuration, or of one that is open already; no launch is one by a command, on one machine."""
    launch = launch or Launch()
    opening = replace(given, launch=launch) if isinstance(given, Opening) else open_run(given, voice, launch)
    auto = _auto_plan(opening, voice) if is_open(opening.config) else None
    if auto is None:
        made = _tried(opening, voice)
    else:
        made, auto = _tried_auto(opening, auto, voice)
    job = made.job
    _tell_workers(voice, job.config, job.plan)
    if auto is None or auto.prediction is None:
        prediction, interval = predict_job(job.config, job.plan), None  # reports an unsuitable profile before a folder
    else:
        prediction, interval = auto.prediction, auto.interval
    resume = opening.resume if launch.is_host else None
    if resume is not None and resume.is_newest and resume.checkpoint.manifest.plan.batch == job.plan.batch:
        folder = resume.run
    else:
        model = Path(job.config.model.name.rpartition(":")[2]).name  # hf: may have a path
        folder = new_folder(job.config.run.runs, f"{model}-{job.plan.mode}-{job.plan.shape}")
    export = None if job.export is None else job.config.run.export or str(folder / WEIGHTS_FILE)
    job = replace(job, folder=str(folder), export=export)
    return replace(made, job=job, prediction=prediction, interval=interval)


def explained(config: Config, voice: Voice) -> AutoPlan:
    """The plan that a run would have, with every candidate; nothing is trained."""
    if not is_open(config):
        raise UserError(
            f"--explain shows what --placement auto chooses from, but the placement is "
            f"{config.plan.file or config.plan.placement}; leave it out"
        )
    opening = open_run(config, voice)
    auto = _auto_plan(opening, voice, always=True)
    _tell_workers(voice, opening.config, auto.plan)
    return auto


def planned(config: Config, voice: Voice) -> Config | Opening:
    """A script's run with the plan that --placement auto comes to; the script's own loop trains it.

    A run that is resumed is opened again, once its folder is locked.
    """
    if not is_open(config):
        return config
    opening = open_run(config, voice, Launch(is_scripted=True))
    opening = _by(opening, _told(_auto_plan(opening, voice), voice))
    found = opening.config
    return opening if opening.resume is None else replace(found, run=replace(found.run, resume=config.run.resume))


# --- Auto -------------------------------------------------------------------------------------------------------------


def _auto_plan(opening: Opening, voice: Voice, *, always: bool = False) -> AutoPlan:
    """What auto comes to on this machine."""
    check_fits(Facts(opening.config, opening.launch.world))
    if opening.launch.world is not None:
        return one_device(opening.config, "one process was started")
    chain = opening.chain
    units = [] if chain.way is Way.WHOLE else [name for name in chain.units if name not in chain.impossible]
    question = Question(opening.config, form=chain.example.form)
    return find_plan(question, units, opening.steps, voice, always=always)


def _tried_auto(opening: Opening, auto: AutoPlan, voice: Voice) -> tuple[Prepared, AutoPlan]:
    """The job by the chosen plan; where that can't be trained, by that of one device."""
    warnings: list[str] = []
    held = replace(voice, warn=warnings.append)  # of a plan that is given up nothing is said
    try:
        made = _tried(_by(opening, auto), held)
    except UserError as error:
        if auto.plan.world == 1:
            raise
        warnings.clear()
        auto = one_device(opening.config, f"several ranks can't train it: {first_line(error, 200)}")
        made = _tried(_by(opening, auto), held)
    for warning in warnings:
        voice.warn(warning)
    return made, _told(auto, voice)


def _by(opening: Opening, auto: AutoPlan) -> Opening:
    """The opening with the options that stand for a chosen plan, as its run and a resumed one have them."""
    plan = resolved_options(opening.config.plan, auto.plan)
    run = replace(opening.config.run, threads=auto.threads)
    return replace(opening, config=replace(opening.config, plan=plan, run=run))


def _told(auto: AutoPlan, voice: Voice) -> AutoPlan:
    for line in auto_plan_lines(auto):
        voice.note(line)
    return auto


def _tell_workers(voice: Voice, config: Config, plan: Plan) -> None:
    """Say in how many processes images are decoded, where that was left open."""
    is_asked = config.data.workers is not None or not names_images(config.data.source)
    if not is_asked and (count := image_workers(config, plan, plan.devices[plan.stages[0].ranks[0]].machine)):
        voice.note(f"each rank that loads images decodes them in {count} processes (--workers 0: in threads)")


# --- Plan and try -----------------------------------------------------------------------------------------------------


def _tried(opening: Opening, voice: Voice) -> Prepared:
    """The job of an opening but for its folder: planned and proven, and its stages run once."""
    voice.progress("making the plan and proving its cut")
    launch = opening.launch
    cluster = cluster_of(opening.config) if launch.world is None else ANYWHERE  # the launcher has chosen the machines
    opening, plan, proof = first_proven(opening.chain, partial(_proven, opening, cluster, voice))
    voice.progress("trying the stages on a few samples")
    config, chain, order = opening.config, opening.chain, opening.order(plan)
    require_devices(config, plan, voice)
    if launch.world is None:
        _warn_about_cores(config, plan, voice)
    batches, pauses = (MOST_STEPS, ()) if launch.is_scripted else _length(config, order)
    facts = Facts(
        config,
        launch.world,
        mode=plan.mode,
        ranks=plan.world,
        idle=_idle_machine(config, plan),
        microbatches=plan.microbatches,
        replicas=plan.widest,
        pause_step=plan.pause_step,
        pauses=pauses,
        batches=batches,
    )
    check_fits(facts)
    check(plan.starting_at(0))
    pieces = chain.cut(plan.cuts)
    exports = not launch.is_scripted and _exports(config, chain.model, pieces, launch.keeps_weights)
    require_optimizer(config, chain.model, pieces)
    training, evaluation = dry_run(opening, plan, pieces, facts, voice)
    job = Job(
        config,
        plan,
        batches,
        pauses,
        training,
        evaluation,
        folder="",
        loss=opening.loss,
        groups=opening.groups,
        channels_last=has_channels_last(config, chain.model),
        draws=chain.draws,
        is_conditional=chain.is_conditional,
        way=chain.way,
        proof=proof,
        weights=opening.weights,
        frozen=count_frozen(chain.model),
        samples=len(opening.source),
        fingerprint=opening.source.fingerprint,
        export="" if exports else None,
        unit=opening.source.unit.name,
        per_sample=opening.source.unit.per_sample,
        is_scripted=launch.is_scripted,
    )
    job = job if opening.resume is None else opening.resume.apply(job, facts, chain.model, voice)
    return Prepared(job, chain=chain if config.run.emulate else None)


def _proven(opening: Opening, cluster: Cluster, voice: Voice, chain: Chain) -> tuple[Opening, Plan, Proof | None]:
    """The plan to train a chain by, and the proof of its cut; the opening has what it was resolved to."""
    config, plan = _planned(opening, cluster, chain, voice)
    opening = replace(opening, config=config, chain=chain)
    if not plan.cuts or config.run.unproven:
        return opening, plan, None
    return opening, plan, prove(opening.build, chain, plan.cuts, f"{config.model.name} {config.model.classes}")


def _planned(opening: Opening, cluster: Cluster, chain: Chain, voice: Voice) -> tuple[Config, Plan]:
    """The plan to train, and the configuration with the options that a plan file stands for.

    On resume, the plan is the checkpoint's own where the options have not changed.
    """
    config, resume = opening.config, opening.resume
    plan = None if resume is None else resume.kept_plan(config, chain)
    if plan is None:
        plan = build_plan(
            config.plan,
            cluster,
            chain,
            partial(planning_setting, config, chain),
            costs=balanced_costs,
            never_waits=config.run.emulate,  # emulated ranks take turns
            voice=voice,
        )
        if config.plan.file is not None:
            config = replace(config, plan=resolved_options(config.plan, plan))
        config = replace(config, plan=replace(config.plan, mode=plan.mode, batch=plan.batch))
    warn_about_lag(config, plan, voice)
    return config, with_agreement(config, plan)


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


def predict_job(config: Config, plan: Plan) -> Prediction | None:
    """The speed that the profile of a configuration predicts; None where it has none."""
    setting = prediction_setting(config, plan)
    return None if setting is None else predict(plan, setting)


def _length(config: Config, order: Order) -> tuple[int, tuple[int, ...]]:
    """How many batches to train, and those after which to evaluate.

    That is every --eval-every, or with --val each epoch, and at the end.
    """
    run = config.run
    batches = order.batches * (1 if run.epochs is None else run.epochs) if run.steps is None else run.steps
    check_fits(Facts(config, batches=batches))  # which are not too many to list
    every = (order.batches if config.data.val else None) if run.eval_every is None else run.eval_every
    if every is None:
        return batches, ()
    return batches, (*(range(every, batches, every) if every else ()), batches)


def _idle_machine(config: Config, plan: Plan) -> int | None:
    """A machine of --nodes without a stage: it would have nothing to do."""
    used = {device.machine for device in plan.devices}
    named = range(0 if config.nodes.list is None else len(cluster_of(config).machines))
    return next((machine for machine in named if machine not in used), None)


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


# --- What a folder says of its run ------------------------------------------------------------------------------------


def write_start(job: Job, warnings: Sequence[str] = ()) -> None:
    """Write the files that describe a run before it starts: configuration, plan, environment, warnings so far."""
    folder = Path(job.folder)
    for name in ("summary.json", "trace.json"):  # of the run that this one resumes
        (folder / name).unlink(missing_ok=True)
    job.save(folder / "job.json")
    (folder / "config.toml").write_text(as_toml(job.config))
    (folder / PLAN_FILE).write_text(json.dumps(job.plan.describe(), indent=1))
    known = {"command": sys.argv} | read_environment().describe()
    (folder / "env.json").write_text(json.dumps(known, indent=1))
    (folder / PROOF_FILE).unlink(missing_ok=True)
    if job.proof is not None:
        (folder / PROOF_FILE).write_text(json.dumps(asdict(job.proof)))
    lines = (*(f"warning: {warning}" for warning in warnings), *_told_of(job))
    append_log(folder, "".join(f"{printable(line)}\n" for line in lines))


def headline(job: Job) -> tuple[str, ...]:
    """What is about to run, in two lines, and what is proven of it."""
    plan = job.plan
    parts = []
    for stage, devices in zip(plan.stages, plan.placement, strict=True):
        first = f" from {plan.cuts[stage.index - 1]}" if stage.index else ""
        lag = f", lag {stage.versions - 1}" if stage.versions > 1 else ""
        parts.append(f"stage {stage.index} on {format_devices(devices)}{first}{lag}")
    microbatches, steps = counted(plan.microbatches, "microbatch", "es"), counted(job.batches, "step")
    return (
        f"{job.config.model.name.removeprefix(MODULE)}, mode {plan.mode}: {'; '.join(parts)}",
        f"batch {plan.batch} in {microbatches}, {'' if job.is_scripted else f'{steps}, '}files in {job.folder}",
        *_told_of(job),
    )


def _told_of(job: Job) -> tuple[str, ...]:
    """Where the first weights came from, if they are not new, how many are not trained, and what is proven of a cut."""
    lines = [] if job.weights is None else [f"starts from {job.weights}", *job.weights.remarks]
    if job.frozen:
        lines.append(f"frozen: {job.frozen:,} parameters")
    if job.plan.cuts:
        unproven = "not proven: the stages may compute what the model does not"
        lines.append(f"proven: {job.proof}" if job.proof else unproven)
    return tuple(lines)


# --- Whether this machine has what it takes ---------------------------------------------------------------------------


def require_devices(config: Config, plan: Plan, voice: Voice) -> None:
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
        voice.warn(
            f"{most} ranks share GPU {gpu} and CUDA MPS is not running, so they take turns and are slower; "
            "start it with nvidia-cuda-mps-control -d"
        )


def _warn_about_cores(config: Config, plan: Plan, voice: Voice) -> None:
    """Warn where the CPU ranks of this machine have more threads than it has cores."""
    run, cores, threads = config.run, num_cores(), config.run.threads or 1
    is_one_machine = len({device.machine for device in plan.devices}) == 1
    if run.device == "cpu" and not run.emulate and is_one_machine and plan.world * threads > cores:
        each = f" with {threads} threads each" if threads > 1 else ""
        voice.warn(
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
            if Estimate(smaller, setting).memories[rank].total <= capacity:
                return f"the largest microbatch that should fit is {smaller.samples}: use --microbatches {microbatches}"
    return "no microbatch should fit: give the stage fewer units, or use a device with more memory"
