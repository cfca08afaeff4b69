"""Builds one rank's worker from the job: its pieces of the model, its channels and its share of the data."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from stagewright.config.optimizers import sees_tensors
from stagewright.config.sections import Config
from stagewright.config.sources import SourceOptions, names_images
from stagewright.data.loader import Loader, make_loaders
from stagewright.data.on_device import require_cacheable, torchcodec_decoder
from stagewright.data.order import EvaluationSampler, Order, ReplicaSlice, TrainingSampler
from stagewright.data.pool import Decode, LoaderOptions
from stagewright.data.sources import ImageSource, Source, open_source
from stagewright.events import Emit, Replaced, Skipped
from stagewright.model.call import Inputs
from stagewright.model.chain import Chain
from stagewright.model.load import build_model, convert, find_entry, is_ours, make_deterministic
from stagewright.model.loss import TARGETS, Loss
from stagewright.model.networks.weights import freeze, load_weights, require_same
from stagewright.model.pieces import Piece, whole_piece
from stagewright.model.probe import Probe
from stagewright.objects import is_given, load_callable, load_object
from stagewright.plan.plan import Plan, Stage
from stagewright.runtime.comm.boundary import Exchange, FormatOptions
from stagewright.runtime.comm.channel import Inbox, Network, Outbox, channels_of
from stagewright.runtime.comm.device import Cpu, Device
from stagewright.runtime.comm.transport import Collective
from stagewright.runtime.job import Job
from stagewright.runtime.precision import precision_of
from stagewright.runtime.stage.batch_norm import Statistics
from stagewright.runtime.stage.compute import ComputeOptions
from stagewright.runtime.stage.gradients import GradientBuffers, GradientOptions
from stagewright.runtime.stage.loss_scaling import ScalingOptions, make_loss_scaling
from stagewright.runtime.stage.optimizer import Hyperparameters, ScheduledRates, Weights, make_optimizer
from stagewright.runtime.stage.recorder import Recorder
from stagewright.runtime.stage.replica import Replica, StageOptions
from stagewright.runtime.stage.ties import connect_ties, places_of
from stagewright.runtime.stage.versions import MovingAverage, VersionRing
from stagewright.runtime.stage.worker import Worker

_THREADS = 2  # that decode, where no processes do
_LEAST_CORES, _MOST_WORKERS = 4, 16  # of a rank that decodes in processes by default: its cores, its processes
_SMALL = 64  # pixels: smaller images are decoded so quickly that threads will do


def open_data(config: Config, text: str) -> Source:
    """Open a data source of a configuration whose number of classes and image size are resolved."""
    data = config.data
    assert config.model.classes is not None and data.image is not None
    if Decode(data.decode) is Decode.GPU and names_images(text):
        torchcodec_decoder(torch.device(config.run.device))  # an error where torchcodec is missing
    entry = find_entry(config.model.name) if text == "synthetic" else None
    options = SourceOptions(
        data.image,
        data.crop,
        data.normalize,
        data.jitter,
        data.cutout,
        data.class_names,
        data.limit if text == data.source else None,
        data.context,
        config.loss.ignore_index,
        data.samples,
        config.model.classes,
        config.run.seed,
        data.learnable,
        3 if entry is None else entry.channels,  # of the images that the model takes, as far as its name tells
    )
    source = open_source(text, options)
    if Decode(data.decode) is Decode.ONCE and isinstance(source, ImageSource):
        require_cacheable(source)
    return source


@dataclass(frozen=True, slots=True)
class ScriptParts:
    """What a script's own loop has to do with a worker."""

    hyperparameters: Callable[[Stage], Hyperparameters] | None = None  # of its optimizer; None: of the options
    keeps_model: bool = False  # its model object is trained itself, where it is not cut


