"""One case of training, twice: as Stagewright runs it, and as the independent reference does; then compared.

The reference's input (replicas, versions, which stage holds which parameter) is derived here from the text of the case
and from the design, not from the plan.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stagewright.config.toml import make_config
from stagewright.events import BatchLosses, Event, Scored, decode, encode
from stagewright.run.train import prepare
from stagewright.runtime.comm import memory
from stagewright.runtime.comm.memory import MemoryCollective
from stagewright.runtime.comm.transport import Pending
from stagewright.runtime.job import Job
from stagewright.runtime.process.emulate import Emulation
from tests import models, reference

torch.set_num_threads(1)

Tensors = Mapping[str, Tensor]
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4, "fp16": 1e-4}
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float32}
_LOUD = 1000.0
SCALED = {"precision": "fp16", "loss_scale": 2.0**124, "growth_interval": 2, "loud": 11}  # overflows now and then
SETTINGS: dict[str, dict[str, Any]] = {  # of every optimizer of the register, as cases train with it
    "sgd": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.05},
    "adamw": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "eps": 1e-4},
    "rmsprop": {"name": "rmsprop", "lr": 0.002, "momentum": 0.8, "weight_decay": 0.02, "eps": 0.01},
    "lars": {"name": "lars", "lr": 2.0, "weight_decay": 0.1},
}
_VALIDATION_SAMPLES = 17  # a prime: the last piece is short for every size of microbatch but 1


@dataclass(frozen=True)
class Case:
    """A run: a model of tests/models.py, its plan, and its optimizer."""

    model: str = "plain"
    placement: str = "0:0"
    cut: str | None = None  # children or units that later stages begin with
    owners: str | None = None  # the first children whose parameters later stages hold, where `cut` names no children
    mode: str = "sync"
    staleness: int | None = None
    versions: tuple[int, ...] | None = None
    batch: int = 12
    microbatches: int = 4
    steps: int = 8
    samples: int = 41  # three batches per epoch, and five samples that are dropped
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, reference.Group] = field(default_factory=dict)  # what the optimizer's groups come to, by name
    precision: str = "fp64"
    dynamic: bool = False
    policy: str = "1f1b"
    eval_every: int | None = None
    bucket: int = 0  # MiB: every parameter is a separate bucket
    seed: int = 5
    loss_scale: float | None = None  # a precision that scales its loss, otherwise fp32
    growth_interval: int = 2000
    loud: int = 1  # one in that many samples is much larger than the others
    ties: tuple[tuple[str, tuple[int, ...]], ...] = ()  # a parameter, and the stages that use it
    freeze: str | None = None  # children, between commas, that are not trained and keep their statistics

    def __str__(self) -> str:
        """What differs from the default, as the name of a test."""
        lag = {
            "stale": f"-n{self.staleness}" if self.versions is None else f"-k{'.'.join(map(str, self.versions))}"
        }.get(self.mode, "")
        parts = [
            self.model,
            "-".join(map(str, self.replicas)),
            f"{self.mode}{lag}",
            f"M{self.microbatches}",
            *(f"{name}={value}" for name, value in self.optimizer.items()),
            *(["freeze " + self.freeze] if self.freeze else []),
        ]
        flags = {"dynamic": self.dynamic, "eval": self.eval_every is not None, self.precision: self.precision != "fp64"}
        return "/".join(parts + [name for name, is_set in flags.items() if is_set])

    @property
    def replicas(self) -> tuple[int, ...]:
        stages = [
            sum(1 + last - first for first, last in map(_ends, stage.split(","))) for stage in self.placement.split(".")
        ]
        return (sum(stages),) if self.mode == "dp" else tuple(stages)

    @property
    def samples_per_microbatch(self) -> int:
        return self.batch // self.microbatches

    @property
    def pauses(self) -> list[int]:
        """Batches after which it evaluates."""
        return [] if self.eval_every is None else [*range(self.eval_every, self.steps, self.eval_every), self.steps]

    @property
    def num_versions(self) -> tuple[int, ...]:
        """K of every stage, by the presets of the design; stages that share a parameter have the largest of theirs."""
        versions = list(self._preset_versions)
        for _ in self.ties:  # as often as ties may overlap
            for _, homes in self.ties:
                most = max(versions[home] for home in homes)
                versions = [most if stage in homes else own for stage, own in enumerate(versions)]
        return tuple(versions)

    @property
    def _preset_versions(self) -> tuple[int, ...]:
        stages = len(self.replicas)
        if self.versions is not None:
            return self.versions
        if self.mode == "stale":
            assert self.staleness is not None
            return tuple(min(stages - s, self.staleness + 1) for s in range(stages))
        if self.mode == "pipedream":
            return tuple(-(-sum(self.replicas[s:]) // self.replicas[s]) for s in range(stages))
        assert self.mode in ("dp", "sync"), f"write K of {self.mode} here"
        return (1,) * stages

    def lr(self, batch: int) -> float:
        """Two batches of warm-up, then two falls."""
        base: float = self.optimizer.get("lr", 0.05)
        return base * (batch + 1) / 2 if batch < 2 else base * 0.5 ** ((batch >= 3) + (batch >= 6))


def _ends(devices: str) -> tuple[int, int]:
    first, _, last = devices.rpartition(":")[2].partition("-")
    return int(first), int(last or first)


# --- Stagewright's side -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a run of Stagewright left: its events, and the weights and mean statistics."""

    job: Job
    events: Sequence[Event]
    weights: Tensors

    @property
    def microbatch_losses(self) -> list[float]:
        """By number; every microbatch must be reported once."""
        events = [event for event in self.events if isinstance(event, BatchLosses)]
        reported = [(number, total / count) for event in events for number, total, count in event.losses]
        losses = dict(reported)
        assert len(reported) == len(losses) and sorted(losses) == list(range(len(losses)))
        return [losses[number] for number in range(len(losses))]

    @property
    def losses(self) -> list[float]:
        count = self.job.plan.microbatches
        losses = self.microbatch_losses
        return [sum(losses[first : first + count]) / count for first in range(0, len(losses), count)]

    @property
    def scores(self) -> dict[int, list[float]]:
        """Batch -> samples, sum of their losses, top-1 and top-5 hits, over all ranks that score."""
        scores: dict[int, list[float]] = {}
        reported = [event for event in self.events if isinstance(event, Scored)]
        for event in sorted(reported, key=lambda event: (event.batch, event.rank)):
            so_far = scores.get(event.batch, [0.0] * 4)
            loss, count = event.score.totals.get("loss", (0.0, 1.0))  # a replica without a piece has none
            mean = loss / count * event.score.samples  # samples of a case have equally many labels
            found = [event.score.totals.get(name, (0.0, 0.0))[0] for name in ("top1", "top5")]
            scores[event.batch] = [a + b for a, b in zip(so_far, (event.score.samples, mean, *found), strict=True)]
        return scores


