"""Runs a suite: every heat's jobs, its sides' ranks, and their turns."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save_file

from stagewright.bench.arena import open_ranks, take_turns
from stagewright.bench.report import Outcome, make_series
from stagewright.bench.suites import Heat, Side, Suite, Work
from stagewright.config import Config, make_config
from stagewright.settle import prepare

Tell = Callable[[str], None]
_BATCHES_IN_MEMORY = 8
_RATE = 0.001  # small enough for any number of steps


def run_heats(suite: Suite, repeats: int, steps: int, tell: Tell) -> list[Outcome]:
    """Every contest of a suite; `tell` hears what is going on."""
    outcomes: list[Outcome] = []
    for heat in suite.heats:
        with tempfile.TemporaryDirectory(prefix="stagewright-bench-") as folder:
            outcomes += _run_heat(suite, heat, repeats, steps or heat.steps, Path(folder), tell)
    return outcomes


def _run_heat(suite: Suite, heat: Heat, repeats: int, steps: int, folder: Path, tell: Tell) -> list[Outcome]:
    tell(f"{heat.work}: starting {', '.join(side.name for side in heat.sides)}")
    jobs = _save_jobs(heat, folder)
    with ExitStack() as stack:
        ranks = open_ranks(stack, jobs, folder)
        segments = take_turns(ranks, repeats, steps, lambda text: tell(f"{heat.work}: {text}"))
    series = {
        side: make_series(side, suite.measure, heat.work, steps, timed)
        for side, timed in zip(jobs, segments, strict=True)
    }
    return [Outcome(contest, heat.work, series[contest.ours], series[contest.theirs]) for contest in heat.contests]


def _save_jobs(heat: Heat, folder: Path) -> dict[Side, Path]:
    """Each side's job, as a file that its ranks read: sides differ in nothing but the mode."""
    data = folder / "data.safetensors"
    _save_data(heat.work, data)
    files: dict[str, Path] = {}
    for mode in dict.fromkeys(side.mode for side in heat.sides):
        job, _ = prepare(_config(heat.work, mode, data, folder))
        files[mode] = folder / f"{mode}.json"
        job.save(files[mode])
    return {side: files[side.mode] for side in heat.sides}


def _save_data(work: Work, path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = _BATCHES_IN_MEMORY * work.batch
    images = torch.randn(samples, *work.input_shape, generator=generator)
    save_file({"images": images, "labels": torch.randint(work.classes, (samples,), generator=generator)}, path)


def _config(work: Work, mode: str, data: Path, folder: Path) -> Config:
    plan = {"placement": work.placement, "batch": work.batch, "microbatches": work.microbatches, "mode": mode}
    return make_config(
        {
            "model": {"name": work.model},
            "data": {"source": f"tensors:{data}", "shuffle": False},
            "plan": plan | ({} if work.cut is None else {"cut": work.cut}),
            "optimizer": {"name": "sgd", "lr": _RATE, "momentum": 0.9},
            "run": {"threads": 1, "runs": str(folder / "runs")},
        }
    )