def open_model(
    config: Config, device: torch.device | None = None, *, keeps_model: bool = False, init: str | None = None
) -> nn.Module:
    """The author's model in the run's precision, with new weights or those of `init`.

    `keeps_model`: a script's own object.
    """
    precision = precision_of(config)
    own = load_object(config.model.name, "model") if keeps_model and is_given(config.model.name) else None
    if isinstance(own, nn.Module):
        if init is not None:
            load_weights(own, init)
        if config.model.freeze is not None:
            freeze(own, config.model.freeze)
        model = convert(own, precision.weights)
    else:
        model = build_model(
            config.model.name,
            config.run.seed,
            config.model.classes,
            precision.weights,
            image=config.data.image,
            init=init,
            frozen=config.model.freeze,
        )
    if config.run.deterministic:
        model = make_deterministic(model)
    if device is not None:
        order = torch.channels_last if has_channels_last(config, model) else torch.preserve_format
        model = model.to(device=device, memory_format=order)  # type: ignore[call-overload]
    return model.train()


def open_pieces(
    job: Job, device: torch.device | None = None, *, keeps_model: bool = False, init: str | None = None
) -> tuple[Piece, ...]:
    """The pieces of a job's model with their first weights; it is traced on samples like those that it takes.

    `keeps_model`: the only piece of an uncut model is the script's own object, not a copy.
    """
    config, cuts, names = job.config, job.plan.cuts, job.training.names
    model = open_model(config, device, keeps_model=keeps_model and not cuts, init=init)
    example = Inputs(tuple(value.empty() for value in job.training.inputs), names)
    if not cuts:
        return (whole_piece(model, example.parameters_of(model), names),)
    context, build = precision_of(config).forward_context, partial(open_model, config, device)
    kind = "cpu" if device is None else device.type
    return Chain(model, example, context=context, device=kind, way=job.way, build=build).cut(cuts)


def copied_model(chain: Chain) -> nn.Module | None:
    """A copy of the author's model; None where it can't be copied, or analysing it has changed it."""
    if chain.leaks:
        return None
    try:
        return copy.deepcopy(chain.model).train()
    except Exception:  # the author's code, or an attribute without a copy
        return None


def has_channels_last(config: Config, model: nn.Module) -> bool:
    """Whether images are stored with channels last, which makes convolutions on GPUs faster."""
    is_convolutional = any(isinstance(module, nn.Conv2d) for module in model.modules())
    return config.run.device == "cuda" and config.run.channels_last and is_convolutional


def assemble(
    job: Job,
    rank: int,
    network: Network,
    emit: Emit,
    recorder: Recorder | None = None,
    device: Device | None = None,
    script: ScriptParts | None = None,
    chain: Chain | None = None,
) -> Worker:
    """One rank's worker, connected and ready to run; of a script's own loop, without loaders.

    `chain`: the model of a run on the CPU as this process has opened it; of other ranks too, so each gets a copy.
    """
    plan, config = job.plan, job.config
    device = device or Cpu()
    keeps = script is not None and script.keeps_model
    init = config.model.init if job.start == 0 else None  # a checkpoint has all weights
    if init is not None and job.weights is not None:
        require_same(init, job.weights.digest)
    if chain is not None and not keeps and device.device.type == "cpu" and (model := copied_model(chain)) is not None:
        pieces = chain.on(model, partial(open_model, config)).cut(plan.cuts)
    else:
        pieces = open_pieces(job, device.device, keeps_model=keeps, init=init)
    exchanges = _connect(plan, rank, network)
    collectives = {
        stage.index: network.collective(f"reduce/{stage.index}", stage.ranks) for stage in plan.stages_of(rank)
    }
    everyone = tuple(range(plan.world)) if plan.agree else (rank,)
    replicas = {
        index: _replica(job, rank, plan.stages[index], pieces[index], exchanges[index], collective, device, script)
        for index, collective in collectives.items()
    }

    def skipped(stage: int, update: int) -> None:
        if plan.stages[stage].ranks[0] == rank:
            emit(Skipped(stage, update))

    ties = connect_ties(plan, rank, replicas, network.collective, is_conditional=job.is_conditional)
    loss_scaling = make_loss_scaling(plan, rank, network.store, _scaling_options(job), skipped)
    world = network.collective("agree", everyone)
    worker = Worker(job, rank, replicas, world, loss_scaling, network.store, emit, recorder, ties)
    if rank in plan.stages[0].ranks and script is None:
        worker.loader, worker.evaluation_loader = _loaders(job, rank, emit, device.device)
    return worker


