"""Run the cases of a suite of peers: rows are sides, ratios are pairings."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.outcome import Outcome, new_outcome, ratio_of
from benchmarks.peers.cases import Case, Measure, PeerSuite, Side, Workload
from benchmarks.peers.launch import compile_together, open_ranks, take_turn, take_turns
from benchmarks.peers.whole import run_pair
from stagewright.bench.demo.ranks import Segment
from stagewright.bench.machine import shared_gpu
from stagewright.bench.result import Repeat, Row, measured_row
from stagewright.config.sections import Config
from stagewright.config.toml import FIXED, make_config
from stagewright.run.prepare import prepare
from stagewright.voice import Voice

_BATCHES_IN_MEMORY = 8
_RATE = 0.001  # learning rate, small enough for any number of steps


def run_cases(suite: PeerSuite, repeats: int, steps: int, voice: Voice, keep: Callable[[Outcome], None]) -> Outcome:
    """Run the cases of a suite one after another, then its pairs; `keep` receives the outcome so far after each."""
    outcome = new_outcome(suite.name, suite.title, repeats, steps, unit=suite.measure.unit)
    for case in suite.cases:
        with tempfile.TemporaryDirectory(prefix="stagewright-bench-") as folder:
            segments = _run_case(case, repeats, steps or case.steps, Path(folder), voice)
        outcome = with_case(outcome, suite.measure, case, segments, steps or case.steps)
        keep(replace(outcome, is_whole=case is suite.cases[-1] and not suite.pairs))
    for pair in suite.pairs:
        outcome = run_pair(outcome, pair, repeats, steps or pair.steps, voice)
        keep(replace(outcome, is_whole=pair is suite.pairs[-1]))
    return outcome


def with_case(
    outcome: Outcome, measure: Measure, case: Case, segments: dict[Side, list[Segment]], steps: int
) -> Outcome:
    """Add what the sides of a case measured: a row per side, a ratio per pairing."""
    rows = {side: make_row(side, measure, case.workload, steps, timed) for side, timed in segments.items()}
    ratios = [ratio_of(rows[pairing.ours], rows[pairing.theirs], pairing.goal) for pairing in case.pairings]
    return replace(outcome, rows=(*outcome.rows, *rows.values()), ratios=(*outcome.ratios, *ratios))


def make_row(side: Side, measure: Measure, workload: Workload, steps: int, segments: list[Segment]) -> Row:
    repeats = [
        Repeat(measure.of(workload, side.steps or steps, segment.seconds), loss=segment.loss, others=segment.others)
        for segment in segments
    ]
    notes = (_busiest(segments), _cores(workload, segments), _tokens(workload, measure, repeats))
    return measured_row(
        str(workload),
        side.name,
        repeats,
        model=workload.model.rpartition(":")[2],
        mode=side.mode,
        precision=side.precision or workload.setting.precision,
        batch=workload.batch,
        placement=side.placement or workload.placement,
        device=workload.setting.device,
        cuts=() if workload.cut is None or side.mode == "dp" else (workload.cut,),
        microbatches=side.microbatches or workload.microbatches,
        note="; ".join(filter(None, notes)),
    )


def _busiest(segments: Sequence[Segment]) -> str:
    """By the share of the middle of each segment in which the busiest rank computed, where that is known."""
    known = [[result["busy"] for result in segment.results if "busy" in result] for segment in segments]
    shares = [max(busy) for busy in known if busy]
    return f"the busiest rank computes {median(shares):.0%} of the time" if shares else ""


def _cores(workload: Workload, segments: Sequence[Segment]) -> str:
    """On CPUs, whether a side is slow since it computes or since it waits."""
    if workload.setting.device != "cpu":
        return ""
    used = median(segment.cores for segment in segments)
    return f"the process with the most processor time uses {used:.2f} cores"


def _tokens(workload: Workload, measure: Measure, repeats: Sequence[Repeat]) -> str:
    if not workload.is_text:
        return ""
    return f"{median(repeat.rate for repeat in repeats) * workload.input_shape[0]:,.0f} tokens/s"


def _run_case(case: Case, repeats: int, steps: int, folder: Path, voice: Voice) -> dict[Side, list[Segment]]:
    voice.progress(f"{case.workload}: starting {', '.join(side.name for side in case.sides)}")
    jobs = _save_jobs(case, folder)
    on_gpu = case.workload.setting.device == "cuda"
    with ExitStack() as stack:
        if on_gpu:
            stack.enter_context(shared_gpu(voice))
        ranks = open_ranks(stack, jobs, folder, {side: side.world(case.workload) for side in jobs})
        if case.workload.setting.is_compiled:
            voice.progress(f"{case.workload}: compiling")
            compile_together(ranks)
        turns = [
            partial(take_turn, one, side.steps or steps, on_gpu=on_gpu) for side, one in zip(jobs, ranks, strict=True)
        ]
        segments = take_turns(turns, repeats, Voice(progress=lambda text: voice.progress(f"{case.workload}: {text}")))
    return dict(zip(jobs, segments, strict=True))


def _save_jobs(case: Case, folder: Path) -> dict[Side, Path]:
    """Write each side's job to a file for its ranks; sides differ only in what `Side` says."""
    data = "synthetic"  # unused: on GPUs every side keeps one batch on the device
    if case.workload.is_text:
        data = f"tokens:{folder / 'data.bin'}"
        _save_tokens(case.workload, folder / "data.bin")
    elif case.workload.setting.device == "cpu":
        data = f"tensors:{folder / 'data.safetensors'}"
        _save_data(case.workload, folder / "data.safetensors")
    files: dict[Side, Path] = {}
    for number, side in enumerate(case.sides):
        job = prepare(_config(case.workload, side, data, folder)).job
        files[side] = folder / f"{number}.json"
        job.save(files[side])
    return files


def _save_data(workload: Workload, path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = _BATCHES_IN_MEMORY * workload.batch
    images = torch.randn(samples, *workload.input_shape, generator=generator)
    save_file({"images": images, "labels": torch.randint(workload.classes, (samples,), generator=generator)}, path)


def _save_tokens(workload: Workload, path: Path) -> None:
    generator = np.random.Generator(np.random.Philox(0))
    count = workload.batch * workload.input_shape[0] + 1
    path.write_bytes(generator.integers(workload.classes, size=count).astype("<u2").tobytes())


def _config(workload: Workload, side: Side, data: str, folder: Path) -> Config:
    setting, is_text = workload.setting, workload.is_text
    microbatches = side.microbatches or workload.microbatches
    placement = side.placement or workload.placement
    plan = {"placement": placement, "batch": workload.batch, "microbatches": microbatches, "mode": side.mode}
    staged = {"cut": workload.cut, "versions": workload.versions, "depths": workload.depths}
    if side.mode == "dp":
        staged = {}
    return make_config(
        FIXED,
        {
            "model": {"name": workload.model},
            "data": {"source": data, "shuffle": False, **({"context": workload.input_shape[0]} if is_text else {})},
            "plan": plan | {name: value for name, value in staged.items() if value is not None},
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
                "unproven": setting.device == "cuda",  # what is timed is the same, and large models take minutes
            },
        },
    )
