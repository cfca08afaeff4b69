"""Run the cases of a suite of peers: rows are sides, ratios are pairings."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.outcome import Outcome, in_turns, new_outcome, ratio_of
from benchmarks.peers.cases import MICROSECONDS, Case, PeerSuite, Side, Workload, num_ranks
from benchmarks.peers.whole import run_pair
from stagewright.bench.demo.ranks import HERE, Ranks, Segment
from stagewright.bench.machine import shared_gpu
from stagewright.bench.result import Repeat, Row, measured_row
from stagewright.config.sections import Config
from stagewright.config.toml import FIXED, make_config
from stagewright.run.prepare import prepare
from stagewright.voice import Voice

_BATCHES_IN_MEMORY = 8
_WARM_STEPS = 3
_RATE = 0.001  # learning rate, small enough for any number of steps


def run_cases(suite: PeerSuite, repeats: int, steps: int, voice: Voice, keep: Callable[[Outcome], None]) -> Outcome:
    """Run the cases of a suite one after another, then its pairs; `keep` receives the outcome so far after each."""
    outcome = new_outcome(suite.name, suite.title, repeats, steps, unit=suite.unit)
    for case in suite.cases:
        with tempfile.TemporaryDirectory(prefix="stagewright-bench-") as folder:
            segments = _run_case(case, repeats, steps or case.steps, Path(folder), voice)
        outcome = with_case(outcome, case, segments, steps or case.steps)
        keep(replace(outcome, is_whole=case is suite.cases[-1] and not suite.pairs))
    for pair in suite.pairs:
        outcome = run_pair(outcome, pair, repeats, steps or pair.steps, voice)
        keep(replace(outcome, is_whole=pair is suite.pairs[-1]))
    return outcome


def with_case(outcome: Outcome, case: Case, segments: Mapping[Side, Sequence[Segment]], steps: int) -> Outcome:
    """Add what the sides of a case measured: a row per side, a ratio per pairing."""
    rows = {side: _row(side, outcome.unit, case.workload, steps, timed) for side, timed in segments.items()}
    ratios = [ratio_of(rows[pairing.ours], rows[pairing.theirs], pairing.goal) for pairing in case.pairings]
    return replace(outcome, rows=(*outcome.rows, *rows.values()), ratios=(*outcome.ratios, *ratios))


def _row(side: Side, unit: str, workload: Workload, steps: int, segments: Sequence[Segment]) -> Row:
    repeats = []
    for segment in segments:
        batch_seconds = segment.seconds / (side.steps or steps)
        rate = 1e6 * batch_seconds / workload.microbatches if unit == MICROSECONDS else workload.batch / batch_seconds
        repeats.append(Repeat(rate, loss=segment.loss, others=segment.others))
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
        note="; ".join(_notes(workload, segments, repeats)),
    )


def _notes(workload: Workload, segments: Sequence[Segment], repeats: Sequence[Repeat]) -> Iterator[str]:
    """The busiest rank of the middle of each segment where that is known; on CPUs, whether a side computes or waits."""
    known = [[result["busy"] for result in segment.results if "busy" in result] for segment in segments]
    if shares := [max(busy) for busy in known if busy]:
        yield f"the busiest rank computes {median(shares):.0%} of the time"
    if workload.setting.device == "cpu":
        used = median(segment.cores for segment in segments)
        yield f"the process with the most processor time uses {used:.2f} cores"
    if workload.is_text:
        yield f"{median(repeat.rate for repeat in repeats) * workload.input_shape[0]:,.0f} tokens/s"


def _run_case(case: Case, repeats: int, steps: int, folder: Path, voice: Voice) -> dict[Side, list[Segment]]:
    voice.progress(f"{case.workload}: starting {', '.join(side.name for side in case.sides)}")
    jobs = _save_jobs(case, folder)
    on_gpu = case.workload.setting.device == "cuda"
    with ExitStack() as stack:
        if on_gpu:
            stack.enter_context(shared_gpu(voice))
        ranks = open_ranks(stack, jobs, folder, case.workload)
        if case.workload.setting.is_compiled:  # all sides at the same time
            voice.progress(f"{case.workload}: compiling")
            for one in ranks.values():
                one.begin(1)
            for one in ranks.values():
                one.wait()
        turns = {side: partial(_take_turn, one, side.steps or steps, on_gpu) for side, one in ranks.items()}
        taken = in_turns(turns, repeats + 1, voice, str(case.workload))
    return {side: segments[1:] for side, segments in taken.items()}  # the first is a warm-up


def open_ranks(stack: ExitStack, jobs: Mapping[Side, Path], folder: Path, workload: Workload) -> dict[Side, Ranks]:
    """Start the ranks of all sides at once and wait until they are ready; the stack ends them."""
    started = {}
    for number, (side, job) in enumerate(jobs.items()):
        here = [HERE] * num_ranks(side.placement or workload.placement)
        started[side] = stack.enter_context(Ranks(side.name, side.kind, job, folder / f"side-{number}", here))
    for ranks in started.values():
        ranks.wait_ready()
    return started


def _take_turn(ranks: Ranks, steps: int, on_gpu: bool) -> Segment:
    """Train and time a segment; on a GPU warm up first, and give back memory that the next side may need."""
    if not on_gpu:
        return ranks.train(steps)
    ranks.train(_WARM_STEPS)
    segment = ranks.train(steps)
    ranks.call("rest")
    return segment


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
        files[side] = folder / f"{number}.json"
        prepare(_config(case.workload, side, data, folder)).job.save(files[side])
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
                "cuda_graph": "off",
                "unproven": setting.device == "cuda",  # what is timed is the same, and large models take minutes
            },
        },
    )
