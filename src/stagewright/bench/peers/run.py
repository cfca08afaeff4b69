"""A suite's outcome, as a table for people and as one object for machines. Runs a suite: every heat's jobs, its sides' ranks, and their turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from stagewright.bench.machine import machine, num_cores, shared_gpu
from stagewright.bench.peers.cases import Contest, Heat, Measure, Side, Suite, Work
from stagewright.bench.peers.launch import Segment, Turn, compile_together, open_ranks, take_turns
from stagewright.bench.statistics import Ratio, median_of, median_ratio
from stagewright.config.sections import Config
from stagewright.config.toml import make_config
from stagewright.run.prepare import prepare

_TOLERANCE = 0.2  # cores


@dataclass(frozen=True, slots=True)
class Series:
    """One side's figures, a repeat each."""

    side: str
    values: tuple[float, ...]
    losses: tuple[float, ...]  # of each segment's last batch: sides that do the same work have the same
    others: tuple[float, ...]  # cores that other processes kept busy meanwhile
    busiest: float | None = None  # share of the time that the busiest rank's GPU work took, by its own events

    @property
    def median(self) -> float:
        return median_of(self.values)


@dataclass(frozen=True, slots=True)
class PeerOutcome:
    """A contest that was run."""

    contest: Contest
    work: Work
    ours: Series
    theirs: Series

    @property
    def ratio(self) -> Ratio:
        return median_ratio(self.ours.values, self.theirs.values)

    @property
    def is_met(self) -> bool:
        return self.contest.goal.is_met(self.ratio)

    def describe(self) -> dict[str, Any]:
        return {
            "ours": asdict(self.ours) | {"median": self.ours.median},
            "theirs": asdict(self.theirs) | {"median": self.theirs.median},
            "ratio": self.ratio.value,
            "interval": [self.ratio.low, self.ratio.high],
            "goal": self.contest.goal.text,
            "is_met": self.is_met,
            "work": asdict(self.work),
        }


def make_series(side: Side, measure: Measure, work: Work, steps: int, segments: Sequence[Segment]) -> Series:
    return Series(
        side.name,
        tuple(measure.of(work, steps, segment.seconds) for segment in segments),
        tuple(segment.loss for segment in segments),
        tuple(segment.others for segment in segments),
        _median_of(segment.busiest for segment in segments),
    )


def _median_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median_of(known) if known else None


def describe_suite(suite: Suite, outcomes: Sequence[PeerOutcome], command: str) -> dict[str, Any]:
    """The whole outcome as one object."""
    return {
        "suite": suite.name,
        "measure": suite.measure.name,
        "contests": [outcome.describe() for outcome in outcomes],
        "machine": machine(),
        "others": _others(outcomes),
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
    }


def show_work(console: Console, suite: Suite, outcomes: Sequence[PeerOutcome]) -> None:
    """The contests over one piece of work, as a table of 80 columns."""
    console.print(str(outcomes[0].work), highlight=False)
    console.print(_table(suite, outcomes))
    for series in {outcome.ours.side: outcome.ours for outcome in outcomes if outcome.ours.busiest}.values():
        console.print(f"{series.side}: the busiest rank computes {series.busiest:.0%} of the time", highlight=False)


def show_machine(console: Console, outcomes: Sequence[PeerOutcome], command: str) -> None:
    """What it was measured on, and how to repeat it."""
    console.print(", ".join([*machine().values(), time.strftime("%Y-%m-%d")]), highlight=False)
    ranks = max(outcome.work.world for outcome in outcomes)
    if (others := _others(outcomes)) + ranks > num_cores() + _TOLERANCE:
        busy = f"other processes kept {others:.1f} of {num_cores()} cores busy"
        console.print(f"warning: {busy}; repeat on a quiet machine", highlight=False)
    console.print(f"repeat with: {command}", highlight=False, soft_wrap=True)


def _others(outcomes: Sequence[PeerOutcome]) -> float:
    """Cores that other processes kept busy: the median over all segments."""
    return median_of(
        [others for outcome in outcomes for side in (outcome.ours, outcome.theirs) for others in side.others]
    )


