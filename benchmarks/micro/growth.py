"""`growth`: the memory and the messages of ranks in real runs, as microbatches, stages and ranks are doubled.

    microbatches   0:0.0:1, 4, 8, 16, 32 a batch   neither memory nor messages per microbatch may grow
    stages         1, 2, 4, 8, a rank each         a stage has fewer layers and more microbatches in flight
    ranks          1, 2, 4, 8 of one stage         sums; their memory is shared by the ranks of a machine

Every microbatch has the same size. A layer's output takes 2 MiB and next to no time, so most of what grows is what
ranks keep.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from torch import nn

from benchmarks.outcome import Goal, Outcome, Ratio, at_most, in_turns, new_outcome, ratio_of
from stagewright.bench.result import Repeat, Row, measured_row
from stagewright.config.toml import FIXED, make_config
from stagewright.errors import counted
from stagewright.metrics import MIB, Span
from stagewright.plan.plan import Plan
from stagewright.run.report import open_run
from stagewright.run.train import Result, run
from stagewright.schedule.action import SENDS, Op
from stagewright.voice import Voice

REPEATS = 3
_MOST = 1.05  # times the memory of the smallest: runs of one shape differ by 1 to 2 %, a microbatch is 2 MiB a layer
_LAYERS = 8
_CHANNELS, _SIDE, _SAMPLES = 32, 32, 16  # 2 MiB of a microbatch
_WIDTH = 1024
_BATCHES = 3
_MODEL = "benchmarks.micro.growth:layers"


def layers() -> nn.Module:
    """Layers that hold much and compute little, and in the last of them 8 MiB of weights."""
    first = nn.Conv2d(3, _CHANNELS, 1)
    own = [nn.Sequential(nn.BatchNorm2d(_CHANNELS), nn.ReLU()) for _ in range(_LAYERS - 1)]
    pooled = _CHANNELS * 8 * 8
    last = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(pooled, _WIDTH), nn.Linear(_WIDTH, 10))
    return nn.Sequential(first, *own, last)


@dataclass(frozen=True, slots=True)
class Shape:
    """One size of what is doubled."""

    group: str
    name: str
    placement: str
    mode: str
    microbatches: int

    def __str__(self) -> str:
        return f"{self.group}, {self.name}"

    @property
    def cut(self) -> str | None:
        """Stages of equally many layers."""
        stages = self.placement.count(".") + 1
        return ",".join(str(_LAYERS // stages * stage) for stage in range(1, stages)) or None


@dataclass(frozen=True, slots=True)
class Series:
    """Shapes, each with twice as many of something as the one before, and the goal for the ratio of last to first."""

    shapes: tuple[Shape, ...]
    goal: Goal | None = None


def _microbatches(count: int) -> Shape:
    return Shape("microbatches, two stages", f"{count} microbatches", "0:0.0:1", "stale", count)


def _stages(count: int) -> Shape:
    placement = ".".join(f"0:{rank}" for rank in range(count))
    return Shape("stages, 16 microbatches", counted(count, "stage"), placement, "stale" if count > 1 else "dp", 16)


def _ranks(count: int) -> Shape:
    placement = f"0:0-{count - 1}" if count > 1 else "0:0"
    return Shape("ranks of one stage, 16 microbatches", counted(count, "rank"), placement, "dp", 16)


SERIES = (
    Series(tuple(map(_microbatches, (4, 8, 16, 32))), at_most(_MOST)),
    Series(tuple(map(_stages, (1, 2, 4, 8)))),
    Series(tuple(map(_ranks, (1, 2, 4, 8)))),
)


def measure(voice: Voice) -> Outcome:
    """Train every shape in turns; rows are the MiB of its fullest rank, ratios the last shape over the first."""
    with tempfile.TemporaryDirectory(prefix="stagewright-bench-") as folder:
        shapes = [shape for series in SERIES for shape in series.shapes]
        return make_outcome(in_turns({shape: partial(_turn, shape, folder) for shape in shapes}, REPEATS, voice))


def _turn(shape: Shape, folder: str) -> Used:
    return usage_of(train(shape, folder))


def train(shape: Shape, folder: str) -> Result:
    """A run of a shape, as `train` runs it."""
    batch = shape.microbatches * _SAMPLES
    plan = {"placement": shape.placement, "mode": shape.mode, "batch": batch, "microbatches": shape.microbatches}
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": _MODEL, "classes": 10},
        "data": {"image": _SIDE, "samples": batch},
        "plan": plan | ({"cut": shape.cut} if shape.cut else {}),
        "optimizer": {"lr": 0.001, "momentum": 0.9},
        "run": {"epochs": _BATCHES, "runs": folder, "unproven": True, "monitor_every": 0.1},
    }
    return run(make_config(FIXED, tables))


@dataclass(frozen=True, slots=True)
class Used:
    """Memory, speed and messages of one run."""

    memory: int  # bytes of the fullest rank
    rate: float  # images per second
    sent: float  # messages per microbatch, of the rank that sends the most
    sums: float  # per update, of the rank that joins the most


def usage_of(result: Result) -> Used:
    """Read a finished run's files."""
    timeline = open_run(result.folder).timeline
    assert timeline is not None
    memory = max(rank["peak_memory"] for rank in result.summary["use"]["ranks"])
    return Used(memory, result.summary["images_per_second"], *counts(timeline.spans, result.plan))


def counts(spans: Sequence[Span], plan: Plan) -> tuple[float, float]:
    """Messages sent per microbatch and sums per update, of the ranks that have the most, by their recorded actions."""
    actions = {rank: Counter[str]() for rank in range(plan.world)}
    for span in spans:
        if span.lane != "wait":
            actions[span.rank][span.kind] += 1
    sent = [sum(done[op] for op in SENDS) / max(done[Op.FORWARD], 1) for done in actions.values()]
    sums = [done[Op.REDUCE] / max(done[Op.UPDATE], 1) for done in actions.values()]
    return max(sent), max(sums)


def make_outcome(found: Mapping[Shape, Sequence[Used]]) -> Outcome:
    """A row for every shape, and the ratio of the last to the first of each group."""
    rows: list[Row] = []
    ratios: list[Ratio] = []
    for series in SERIES:
        own = [_row(shape, found[shape]) for shape in series.shapes]
        rows += own
        ratios.append(ratio_of(own[-1], own[0], series.goal))
    title = "Memory of the fullest rank as microbatches, stages and ranks are doubled"
    return new_outcome("growth", title, REPEATS, _BATCHES, unit="MiB", rows=tuple(rows), ratios=tuple(ratios))


def _row(shape: Shape, used: Sequence[Used]) -> Row:
    repeats = [Repeat(one.memory / MIB) for one in used]
    rate = median(one.rate for one in used)
    sent, sums = max(one.sent for one in used), max(one.sums for one in used)
    note = f"messages per microbatch: {sent:.3g}; sums per update: {sums:.3g}; {rate:,.0f} images/s"
    about = {"model": _MODEL, "mode": shape.mode, "placement": shape.placement, "microbatches": shape.microbatches}
    return measured_row(shape.group, shape.name, repeats, note=note, batch=shape.microbatches * _SAMPLES, **about)
