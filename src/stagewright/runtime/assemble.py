"""Builds one rank's worker from the job: its pieces of the model, its channels, its share of the data."""

from __future__ import annotations

from stagewright.config import Config
from stagewright.data.datasets import is_images
from stagewright.data.device import require_decoder
from stagewright.data.loader import Loader, make_loaders
from stagewright.data.loading import Decode, Loading
from stagewright.data.numbering import Pieces, Share, Training
from stagewright.data.order import Order
from stagewright.data.sources import ImageOptions, Source, open_source
from stagewright.model.load import build_model
from stagewright.model.units import Chain, Piece
from stagewright.plan.plan import Plan, Stage
from stagewright.runtime.channels import Inbox, Outbox
from stagewright.runtime.job import Job
from stagewright.runtime.network import Network, channels_of
from stagewright.runtime.optimize import Optimizer
from stagewright.runtime.precision import make_precision
from stagewright.runtime.reduce import Collective, Reducer
from stagewright.runtime.replica import Links, Replica, Rules
from stagewright.runtime.versions import VersionRing
from stagewright.runtime.worker import Emit, Recorder, Worker

_POSTED_AHEAD = 2  # receives a channel has waiting; one more than is needed to never be late


def open_data(config: Config, text: str) -> Source:
    """The source a configuration names; its model and image size must be settled."""
    data = config.data
    assert config.model.classes is not None and data.image is not None
    if is_images(text):
        require_decoder(data.decode, config.run.device)
    limit = data.limit if text == data.source else None
    options = ImageOptions(data.crop, data.normalize, data.jitter, data.class_names, limit, data.learnable)
    return open_source(
        text,
        samples=data.samples,
        classes=config.model.classes,
        image=data.image,
        seed=config.run.seed,
        options=options,
    )


def open_pieces(config: Config, cuts: tuple[str, ...]) -> tuple[Piece, ...]:
    """The model's pieces with their initial weights, in the run's precision."""
    precision = make_precision(config.run.precision, config.run.device)
    model = build_model(config.model.name, config.run.seed, config.model.classes).to(precision.weights)
    return Chain(model.train()).cut(cuts)


def assemble(job: Job, rank: int, network: Network, emit: Emit, recorder: Recorder | None = None) -> Worker:
    """One rank's worker, connected and ready to run."""
    plan, config = job.plan, job.config
    pieces = open_pieces(config, plan.cuts)
    links = _connect(plan, rank, network)
    collectives = {
        stage.index: network.collective(f"reduce/{stage.index}", stage.ranks) for stage in plan.stages_of(rank)
    }
    everyone = tuple(range(plan.world)) if plan.agree else (rank,)
    replicas = {
        stage.index: _replica(job, stage, pieces[stage.index], links[stage.index], collectives[stage.index])
        for stage in plan.stages_of(rank)
    }
    worker = Worker(job, rank, replicas, collectives, network.collective("agree", everyone), emit, recorder)
    if rank in plan.stages[0].ranks:
        worker.loader, worker.evaluation_loader = _loaders(job, emit)
    return worker


def _loaders(job: Job, emit: Emit) -> tuple[Loader, Loader]:
    """What gives a rank of the first stage its samples, in training and in evaluation."""
    plan, config = job.plan, job.config
    source = open_data(config, config.data.source)
    val = open_data(config, config.data.val) if config.data.val else source
    order = Order(len(source), plan.batch, config.run.seed, config.data.shuffle)
    loading = Loading(
        make_precision(config.run.precision, config.run.device).weights,
        config.data.loader_threads,
        config.data.ahead,
        config.data.max_bad,
        lambda bad: emit({"kind": "bad", "index": bad.index, "reason": bad.reason}),
        decode=Decode(config.data.decode),
    )
    training = Share(Training(order, plan.microbatches), plan.stages[0].replicas, plan.boundary(job.batches))
    pieces = Share(Pieces(len(val), plan.samples), plan.stages[0].replicas, -(-len(val) // plan.samples))
    loader, evaluation_loader = make_loaders(loading, (source, training), (val, pieces))
    return loader, evaluation_loader


def _connect(plan: Plan, rank: int, network: Network) -> dict[int, Links]:
    links = {stage.index: Links() for stage in plan.stages_of(rank)}
    for name in channels_of(plan):
        receiving = name.stage + (1 if name.kind == "act" else -1)
        window = plan.stages[min(name.stage, receiving)].depth + 1  # no more than that can be under way in training
        if rank == name.source:
            outbox = Outbox(str(name), network.transport(name, window), network.bulletin, window)
            (links[name.stage].activations_to if name.kind == "act" else links[name.stage].gradients_to)[
                name.target
            ] = outbox
        elif rank == name.target:
            inbox = Inbox(str(name), network.transport(name, window), network.bulletin, _POSTED_AHEAD)
            (links[receiving].activations_from if name.kind == "act" else links[receiving].gradients_from)[
                name.source
            ] = inbox
    return links


def _replica(job: Job, stage: Stage, piece: Piece, links: Links, collective: Collective) -> Replica:
    config = job.config
    precision = make_precision(config.run.precision, config.run.device)
    ring = VersionRing(piece.modules, job.training.reached, stage.versions, stage.num_gradients)
    reducer = Reducer(collective, ring.parameters, ring.master.itemsize, config.run.bucket * 2**20)
    rules = Rules(config.run.seed, precision, config.optimizer.label_smoothing, job.plan.stages[-1].round / stage.round)
    return Replica(stage, piece, ring, reducer, Optimizer(config.optimizer, ring.master), links, rules)