def _scaling_options(job: Job) -> ScalingOptions | None:
    config = job.config.run
    if not precision_of(job.config).is_scaled:
        return None
    return ScalingOptions(config.loss_scale, config.growth_interval, job.plan.decision_delay)


def image_workers(config: Config, plan: Plan, machine: int, cores: int | None = None) -> int:
    """The processes in which each rank of the first stage decodes images on a machine, of which this may be one.

    `cores`: that this process may use, which those ranks share.
    """
    data = config.data
    if data.workers is not None:
        return data.workers
    if data.loader_threads is not None or Decode(data.decode) is not Decode.CPU or (data.image or 0) < _SMALL:
        return 0
    loading = sum(plan.devices[rank].machine == machine for rank in plan.stages[0].ranks)
    share = (cores or len(os.sched_getaffinity(0))) // max(1, loading)
    return min(share - 1, _MOST_WORKERS) if share >= _LEAST_CORES else 0


def input_dtype(job: Job) -> torch.dtype:
    """The type in which the first stage gets samples.

    Where autocast gives all of them another type before anything is computed, as it does before a convolution, they are
    loaded in that one: the same numbers, in half the memory. What a trace can't tell of other people's code is whether
    it asks for the type, so this is for our own models.
    """
    precision = precision_of(job.config)
    evaluation = job.evaluation
    probes = [job.training, *((evaluation.whole, evaluation.short) if evaluation else ())]
    is_known = is_ours(job.config.model.name) and not job.is_scripted
    are_casts = all(probe.casts_inputs and not _reads_numbers(probe) for probe in probes if probe is not None)
    return precision.autocast if precision.autocast and is_known and are_casts else precision.weights


def _reads_numbers(probe: Probe) -> bool:
    """Whether a loss or metric reads real numbers beside the targets, which would be loaded in that type as well."""
    numbers = [value for value in probe.fields if value.dtype and getattr(torch, value.dtype).is_floating_point]
    return any(value.name not in TARGETS for value in numbers)


def loader_options(job: Job, rank: int, emit: Emit, device: torch.device) -> LoaderOptions:
    """How a rank of the first stage loads samples."""
    config = job.config
    return LoaderOptions(
        input_dtype(job),
        config.data.loader_threads or _THREADS,
        config.data.ahead,
        config.data.max_bad,
        lambda bad: emit(Replaced(bad.index, bad.reason)),
        device=device,
        channels_last=job.channels_last,
        is_compiled=config.run.compile,
        decode=Decode(config.data.decode),
        workers=config.data.workers or 0,
        image_workers=image_workers(config, job.plan, job.plan.devices[rank].machine),
    )