@dataclass(frozen=True)
class EmulatedRun(Run):
    """A run in one process, whose replicas tests can inspect."""

    emulation: Emulation

    def replica_statistics(self) -> dict[tuple[int, int], dict[str, Tensor]]:
        """(stage, replica) -> that replica's own buffers by name."""
        return {
            (stage, replica.stage.ranks.index(worker.rank)): dict(replica.piece.training.named_buffers())
            for worker in self.emulation.workers
            for stage, replica in worker.replicas.items()
        }


def make_data(case: Case) -> tuple[Tensor, Tensor]:
    """The training data of a case."""
    images, labels = models.make_data(case.model, case.samples, seed=3)
    if case.loud > 1:
        images[:: case.loud] *= _LOUD
    return images, labels


def write_tensors(folder: Path, name: str, images: Tensor, labels: Tensor) -> str:
    """A data set in a file, as `--data` names it."""
    path = folder / f"{name}.safetensors"
    save_file({"images": images, "labels": labels}, path)
    return f"tensors:{path}"


def make_job(case: Case, folder: Path, **run: Any) -> Job:
    """The job of a case, with its data in `folder`; `run` are further options of its [run] table."""
    optimizer = {"lr": 0.05, **case.optimizer}
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": f"tests.models:{case.model}", "freeze": case.freeze},
        "data": {"source": write_tensors(folder, "training", *make_data(case)), "shuffle": False},
        "plan": {
            "placement": case.placement,
            "cut": case.cut,
            "mode": case.mode,
            "staleness": case.staleness,
            "versions": case.versions and ",".join(map(str, case.versions)),
            "batch": case.batch,
            "microbatches": case.microbatches,
            "policy": case.policy,
        },
        "optimizer": optimizer,
        "schedule": {"kind": "step", "warmup": 2, "steps": "3,6", "gamma": 0.5},
        "run": {
            "steps": case.steps,
            "seed": case.seed,
            "precision": case.precision,
            "dynamic": case.dynamic,
            "eval_every": case.eval_every,
            "bucket": case.bucket,
            "runs": str(folder / "runs"),
            **({} if case.loss_scale is None else {"loss_scale": case.loss_scale}),
            "growth_interval": case.growth_interval,
            **run,
        },
    }
    if case.eval_every is not None:
        validation = models.make_data(case.model, _VALIDATION_SAMPLES, seed=4)
        tables["data"]["val"] = write_tensors(folder, "validation", *validation)
    return prepare(make_config(tables, given=())).job  # cases list options that only some of them use


