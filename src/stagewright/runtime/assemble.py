"""Builds one rank's worker from the job: its pieces of the model, its channels, its share of the data."""

from __future__ import annotations

from stagewright.config import Config
from stagewright.data.loader import Loader
from stagewright.data.order import Order
from stagewright.data.sources import Source, open_source
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
    return open_source(text, samples=data.samples, classes=config.model.classes, image=data.image, seed=config.run.seed)


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
        source = open_data(config, config.data.source)
        order = Order(len(source), plan.batch, config.run.seed, config.data.shuffle)
        precision = make_precision(config.run.precision, config.run.device)
        worker.loader = Loader(source, order, plan.microbatches, precision.weights)
        worker.evaluation_source = open_data(config, config.data.val) if config.data.val else source
    return worker


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
