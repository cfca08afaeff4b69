"""Run the cases of a suite of peers, and print their outcomes as tables or as one JSON object."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from stagewright.bench.machine import shared_gpu
from stagewright.bench.peers.cases import Case, Measure, Pairing, PeerSuite, Side, Workload
from stagewright.bench.peers.launch import Segment, compile_together, open_ranks, take_turns
from stagewright.bench.statistics import Interval, median_ratio
from stagewright.config.sections import Config
from stagewright.config.toml import make_config
from stagewright.hardware.environment import read_environment
from stagewright.hardware.host import num_cores
from stagewright.run.prepare import prepare

Progress = Callable[[str], None]
_TOLERANCE = 0.2  # cores
_BATCHES_IN_MEMORY = 8
_RATE = 0.001  # learning rate, small enough for any number of steps


@dataclass(frozen=True, slots=True)
class Series:
    """The measurements of one side, one per repeat."""

    side: str
    values: tuple[float, ...]
    losses: tuple[float, ...]  # of each segment's last batch: equal for sides that do the same work
    others: tuple[float, ...]  # cores that other processes kept busy meanwhile
    busiest: float | None = None  # share of the time that the busiest rank's GPU computed, by its own events

    @property
    def median(self) -> float:
        return median(self.values)


@dataclass(frozen=True, slots=True)
class PeerOutcome:
    """A pairing and what its two sides measured."""

    pairing: Pairing
    workload: Workload
    ours: Series
    theirs: Series

    @property
    def ratio(self) -> Interval:
        return median_ratio(self.ours.values, self.theirs.values)

    @property
    def is_met(self) -> bool:
        return self.pairing.goal.is_met(self.ratio)

    def describe(self) -> dict[str, Any]:
        return {
            "ours": asdict(self.ours) | {"median": self.ours.median},
            "theirs": asdict(self.theirs) | {"median": self.theirs.median},
            "ratio": self.ratio.value,
            "interval": [self.ratio.low, self.ratio.high],
            "goal": self.pairing.goal.text,
            "is_met": self.is_met,
            "work": asdict(self.workload),
        }


def run_cases(suite: PeerSuite, repeats: int, steps: int, progress: Progress) -> Iterator[list[PeerOutcome]]:
    """Run the cases of a suite one after another; yields the outcomes of each."""
    for case in suite.cases:
        with tempfile.TemporaryDirectory(prefix="stagewright-bench-") as folder:
            yield _run_case(suite, case, repeats, steps or case.steps, Path(folder), progress)


def _run_case(
    suite: PeerSuite, case: Case, repeats: int, steps: int, folder: Path, progress: Progress
) -> list[PeerOutcome]:
    progress(f"{case.workload}: starting {', '.join(side.name for side in case.sides)}")
    jobs = _save_jobs(case, folder)
    lengths = {side: side.steps or steps for side in jobs}
    on_gpu = case.workload.setting.device == "cuda"
    with ExitStack() as stack:
        if on_gpu:
            stack.enter_context(shared_gpu(progress))
        ranks = open_ranks(stack, jobs, folder, case.workload.world)
        if case.workload.setting.is_compiled:
            progress(f"{case.workload}: compiling")
            compile_together(ranks)
        turns = [partial(side.take_turn, lengths[side.side], on_gpu=on_gpu) for side in ranks]
        segments = take_turns(turns, repeats, lambda text: progress(f"{case.workload}: {text}"))
    series = {
        side: make_series(side, suite.measure, case.workload, lengths[side], timed)
        for side, timed in zip(jobs, segments, strict=True)
    }
    return [
        PeerOutcome(pairing, case.workload, series[pairing.ours], series[pairing.theirs]) for pairing in case.pairings
    ]


def _save_jobs(case: Case, folder: Path) -> dict[Side, Path]:
    """Write each side's job to a file for its ranks; sides differ only in what `Side` says."""
    data = "synthetic"  # unused: on GPUs every side keeps one batch on the device
    if case.workload.setting.device == "cpu":
        data = f"tensors:{folder / 'data.safetensors'}"
        _save_data(case.workload, folder / "data.safetensors")
    files: dict[Side, Path] = {}
    for number, side in enumerate(case.sides):
        job = prepare(_config(case.workload, side, data, folder))
        files[side] = folder / f"{number}.json"
        job.save(files[side])
    return files


def _save_data(workload: Workload, path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = _BATCHES_IN_MEMORY * workload.batch
    images = torch.randn(samples, *workload.input_shape, generator=generator)
    save_file({"images": images, "labels": torch.randint(workload.classes, (samples,), generator=generator)}, path)


def _config(workload: Workload, side: Side, data: str, folder: Path) -> Config:
    setting = workload.setting
    microbatches = side.microbatches or workload.microbatches
    plan = {"placement": workload.placement, "batch": workload.batch, "microbatches": microbatches, "mode": side.mode}
    cut = {} if workload.cut is None or side.mode == "dp" else {"cut": workload.cut}
    return make_config(
        {
            "model": {"name": workload.model},
            "data": {"source": data, "shuffle": False, "samples": workload.batch},
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


def make_series(side: Side, measure: Measure, workload: Workload, steps: int, segments: Sequence[Segment]) -> Series:
    busiest = [segment.busiest for segment in segments if segment.busiest is not None]
    return Series(
        side.name,
        tuple(measure.of(workload, steps, segment.seconds) for segment in segments),
        tuple(segment.loss for segment in segments),
        tuple(segment.others for segment in segments),
        median(busiest) if busiest else None,
    )


def describe_suite(suite: PeerSuite, outcomes: Sequence[PeerOutcome], command: str) -> dict[str, Any]:
    """All outcomes as one JSON object."""
    return {
        "suite": suite.name,
        "measure": suite.measure.name,
        "contests": [outcome.describe() for outcome in outcomes],
        "machine": read_environment().words(),
        "others": _others(outcomes),
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
    }


def show_workload(console: Console, suite: PeerSuite, outcomes: Sequence[PeerOutcome]) -> None:
    """Print the pairings of one workload as a table of 80 columns."""
    console.print(str(outcomes[0].workload), highlight=False)
    console.print(_table(suite, outcomes))
    for series in {outcome.ours.side: outcome.ours for outcome in outcomes if outcome.ours.busiest}.values():
        console.print(f"{series.side}: the busiest rank computes {series.busiest:.0%} of the time", highlight=False)


def show_machine(console: Console, outcomes: Sequence[PeerOutcome], command: str) -> None:
    """Print the machine, a warning if it was busy, and the command that repeats the measurement."""
    console.print(", ".join([*read_environment().words().values(), time.strftime("%Y-%m-%d")]), highlight=False)
    ranks = max(outcome.workload.world for outcome in outcomes)
    if (others := _others(outcomes)) + ranks > num_cores() + _TOLERANCE:
        busy = f"other processes kept {others:.1f} of {num_cores()} cores busy"
        console.print(f"warning: {busy}; repeat on an idle machine", highlight=False)
    console.print(f"repeat with: {command}", highlight=False, soft_wrap=True)


def _others(outcomes: Sequence[PeerOutcome]) -> float:
    """Cores that other processes kept busy: the median over all segments."""
    return median([others for outcome in outcomes for side in (outcome.ours, outcome.theirs) for others in side.others])


def _table(suite: PeerSuite, outcomes: Iterable[PeerOutcome]) -> Table:
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
            outcome.pairing.goal.text,
            "yes" if outcome.is_met else "no",
        )
    return table
