"""What is compared with stock PyTorch: cases of one workload and several sides, and the goal for each pair of sides.

`SUITES` holds the cases of `overhead`, `peers`, `gpu` and `transformers`; nothing here runs anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from torch import nn

from benchmarks.outcome import Goal, at_least, at_most, not_slower
from benchmarks.peers.whole import CommandPair
from stagewright.cluster.placement import parse_placement
from stagewright.errors import UserError, counted
from stagewright.model.networks.zoo import ZOO

_WIDTH = 8


class Kind(StrEnum):
    """What trains the workload: a `Runner`, as module:Class."""

    STAGEWRIGHT = "benchmarks.peers.sides:Stagewright"
    ONE_F_ONE_B = "benchmarks.peers.sides:OneFOneB"
    DDP = "benchmarks.peers.sides:Ddp"
    STOCK = "benchmarks.peers.sides:Plain"  # a plain compiled loop in one process
    BOUND = "benchmarks.peers.sides:Unconnected"  # our ranks and kernels without any communication: an upper bound


@dataclass(frozen=True, slots=True)
class Side:
    """One way to train the workload, in a mode and in its own rank processes."""

    name: str
    kind: Kind
    mode: str
    microbatches: int | None = None  # in place of the workload's: DDP has one microbatch per rank
    steps: int | None = None  # batches per segment in place of the case's, where its batches take much longer
    is_dynamic: bool = False
    precision: str | None = None  # in place of the workload's
    placement: str | None = None  # in place of the workload's

    def __str__(self) -> str:
        return self.name


def num_ranks(placement: str) -> int:
    return len({device for devices in parse_placement(placement) for device in devices})


@dataclass(frozen=True, slots=True)
class Execution:
    """The device that the workload runs on, and how it computes."""

    device: str = "cpu"
    precision: str = "fp32"
    is_compiled: bool = False

    def __str__(self) -> str:
        precision = "fp16 and bf16" if self.precision == "half" else self.precision
        return f"{precision}{', compiled' if self.is_compiled else ''}"


@dataclass(frozen=True, slots=True)
class Workload:
    """What every side of a case trains."""

    model: str
    placement: str
    batch: int
    microbatches: int
    input_shape: tuple[int, ...]
    classes: int
    cut: str | None = None
    setting: Execution = Execution()
    versions: str | None = None  # of each stage; None: as the mode has it
    depths: str | None = None

    @property
    def is_text(self) -> bool:
        """Whether a sample is a sequence of tokens, of which there are as many as classes."""
        return self.model in ZOO and ZOO[self.model].tokens is not None

    def __str__(self) -> str:
        ranks = self.placement.replace("0:", "").replace(".", " + ")
        cut = "" if self.cut is None else f" cut before {self.cut}"
        samples = self.batch // self.microbatches
        setting = "" if self.setting.device == "cpu" else f", {self.setting}"
        model = self.model.rpartition(":")[2].replace("_", " ") if ":" in self.model else self.model
        on = f"rank{'' if num_ranks(self.placement) == 1 else 's'} {ranks}"
        microbatches = f"{counted(self.microbatches, 'microbatch', 'es')} of {samples}"
        return f"{model}{cut} on {on}, {microbatches}{setting}"


@dataclass(frozen=True, slots=True)
class Pairing:
    """Two sides of a case, and the goal for the ratio of the first to the second."""

    ours: Side
    theirs: Side
    goal: Goal


@dataclass(frozen=True, slots=True)
class Case:
    """One workload and the sides that are compared on it, which train in turns."""

    workload: Workload
    steps: int  # batches per segment by default
    pairings: tuple[Pairing, ...]

    @property
    def sides(self) -> tuple[Side, ...]:
        return tuple(dict.fromkeys(side for pairing in self.pairings for side in (pairing.ours, pairing.theirs)))


@dataclass(frozen=True, slots=True)
class PeerSuite:
    """What `overhead`, `peers` or `gpu` measures."""

    name: str
    title: str
    cases: tuple[Case, ...]
    pairs: tuple[CommandPair, ...] = ()  # of whole commands
    unit: str = "images/s"


MICROSECONDS = "microseconds/microbatch"
_SYNC = Side("sync", Kind.STAGEWRIGHT, "sync")
_STALE = Side("stale", Kind.STAGEWRIGHT, "stale")
_DP = Side("dp", Kind.STAGEWRIGHT, "dp")
_ONE_F_ONE_B = Side("torch 1F1B", Kind.ONE_F_ONE_B, "sync")
_DDP = Side("torch DDP", Kind.DDP, "dp")
_NEAR_EMPTY = Workload("benchmarks.peers.cases:near_empty_layers", "0:0.0:1", 128, 64, (_WIDTH,), _WIDTH)
_SAMPLES = 32  # per microbatch: with so many, the stages on both sides of the cut take equally long
_IMAGES_PER_SEGMENT = 1024
_SMALL_VGG_WHOLE = Workload("vgg-small", "0:0-1", 64, 2, (3, 32, 32), 10)


def _small_vgg(microbatches: int) -> Case:
    """Stale gains the bubble over 1F1B, at most (M+1)/M: hence several numbers M of microbatches."""
    batch = microbatches * _SAMPLES
    workload = Workload("vgg-small", "0:0.0:1", batch, microbatches, (3, 32, 32), 10, cut="avgpool")
    pairings = (Pairing(_SYNC, _ONE_F_ONE_B, not_slower()), Pairing(_STALE, _ONE_F_ONE_B, at_least(1.2)))
    return Case(workload, _IMAGES_PER_SEGMENT // batch, pairings)


_DDP_8 = Side("torch DDP", Kind.DDP, "dp", microbatches=8, steps=6)
_DP_8 = Side("dp", Kind.STAGEWRIGHT, "dp", microbatches=8, steps=6)
_STALE_DYNAMIC = Side("stale", Kind.STAGEWRIGHT, "stale", is_dynamic=True)
_BOUND = Side("bound", Kind.BOUND, "stale")
_PHOTO = (3, 224, 224)


def _vgg_on_gpu(precision: str, times_ddp: float, of_bound: float) -> Case:
    """The published experiment: convolutions on seven ranks, fully connected layers on one."""
    workload = Workload("vgg16", "0:0-6.0:7", 224, 7, _PHOTO, 1000, cut="avgpool", setting=Execution("cuda", precision))
    pairings = (
        Pairing(_STALE_DYNAMIC, _DDP_8, at_least(times_ddp)),
        Pairing(_STALE_DYNAMIC, _BOUND, at_least(of_bound)),
        Pairing(_DP_8, _DDP_8, not_slower()),
    )
    return Case(workload, 30, pairings)


def _parallel_on_gpu(model: str) -> Case:
    """Data parallel on eight ranks."""
    workload = Workload(model, "0:0-7", 256, 8, _PHOTO, 1000, setting=Execution("cuda", "bf16"))
    return Case(workload, 12, (Pairing(replace(_DP_8, steps=12), replace(_DDP_8, steps=12), not_slower()),))


def _resnet_on_gpu() -> Case:
    """One compiled rank, where Stagewright's runtime should cost nothing."""
    pairings = []
    for precision in ("fp16", "bf16"):
        ours = replace(_ONE_STAGE, name=precision, precision=precision)
        theirs = replace(_COMPILED_LOOP, name=f"torch {precision}", precision=precision)
        pairings.append(Pairing(ours, theirs, not_slower()))
    workload = Workload("resnet50", "0:0", 256, 1, _PHOTO, 1000, setting=Execution("cuda", "half", is_compiled=True))
    return Case(workload, 40, tuple(pairings))