def _loaders(job: Job, rank: int, emit: Emit, device: torch.device) -> tuple[Loader, Loader]:
    """The loaders of a rank of the first stage, for training and for evaluation."""
    plan, config = job.plan, job.config
    source = open_data(config, config.data.source)
    val = open_data(config, config.data.val) if config.data.val else source
    order = Order(len(source), plan.batch, config.run.seed, config.data.shuffle)
    replicas = plan.stages[0].replicas
    training = ReplicaSlice(TrainingSampler(order, plan.microbatches), replicas, plan.boundary(job.batches))
    evaluation = ReplicaSlice(EvaluationSampler(len(val), plan.samples), replicas, -(-len(val) // plan.samples))
    options = loader_options(job, rank, emit, device)
    loader, evaluation_loader = make_loaders(options, (source, training), (val, evaluation))
    return loader, evaluation_loader


def _connect(plan: Plan, rank: int, network: Network) -> dict[int, Exchange]:
    exchanges = {stage.index: Exchange() for stage in plan.stages_of(rank)}
    for name in channels_of(plan):
        is_forward = name.kind == "act"
        receiving = name.stage + (1 if is_forward else -1)
        window = plan.stages[min(name.stage, receiving)].depth + 1  # the most messages in flight during training
        if rank == name.source:
            own = exchanges[name.stage]
            (own.activations_to if is_forward else own.gradients_to)[name.target] = Outbox(network, name, window)
        elif rank == name.target:
            own = exchanges[receiving]
            (own.activations_from if is_forward else own.gradients_from)[name.source] = Inbox(network, name, window)
    return exchanges


def graph_obstacle(job: Job) -> str | None:
    """Why `--cuda-graph auto` does not capture the stages of a job.

    A replay does what the GPU did in the captured forward: of other people's code a trace can't tell all that it reads,
    such as a global variable. And while a forward is captured, no other thread of the process may use the GPU, as those
    for messages and sums do.
    """
    if job.plan.world > 1:
        return f"the run has {job.plan.world} ranks, whose messages use the GPU during a capture"
    if job.is_scripted:
        return "a script may change its model between batches"
    if job.is_conditional or job.draws:
        return "the model's code may do something else for another batch"
    if not is_ours(job.config.model.name):
        return "the model's code is not ours, and may read what no trace shows; if it doesn't, use --cuda-graph on"
    return None


def _replica(
    job: Job,
    rank: int,
    stage: Stage,
    piece: Piece,
    exchange: Exchange,
    collective: Collective,
    device: Device,
    script: ScriptParts | None,
) -> Replica:
    config = job.config
    precision = precision_of(config)
    roots = (piece.training, piece.evaluation)
    ring = VersionRing(roots, job.training.reached, stage.versions, keeps_objects=piece.is_whole, device=device.device)
    share = job.plan.stages[-1].round / stage.round
    divisor = job.training.divisor
    constant = None if divisor is None else float(divisor * job.plan.stages[-1].round)
    format_options = FormatOptions(job.channels_last, precision.is_scaled, divisor is not None, job.is_scripted)
    reduction = GradientOptions(
        config.run.bucket * 2**20,
        share,
        config.optimizer.clip,
        constant,
        stage.round,
        format_options.figures,
        job.is_conditional,
    )
    places = places_of(job.plan.tie_of(stage), stage.index, ring.parameters)
    tied = {place: stage.index == parameter.homes[0] for parameter, place in places.items()}
    gradients = GradientBuffers(ring.parameters, ring.master, stage.num_gradients, collective, reduction, tied)
    compute = ComputeOptions(config.run.compile, config.run.cuda_graph, graph_obstacle(job))
    loss = Loss(job.loss) if stage.is_last else None
    options = StageOptions(config.run.seed, precision, loss, divisor, format_options, compute, job.draws)
    factory = load_callable(config.optimizer.name, "optimizer") if ":" in config.optimizer.name else None
    base = config.optimizer.lr if factory is None else None
    rates: Hyperparameters = ScheduledRates(base, config.schedule, job.batches, stage.round, job.plan.microbatches)
    if script is not None and script.hyperparameters is not None:
        rates = script.hyperparameters(stage)
    splits = job.is_conditional or bool(job.plan.ties) or len(job.groups) > 1  # see `Weights`
    splits |= sees_tensors(config.optimizer.name)
    weights = Weights(ring.master, tuple(ring.parameters) if splits and ring.parameters else None)
    tied_names = [parameter.names for parameter in job.plan.tied]
    first_names = {name: names[0] for names in tied_names for name in names}
    optimizer = make_optimizer(config.optimizer, weights, rates, job.groups, factory, first_names)
    average = None
    if config.optimizer.ema is not None:
        decay = config.optimizer.ema ** (stage.round / job.plan.microbatches)
        average = MovingAverage(ring, decay, is_tied=stage.is_tied)
    changed = job.training.changed
    statistics = Statistics(piece.training, changed, collective, stage.ranks.index(rank), stage.replicas)
    return Replica(stage, piece, ring, gradients, optimizer, statistics, exchange, options, device, average)
