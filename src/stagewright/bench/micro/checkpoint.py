"""`bench checkpoint`: how long a checkpoint pauses training, compared with a plain copy of the same state.

One rank trains batch by batch. Whenever the pipeline is empty, two things are timed: saving a checkpoint as
`stagewright train` does, and copying its tensors into buffers that are already allocated.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from stagewright.bench.statistics import Interval, median_ratio
from stagewright.config.toml import make_config
from stagewright.events import Record, Saved
from stagewright.hardware.environment import read_environment
from stagewright.metrics import MIB
from stagewright.report.live.terminal import say
from stagewright.run.prepare import prepare
from stagewright.runtime.checkpoint.save import flats_of
from stagewright.runtime.process.emulate import Emulation
from stagewright.runtime.process.log import Ledger
from stagewright.runtime.stage.worker import Worker

LIMIT = 1.5  # times the time to copy the state
REPEATS = 11
MODEL = "resnet50"


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds per repeat, and sizes in bytes."""

    stops: tuple[float, ...]  # pause of training for a checkpoint, once the pipeline is empty
    copies: tuple[float, ...]  # a plain copy of the state
    quiet: tuple[float, ...]  # a batch while nothing is written
    writing: tuple[float, ...]  # a batch while a checkpoint is written
    state: int  # bytes of weights and optimizer state
    size: int  # bytes of the checkpoint on disk

    @property
    def ratio(self) -> Interval:
        return median_ratio(self.stops, self.copies)


def measure(progress: Callable[[str], None]) -> Found:
    """Time checkpoint and plain copy in turns."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="stagewright-bench-") as folder:
        job = prepare(
            make_config(
                {
                    "model": {"name": MODEL, "classes": 10},
                    "data": {"image": 32, "samples": 64},
                    "plan": {"placement": "0:0", "mode": "stale", "versions": "2", "batch": 4, "microbatches": 1},
                    "checkpoint": {"every": 1, "keep": 1},
                    "run": {"steps": 1000, "runs": folder},
                }
            )
        )
        saved: list[Record] = []
        with Ledger(job, saved.append) as ledger:
            (worker,) = Emulation(job, ledger.handle).workers
            found = _take_turns(worker, progress)
        size = next(record.bytes for record in saved if isinstance(record, Saved))
        return Found(**found, size=size)


def _take_turns(worker: Worker, progress: Callable[[str], None]) -> dict[str, Any]:
    state = [flat for _, flat in flats_of(worker.replicas[0])]
    buffers = [torch.empty_like(flat).fill_(0) for flat in state]
    series: dict[str, list[float]] = {"stops": [], "copies": [], "quiet": [], "writing": []}
    for repeat in range(REPEATS + 1):
        progress(f"checkpoint {repeat} of {REPEATS}")
        is_copy_first = repeat % 2 == 0
        times = {"quiet": _timed(_train, worker, 2 * repeat)}
        if is_copy_first:
            times["copies"] = _timed(_copy, state, buffers)
        times["stops"] = _timed(worker.saver.save, 2 * repeat + 1)
        times["writing"] = _timed(_train, worker, 2 * repeat + 1)
        worker.saver.close()
        if not is_copy_first:
            times["copies"] = _timed(_copy, state, buffers)
        if repeat:  # the first is a warm-up
            for name, seconds in times.items():
                series[name].append(seconds)
    return {name: tuple(values) for name, values in series.items()} | {"state": sum(flat.nbytes for flat in state)}


def _train(worker: Worker, batch: int) -> None:
    for pending in worker.train(range(batch, batch + 1)):
        pending.wait()


def _copy(state: list[Tensor], buffers: list[Tensor]) -> None:
    with torch.no_grad():
        for source, target in zip(state, buffers, strict=True):
            target.copy_(source)


def _timed(work: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def describe(found: Found) -> dict[str, Any]:
    """The measurements as one JSON object."""
    return asdict(found) | {"ratio": asdict(found.ratio), "limit": LIMIT, "machine": read_environment().words()}


def show(console: Console, found: Found) -> None:
    """Print the measurements and whether the goal is met."""
    ratio = found.ratio
    goal = "met" if ratio.value <= LIMIT else "not met"
    lines = [
        f"{MODEL}, two versions, SGD with momentum: {found.state / MIB:.1f} MiB of state, {len(found.stops)} repeats",
        f"pause of training      {_spread(found.stops)}",
        f"plain copy             {_spread(found.copies)}",
        f"ratio                  {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}), goal <= {LIMIT:g}: {goal}",
        f"on disk                {found.size / MIB:.1f} MiB, {found.size / found.state:.3f} of the state",
        f"one batch              {_spread(found.quiet)}; while a checkpoint is written {_spread(found.writing)}",
        ", ".join(read_environment().words().values()),
    ]
    say(console, "\n".join(lines), soft_wrap=True)


def _spread(seconds: tuple[float, ...]) -> str:
    return f"{median(seconds) * 1e3:.0f} ms ({min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f})"
