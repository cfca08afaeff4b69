"""What a checkpoint costs: how long training stands still beside a plain copy of the same state, and its size.

One rank, taken batch by batch. Once the pipeline is empty, both sides do their work in turn: the checkpoint that
`stagewright train` keeps, and nothing but a copy of its tensors into memory that is there already."""

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

from stagewright.bench.machine import machine
from stagewright.bench.statistics import Ratio, median_ratio
from stagewright.config.toml import make_config
from stagewright.events import Record, Saved
from stagewright.run.prepare import prepare
from stagewright.runtime.checkpoint.save import flats_of
from stagewright.runtime.process.emulate import Emulation
from stagewright.runtime.process.log import Ledger
from stagewright.runtime.stage.worker import Worker

LIMIT = 1.5  # of the time to copy the state
_REPEATS = 11
_MODEL = "resnet50"


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds of every repeat, and bytes."""

    stops: tuple[float, ...]  # that training stood still, once the pipeline was empty
    copies: tuple[float, ...]  # that a plain copy took
    quiet: tuple[float, ...]  # of a batch while nothing is written
    writing: tuple[float, ...]  # of a batch while a checkpoint is written
    state: int
    size: int

    @property
    def ratio(self) -> Ratio:
        return median_ratio(self.stops, self.copies)


def measure(tell: Callable[[str], None]) -> Found:
    """Take both sides in turns."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="stagewright-bench-") as folder:
        job, per_epoch = prepare(
            make_config(
                {
                    "model": {"name": _MODEL, "classes": 10},
                    "data": {"image": 32, "samples": 64},
                    "plan": {"placement": "0:0", "mode": "stale", "versions": "2", "batch": 4, "microbatches": 1},
                    "checkpoint": {"every": 1, "keep": 1},
                    "run": {"steps": 1000, "runs": folder},
                }
            )
        )
        saved: list[Record] = []
        with Ledger(job, per_epoch, saved.append) as ledger:
            (worker,) = Emulation(job, ledger.handle).workers
            found = _take_turns(worker, tell)
        size = next(record.bytes for record in saved if isinstance(record, Saved))
        return Found(**found, size=size)


def _take_turns(worker: Worker, tell: Callable[[str], None]) -> dict[str, Any]:
    state = [flat for _, flat in flats_of(worker.replicas[0])]
    room = [torch.empty_like(flat).fill_(0) for flat in state]
    series: dict[str, list[float]] = {"stops": [], "copies": [], "quiet": [], "writing": []}
    for repeat in range(_REPEATS + 1):
        tell(f"checkpoint {repeat} of {_REPEATS}")
        is_copy_first = repeat % 2 == 0
        times = {"quiet": _timed(_train, worker, 2 * repeat)}
        if is_copy_first:
            times["copies"] = _timed(_copy, state, room)
        times["stops"] = _timed(worker.saver.save, 2 * repeat + 1)
        times["writing"] = _timed(_train, worker, 2 * repeat + 1)
        worker.saver.close()
        if not is_copy_first:
            times["copies"] = _timed(_copy, state, room)
        if repeat:  # the first one warms up
            for name, seconds in times.items():
                series[name].append(seconds)
    return {name: tuple(values) for name, values in series.items()} | {"state": sum(flat.nbytes for flat in state)}


def _train(worker: Worker, batch: int) -> None:
    for pending in worker.train(range(batch, batch + 1)):
        pending.wait()


def _copy(state: list[Tensor], room: list[Tensor]) -> None:
    with torch.no_grad():
        for source, target in zip(state, room, strict=True):
            target.copy_(source)


def _timed(work: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def describe(found: Found) -> dict[str, Any]:
    return asdict(found) | {"ratio": asdict(found.ratio), "limit": LIMIT, "machine": machine()}


def show(console: Console, found: Found) -> None:
    ratio = found.ratio
    verdict = "met" if ratio.value <= LIMIT else "not met"
    mib = 2**20
    lines = [
        f"{_MODEL}, two versions, SGD with momentum: {found.state / mib:.1f} MiB of state, {len(found.stops)} repeats",
        f"training stands still  {_spread(found.stops)}",
        f"plain copy             {_spread(found.copies)}",
        f"ratio                  {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}), goal <= {LIMIT:g}: {verdict}",
        f"on the disk            {found.size / mib:.1f} MiB, {found.size / found.state:.3f} of the state",
        f"a batch                {_spread(found.quiet)}; while a checkpoint is written {_spread(found.writing)}",
        ", ".join(machine().values()),
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _spread(seconds: tuple[float, ...]) -> str:
    return f"{median(seconds) * 1e3:.0f} ms ({min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f})"
