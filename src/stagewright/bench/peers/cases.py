"""Models made for measuring. What is measured: the work, the sides that do it, and what their ratio should be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from torch import nn

from stagewright.bench.statistics import Ratio
from stagewright.cluster.placement import parse_placement

WIDTH = 8


def near_empty() -> nn.Module:
    """Two units with next to nothing to compute: what a microbatch costs is the pipeline itself."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


class Kind(StrEnum):
    """Who does the work."""

    STAGEWRIGHT = "stagewright"
    ONE_F_ONE_B = "1f1b"
    DDP = "ddp"
    STOCK = "stock"  # one process: a plain loop, compiled
    BOUND = "bound"  # Stagewright's own ranks and kernels, without messages and sums


@dataclass(frozen=True, slots=True)
class Side:
    """One contestant: its rank processes train the work in a mode."""

    name: str
    kind: Kind
    mode: str
    microbatches: int | None = None  # of its own, where one microbatch a rank is the side's way
    steps: int | None = None  # of one segment, where its steps take much longer than the others'
    is_dynamic: bool = False
    precision: str | None = None  # of its own


@dataclass(frozen=True, slots=True)
class Setting:
    """What the work runs on, and how."""

    device: str = "cpu"
    precision: str = "fp32"
    is_compiled: bool = False
    graph: str = "off"

    def __str__(self) -> str:
        precision = "fp16 and bf16" if self.precision == "half" else self.precision
        return f"{precision}{', compiled' if self.is_compiled else ''}"


@dataclass(frozen=True, slots=True)
class Work:
    """What every side of a heat does."""

    model: str
    placement: str
    batch: int
    microbatches: int
    input_shape: tuple[int, ...]
    classes: int
    cut: str | None = None
    setting: Setting = Setting()

    @property
    def world(self) -> int:
        return len({device for devices in parse_placement(self.placement) for device in devices})

    def __str__(self) -> str:
        ranks = self.placement.replace("0:", "").replace(".", " + ")
        cut = "" if self.cut is None else f" cut before {self.cut}"
        samples = self.batch // self.microbatches
        setting = "" if self.setting.device == "cpu" else f", {self.setting}"
        model = self.model.rpartition(":")[2]
        return f"{model}{cut} on ranks {ranks}, {self.microbatches} microbatches of {samples}{setting}"


@dataclass(frozen=True, slots=True)
class Goal:
    """What a ratio should be."""

    text: str
    is_met: Callable[[Ratio], bool]


def at_most(limit: float) -> Goal:
    return Goal(f"<= {limit:g}", lambda ratio: ratio.value <= limit)


def at_least(limit: float) -> Goal:
    return Goal(f">= {limit:g}", lambda ratio: ratio.value >= limit)


def not_slower() -> Goal:
    """Of a ratio of speeds: as fast as the other side, as far as can be told."""
    return Goal("reaches 1", lambda ratio: ratio.high >= 1.0)


@dataclass(frozen=True, slots=True)
class Contest:
    """Two sides of a heat, and the goal for the first over the second."""

    ours: Side
    theirs: Side
    goal: Goal

    @property
    def sides(self) -> tuple[Side, Side]:
        return (self.ours, self.theirs)


@dataclass(frozen=True, slots=True)
class Heat:
    """Contests over one piece of work, run in turns."""

    work: Work
    steps: int  # batches of one segment, unless told
    contests: tuple[Contest, ...]

    @property
    def sides(self) -> tuple[Side, ...]:
        return tuple(dict.fromkeys(side for contest in self.contests for side in contest.sides))


@dataclass(frozen=True, slots=True)
class Measure:
    """The figure that a segment's seconds become."""

    name: str
    of: Callable[[Work, int, float], float]  # work, steps, seconds


@dataclass(frozen=True, slots=True)
class Suite:
    """What one `bench` command measures."""

    name: str
    measure: Measure
    heats: tuple[Heat, ...]


