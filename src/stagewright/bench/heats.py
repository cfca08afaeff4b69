"""Runs a suite: every heat's jobs, its sides' ranks, and their turns."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save_file

from stagewright.bench.arena import Turn, compile_together, open_ranks, take_turns
from stagewright.bench.contests import Heat, Side, Suite, Work
from stagewright.bench.mps import shared_gpu
from stagewright.bench.report import Outcome, make_series
from stagewright.config import make_config
from stagewright.config.sections import Config
from stagewright.settle import prepare

Tell = Callable[[str], None]
_BATCHES_IN_MEMORY = 8
_RATE = 0.001  # small enough for any number of steps


def run_heats(suite: Suite, repeats: int, steps: int, tell: Tell) -> Iterator[list[Outcome]]:
    """The contests of a suite, a heat at a time; `tell` hears what is going on."""
    for heat in suite.heats:
        with tempfile.TemporaryDirectory(prefix="stagewright-bench-") as folder:
            yield _run_heat(suite, heat, repeats, steps or heat.steps, Path(folder), tell)


def _run_heat(suite: Suite, heat: Heat, repeats: int, steps: int, folder: Path, tell: Tell) -> list[Outcome]:
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
    return [Outcome(contest, heat.work, series[contest.ours], series[contest.theirs]) for contest in heat.contests]


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