def _table(suite: Suite, outcomes: Iterable[PeerOutcome]) -> Table:
    table = Table(width=80)
    table.add_column(suite.measure.name)
    for heading in ("ours", "theirs", "ratio", "95 % interval", "goal", "met"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        ratio = outcome.ratio
        table.add_row(
            f"{outcome.ours.side} / {outcome.theirs.side}",
            f"{outcome.ours.median:.0f}",
            f"{outcome.theirs.median:.0f}",
            f"{ratio.value:.2f}",
            f"{ratio.low:.2f} - {ratio.high:.2f}",
            outcome.contest.goal.text,
            "yes" if outcome.is_met else "no",
        )
    return table


Tell = Callable[[str], None]
_BATCHES_IN_MEMORY = 8
_RATE = 0.001  # small enough for any number of steps


def run_heats(suite: Suite, repeats: int, steps: int, tell: Tell) -> Iterator[list[PeerOutcome]]:
    """The contests of a suite, a heat at a time; `tell` hears what is going on."""
    for heat in suite.heats:
        with tempfile.TemporaryDirectory(prefix="stagewright-bench-") as folder:
            yield _run_heat(suite, heat, repeats, steps or heat.steps, Path(folder), tell)


def _run_heat(suite: Suite, heat: Heat, repeats: int, steps: int, folder: Path, tell: Tell) -> list[PeerOutcome]:
    tell(f"{heat.work}: starting {', '.join(side.name for side in heat.sides)}")
    jobs = _save_jobs(heat, folder)
    lengths = {side: side.steps or steps for side in jobs}
    with ExitStack() as stack:
        if heat.work.setting.device == "cuda":
            stack.enter_context(shared_gpu(tell))
        ranks = open_ranks(stack, jobs, folder, heat.work.world)
        if heat.work.setting.is_compiled:
            tell(f"{heat.work}: compiling")
            compile_together(ranks)
        turns = [Turn(side, lengths[side.side], heat.work.setting.device == "cuda") for side in ranks]
        segments = take_turns(turns, repeats, lambda text: tell(f"{heat.work}: {text}"))
    series = {
        side: make_series(side, suite.measure, heat.work, lengths[side], timed)
        for side, timed in zip(jobs, segments, strict=True)
    }
    return [PeerOutcome(contest, heat.work, series[contest.ours], series[contest.theirs]) for contest in heat.contests]


def _save_jobs(heat: Heat, folder: Path) -> dict[Side, Path]:
    """Each side's job, as a file that its ranks read: sides differ in nothing but the mode and its microbatches."""
    data = "synthetic"  # on GPUs every side keeps one batch on the device
    if heat.work.setting.device == "cpu":
        data = f"tensors:{folder / 'data.safetensors'}"
        _save_data(heat.work, folder / "data.safetensors")
    files: dict[Side, Path] = {}
    for number, side in enumerate(heat.sides):
        job, _ = prepare(_config(heat.work, side, data, folder))
        files[side] = folder / f"{number}.json"
        job.save(files[side])
    return files


def _save_data(work: Work, path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = _BATCHES_IN_MEMORY * work.batch
    images = torch.randn(samples, *work.input_shape, generator=generator)
    save_file({"images": images, "labels": torch.randint(work.classes, (samples,), generator=generator)}, path)


def _config(work: Work, side: Side, data: str, folder: Path) -> Config:
    setting = work.setting
    microbatches = side.microbatches or work.microbatches
    plan = {"placement": work.placement, "batch": work.batch, "microbatches": microbatches, "mode": side.mode}
    cut = {} if work.cut is None or side.mode == "dp" else {"cut": work.cut}
    return make_config(
        {
            "model": {"name": work.model},
            "data": {"source": data, "shuffle": False, "samples": work.batch},
            "plan": plan | cut,
            "optimizer": {"name": "sgd", "lr": _RATE, "momentum": 0.9},
            "run": {
                "threads": 1,
                "dynamic": side.is_dynamic,
                "runs": str(folder / "runs"),
                "device": setting.device,
                "precision": side.precision or setting.precision,
                "share_gpu": setting.device == "cuda",
                "compile": setting.is_compiled,
                "cuda_graph": setting.graph,
            },
        }
    )