_MICROSECONDS = Measure(
    "microseconds a microbatch", lambda work, steps, seconds: seconds / (steps * work.microbatches) * 1e6
)
_IMAGES = Measure("images a second", lambda work, steps, seconds: steps * work.batch / seconds)
_SYNC = Side("sync", Kind.STAGEWRIGHT, "sync")
_STALE = Side("stale", Kind.STAGEWRIGHT, "stale")
_DP = Side("dp", Kind.STAGEWRIGHT, "dp")
_ONE_F_ONE_B = Side("torch 1F1B", Kind.ONE_F_ONE_B, "sync")
_DDP = Side("torch DDP", Kind.DDP, "dp")
_NEAR_EMPTY = Work("stagewright.bench.peers.cases:near_empty", "0:0.0:1", 128, 64, (8,), 8)
_SAMPLES = 32  # of a microbatch: the stages on both sides of the cut then take equally long
_IMAGES_A_SEGMENT = 1024
_SMALL_VGG_WHOLE = Work("vgg-small", "0:0-1", 64, 2, (3, 32, 32), 10)


def _small_vgg(microbatches: int) -> Heat:
    """What stale gains over 1F1B is the bubble, at most (M+1)/M: so it is shown at more than one M."""
    batch = microbatches * _SAMPLES
    work = Work("vgg-small", "0:0.0:1", batch, microbatches, (3, 32, 32), 10, cut="avgpool")
    contests = (Contest(_SYNC, _ONE_F_ONE_B, not_slower()), Contest(_STALE, _ONE_F_ONE_B, at_least(1.2)))
    return Heat(work, _IMAGES_A_SEGMENT // batch, contests)


_DDP_8 = Side("torch DDP", Kind.DDP, "dp", microbatches=8, steps=6)
_DP_8 = Side("dp", Kind.STAGEWRIGHT, "dp", microbatches=8, steps=6)
_STALE_DYNAMIC = Side("stale", Kind.STAGEWRIGHT, "stale", is_dynamic=True)
_BOUND = Side("bound", Kind.BOUND, "stale")
_PHOTO = (3, 224, 224)


def _vgg_on_gpu(precision: str, times_ddp: float, of_bound: float) -> Heat:
    """The published experiment: convolutions on seven ranks, fully connected layers on one."""
    work = Work("vgg16", "0:0-6.0:7", 224, 7, _PHOTO, 1000, cut="avgpool", setting=Setting("cuda", precision))
    contests = (
        Contest(_STALE_DYNAMIC, _DDP_8, at_least(times_ddp)),
        Contest(_STALE_DYNAMIC, _BOUND, at_least(of_bound)),
        Contest(_DP_8, _DDP_8, not_slower()),
    )
    return Heat(work, 30, contests)


def _resnet_on_gpu() -> Iterator[Heat]:
    """Data parallel on eight ranks; and one rank, compiled, where a stage's runtime should cost nothing."""
    work = Work("resnet50", "0:0-7", 256, 8, _PHOTO, 1000, setting=Setting("cuda", "bf16"))
    yield Heat(work, 12, (Contest(replace(_DP_8, steps=12), replace(_DDP_8, steps=12), not_slower()),))
    contests = [
        Contest(
            Side(precision, Kind.STAGEWRIGHT, "dp", precision=precision),
            Side(f"torch {precision}", Kind.STOCK, "dp", precision=precision),
            not_slower(),
        )
        for precision in ("fp16", "bf16")
    ]
    work = Work("resnet50", "0:0", 256, 1, _PHOTO, 1000, setting=Setting("cuda", "half", is_compiled=True))
    yield Heat(work, 40, tuple(contests))


_GPU = Suite("gpu", _IMAGES, (_vgg_on_gpu("bf16", 6.0, 0.80), _vgg_on_gpu("fp32", 3.2, 0.88), *_resnet_on_gpu()))
SUITES = {
    suite.name: suite
    for suite in (
        Suite("overhead", _MICROSECONDS, (Heat(_NEAR_EMPTY, 20, (Contest(_SYNC, _ONE_F_ONE_B, at_most(0.5)),)),)),
        Suite(
            "peers",
            _IMAGES,
            (
                *(_small_vgg(microbatches) for microbatches in (2, 4, 8)),
                Heat(_SMALL_VGG_WHOLE, 16, (Contest(_DP, _DDP, not_slower()),)),
            ),
        ),
        _GPU,
    )
}


def only_heats(suite: Suite, text: str | None) -> Suite:
    """The suite with only the heats whose description has a text in it."""
    if text is None:
        return suite
    heats = tuple(heat for heat in suite.heats if text.lower() in str(heat.work).lower())
    if not heats:
        known = "; ".join(str(heat.work) for heat in suite.heats)
        raise ValueError(f"--only '{text}' leaves none of {len(suite.heats)} heats: {known}")
    return replace(suite, heats=heats)