_TWO_STAGES = Side("2 stages", Kind.STAGEWRIGHT, "stale", microbatches=4, placement="0:0.0:1")
_ONE_STAGE = Side("1 stage", Kind.STAGEWRIGHT, "dp")
_COMPILED_LOOP = Side("torch", Kind.STOCK, "dp")


def _transformer(model: str, batch: int, shape: tuple[int, ...], classes: int) -> Case:
    """One rank, and two stages that share the GPU, beside a compiled loop in one process."""
    setting = Execution("cuda", "bf16", is_compiled=True)
    workload = Workload(model, "0:0", batch, 1, shape, classes, setting=setting)
    pairings = (Pairing(_ONE_STAGE, _COMPILED_LOOP, not_slower()), Pairing(_TWO_STAGES, _COMPILED_LOOP, at_least(0.8)))
    return Case(workload, 20, pairings)


_OVERHEAD = PeerSuite(
    "overhead",
    "The cost of a microbatch with next to nothing to compute",
    (Case(_NEAR_EMPTY, 20, (Pairing(_SYNC, _ONE_F_ONE_B, at_most(0.5)),)),),
    unit=MICROSECONDS,
)
_PEERS = PeerSuite(
    "peers",
    "Stagewright and stock PyTorch on this machine's cores",
    (*map(_small_vgg, (2, 4, 8)), Case(_SMALL_VGG_WHOLE, 16, (Pairing(_DP, _DDP, not_slower()),))),
)
_GPU = PeerSuite(
    "gpu",
    "Stagewright and stock PyTorch on one GPU",
    (
        *(_vgg_on_gpu("bf16", 6.0, 0.95), _vgg_on_gpu("fp32", 3.2, 0.95)),
        *(_parallel_on_gpu("resnet50"), _parallel_on_gpu("vit_b_16"), _resnet_on_gpu()),
    ),
    (
        *(CommandPair(model, 256, "bf16") for model in ("resnet50", "vgg16")),
        CommandPair("alexnet", 2048, "bf16"),
        CommandPair("vit_b_16", 128, "bf16"),
        CommandPair("resnet50", 256, "fp16"),
        CommandPair("resnet50", 32, "bf16", "reduce-overhead"),
        CommandPair("resnet50", 256, "bf16", from_files=True),
    ),
)
_TRANSFORMERS = PeerSuite(
    "transformers",
    "Transformers in one stage and in two, beside a compiled loop, on one GPU",
    (_transformer("gpt2", 16, (1024,), 50257), _transformer("vit_b_16", 128, _PHOTO, 1000)),
    unit="samples/s",
)
SUITES = {suite.name: suite for suite in (_OVERHEAD, _PEERS, _GPU, _TRANSFORMERS)}


def near_empty_layers() -> nn.Module:
    """Two units with next to nothing to compute, so that a microbatch costs what the pipeline itself costs."""
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH))


def only_cases(suite: PeerSuite, text: str | None) -> PeerSuite:
    """The cases and pairs of a suite whose description contains a text."""
    if text is None:
        return suite
    cases = tuple(case for case in suite.cases if text.lower() in str(case.workload).lower())
    pairs = tuple(pair for pair in suite.pairs if text.lower() in str(pair).lower())
    if not cases and not pairs:
        known = "; ".join([*(str(case.workload) for case in suite.cases), *map(str, suite.pairs)])
        raise UserError(f"--only '{text}' matches none of {len(suite.cases) + len(suite.pairs)} cases: {known}")
    return replace(suite, cases=cases, pairs=pairs)