Drive = Callable[[Emulation], None]


def emulate(case: Case, folder: Path, drive: Drive = Emulation.run) -> EmulatedRun:
    """Run a case with every rank in this process."""
    job = make_job(case, folder)
    events: list[Event] = []
    with mock.patch.object(memory, "MemoryCollective", ExclusiveCollective):
        emulation = Emulation(job, lambda event: events.append(decode(encode(event))))
    drive(emulation)
    return EmulatedRun(job, events, emulation.weights(), emulation)


class ExclusiveCollective(MemoryCollective):
    """As strict as gloo: nothing may use a tensor from the start of its sum until the wait."""

    def sum(self, tensor: Tensor) -> Pending:
        pending = super().sum(tensor)
        return _ExclusiveSum(pending, tensor.fill_(torch.nan))


@dataclass
class _ExclusiveSum:
    pending: Pending
    tensor: Tensor
    is_pending: bool = True

    def is_completed(self) -> bool:
        return self.pending.is_completed()

    def wait(self) -> None:
        if self.is_pending:
            assert self.tensor.isnan().all(), "a tensor was written to, or summed again, while its sum was pending"
            self.is_pending = False
            self.pending.wait()


# --- The reference's side ---------------------------------------------------------------------------------------------


def refer(case: Case, steps: int | None = None) -> reference.Result:
    """The reference's result for a case, or for its first steps; in pipedream its losses are those of microbatches."""
    images, labels = make_data(case)
    children = [name for name, _ in build(case.model).named_children()]
    owners = (case.owners or case.cut or "").split(",") if len(case.replicas) > 1 else []
    firsts = [children.index(name) for name in owners]

    def stage_of(name: str) -> int:
        return sum(children.index(name.partition(".")[0]) >= first for first in firsts)

    setup, order = _setup(case, steps or case.steps), None
    if case.mode == "pipedream":
        setup, order = _by_microbatch(case, setup)
    starts = [children[0], *owners]
    return reference.train(lambda: build_frozen(case), images, labels, stage_of, starts, setup, order)


def _setup(case: Case, steps: int) -> reference.Setup:
    renamed = {"name": "optimizer"}
    elsewhere = ("lr", "groups", "no_decay", "layer_decay")
    return reference.Setup(
        case.replicas,
        case.num_versions,
        case.batch,
        case.microbatches,
        steps,
        case.seed,
        _DTYPES[case.precision],
        scale=case.loss_scale,
        growth_interval=case.growth_interval,
        ties=case.ties,
        groups=case.groups,
        lr=case.lr,
        **{renamed.get(name, name): value for name, value in case.optimizer.items() if name not in elsewhere},
    )


