"""`checkpoint`: how long a checkpoint pauses training, compared with a plain copy of the same state.

One rank trains batch by batch. Whenever the pipeline is empty, two things are timed: saving a checkpoint as
`stagewright train` does, and copying its tensors into buffers that are already allocated.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.outcome import Outcome, at_most, new_outcome, ratio_of
from stagewright.bench.result import measured_row
from stagewright.config.toml import FIXED, make_config
from stagewright.events import Record, Saved
from stagewright.metrics import MIB
from stagewright.run.prepare import prepare
from stagewright.runtime.checkpoint.save import flats_of
from stagewright.runtime.process.emulate import Emulation
from stagewright.runtime.process.log import Ledger
from stagewright.voice import Voice

LIMIT = 1.5  # times the time to copy the state
REPEATS = 11
MODEL = "resnet50"


def measure(voice: Voice) -> Outcome:
    """Time checkpoint and plain copy in turns."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="stagewright-bench-") as folder:
        tables: dict[str, dict[str, Any]] = {
            "model": {"name": MODEL, "classes": 10},
            "data": {"image": 32, "samples": 64},
            "plan": {"placement": "0:0", "mode": "stale", "versions": "2", "batch": 4, "microbatches": 1},
            "checkpoint": {"every": 1, "keep": 1},
            "run": {"steps": 1000, "runs": folder},
        }
        job = prepare(make_config(FIXED, tables)).job
        saved: list[Record] = []
        with Ledger(job, saved.append) as ledger:
            emulation = Emulation(job, ledger.handle)
            series = _take_turns(emulation, voice)
            state = sum(flat.nbytes for _, flat in flats_of(emulation.workers[0].replicas[0]))
    return make_outcome(series, state, next(record.bytes for record in saved if isinstance(record, Saved)))


def _take_turns(emulation: Emulation, voice: Voice) -> dict[str, list[float]]:
    """Seconds per repeat."""
    (worker,) = emulation.workers
    state = [flat for _, flat in flats_of(worker.replicas[0])]
    buffers = [torch.empty_like(flat).fill_(0) for flat in state]
    series: dict[str, list[float]] = {"stops": [], "copies": [], "quiet": [], "writing": []}
    for repeat in range(REPEATS + 1):
        voice.progress(f"checkpoint {repeat} of {REPEATS}")
        is_copy_first = repeat % 2 == 0
        times = {"quiet": _timed(_train, emulation, 2 * repeat)}
        if is_copy_first:
            times["copies"] = _timed(_copy, state, buffers)
        times["stops"] = _timed(worker.saver.save, 2 * repeat + 1)
        times["writing"] = _timed(_train, emulation, 2 * repeat + 1)
        worker.saver.close()
        if not is_copy_first:
            times["copies"] = _timed(_copy, state, buffers)
        if repeat:  # the first is a warm-up
            for name, seconds in times.items():
                series[name].append(seconds)
    return series


def _train(emulation: Emulation, batch: int) -> None:
    emulation.finish(lambda worker: worker.train(range(batch, batch + 1)))


def _copy(state: list[Tensor], buffers: list[Tensor]) -> None:
    with torch.no_grad():
        for source, target in zip(state, buffers, strict=True):
            target.copy_(source)


def _timed(work: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def make_outcome(series: Mapping[str, Sequence[float]], state: int, size: int) -> Outcome:
    """Milliseconds of both sides and of batches; the goal is for the pause over the copy."""
    rows = {
        name: measured_row(group, what, [1e3 * seconds for seconds in series[name]])
        for name, group, what in (
            ("stops", MODEL, "pause of training"),
            ("copies", MODEL, "plain copy"),
            ("quiet", "one batch", "while nothing is written"),
            ("writing", "one batch", "while a checkpoint is written"),
        )
    }
    title = f"A checkpoint of {MODEL}: two versions, SGD with momentum"
    return new_outcome(
        "checkpoint",
        title,
        len(series["stops"]),
        unit="ms",
        rows=tuple(rows.values()),
        ratios=(ratio_of(rows["stops"], rows["copies"], at_most(LIMIT)),),
        figures={"state, MiB": state / MIB, "on disk, MiB": size / MIB},
    )