def _by_microbatch(case: Case, setup: reference.Setup) -> tuple[reference.Setup, Callable[[int], Tensor]]:
    """Pipedream has no batches: rounds count microbatches, and a run continues until every stage's round ends."""
    size, period = case.samples_per_microbatch, math.lcm(*case.replicas)
    microbatches = -(-setup.num_microbatches // period) * period

    def order(microbatch: int) -> Tensor:
        batch, piece = divmod(microbatch, case.microbatches)
        first = batch % (case.samples // case.batch) * case.batch + piece * size
        return torch.arange(first, first + size)

    def lr(microbatch: int) -> float:
        return case.lr(microbatch // case.microbatches)

    ema = None if setup.ema is None else setup.ema ** (1 / case.microbatches)
    return replace(setup, pipedream=True, batch=size, microbatches=1, steps=microbatches, lr=lr, ema=ema), order


def build(model: str) -> nn.Module:
    made = getattr(models, model)()
    return nn.Sequential(*made) if isinstance(made, list) else made


def build_frozen(case: Case) -> nn.Module:
    """The model of a case, frozen as a script does it: no gradients, and norms put back into evaluation mode."""
    model = build(case.model)
    frozen = [model.get_submodule(name) for name in (case.freeze or "").split(",") if name]
    for module in frozen:
        module.requires_grad_(False)
    plain_train = model.train

    def train(mode: bool = True) -> nn.Module:
        plain_train(mode)
        for norm in (part for module in frozen for part in module.modules() if isinstance(part, nn.BatchNorm2d)):
            norm.eval()
        return model

    model.train = train  # type: ignore[method-assign]
    return model


def plain_score(case: Case, state: Tensors) -> list[float]:
    """Samples, sum of losses, top-1 and top-5 hits of the validation data, by pieces as large as a microbatch."""
    images, labels = models.make_data(case.model, _VALIDATION_SAMPLES, seed=4)
    dtype = _DTYPES[case.precision]
    model = build(case.model).to(dtype).eval()
    model.load_state_dict(dict(state))
    inputs = images.to(dtype) if images.is_floating_point() else images
    with torch.no_grad():
        logits = torch.cat([model(piece) for piece in inputs.split(case.samples_per_microbatch)])
    loss = cross_entropy(logits, labels) * len(labels)
    hits = logits.argsort(dim=1, descending=True) == labels.unsqueeze(1)
    hits_per_sample = hits.double().flatten(2).mean(2) if hits.dim() > 2 else hits.double()
    return [len(labels), float(loss), float(hits_per_sample[:, 0].sum()), float(hits_per_sample[:, :5].sum())]


# --- Both -------------------------------------------------------------------------------------------------------------


def distance(actual: Tensor, expected: Tensor) -> float:
    """|a-b| / |b|; where b is zero, a must be."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    difference = float(torch.linalg.vector_norm((actual - expected).double()))
    return difference and difference / max(float(torch.linalg.vector_norm(expected.double())), 1e-300)


def assert_near(actual: Tensors, expected: Tensors, tolerance: float) -> None:
    """The same names, and each tensor within the tolerance in norm."""
    assert set(actual) == set(expected)
    far = {name: gap for name in expected if not (gap := distance(actual[name], expected[name])) <= tolerance}
    assert not far, f"relative distances beyond {tolerance}: {far}"


def assert_same_bits(first: Run, second: Run) -> None:
    assert first.microbatch_losses == second.microbatch_losses
    assert set(first.weights) == set(second.weights)
    different = [name for name in first.weights if not torch.equal(first.weights[name], second.weights[name])]
    assert not different, f"bits differ in {different}"


def assert_equals_reference(case: Case, folder: Path) -> EmulatedRun:
    """A run of a case equals the reference in all that it leaves."""
    run, result = emulate(case, folder), refer(case)
    assert_parity(case, run, result)
    assert_statistics(case, run, result)
    if case.eval_every is not None:
        assert_scores(case, run, result)
    return run


def refer_skipping(case: Case) -> reference.Result:
    """The reference's result of a case in which some updates are skipped, and others not."""
    result = refer(case)
    assert any(map(all, result.skipped)) and not all(map(any, result.skipped)), result.skipped
    return result


def assert_parity(case: Case, run: Run, result: reference.Result) -> None:
    """Losses, weights and mean statistics of a run equal the reference's."""
    tolerance = TOLERANCE[case.precision]
    if case.mode == "pipedream":  # it trains until every stage's round ends, but reports whole batches
        count = case.steps * case.microbatches
        assert_near(_as_tensors(run.microbatch_losses[:count]), _as_tensors(result.losses[:count]), tolerance)
    else:
        assert_near(_as_tensors(run.losses), _as_tensors(result.losses), tolerance)
    assert_near(run.weights, _held(result.averages | result.buffers, run), tolerance)


def _as_tensors(losses: Sequence[float]) -> Tensors:
    return {"losses": torch.tensor(losses, dtype=torch.float64)}


def _held(state: Tensors, run: Run) -> Tensors:
    """Without the parameters that no stage of a cut model holds."""
    return state if not run.job.plan.cuts else {name: tensor for name, tensor in state.items() if "spare" not in name}


def assert_statistics(case: Case, run: EmulatedRun, result: reference.Result) -> None:
    """Every replica's running statistics equal the reference's."""
    actual = run.replica_statistics()
    assert actual.keys() == result.replica_buffers.keys()
    for replica, expected in result.replica_buffers.items():
        assert_near(actual[replica], expected, TOLERANCE[case.precision])


def assert_scores(case: Case, run: Run, result: reference.Result) -> None:
    """Every evaluation of a run equals the reference's at that batch; `result` is the reference's last."""
    assert list(run.scores) == case.pauses != []
    for batch, score in run.scores.items():
        at_batch = result if batch == case.steps else refer(case, steps=batch)
        samples, loss, *hits = plain_score(case, at_batch.averages | at_batch.buffers)
        assert score[0] == samples
        assert score[2:] == pytest.approx(hits, rel=1e-12)
        assert abs(score[1] - loss) <= TOLERANCE[case.precision] * loss
