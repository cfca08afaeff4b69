"""Run folders made by hand, for tests of reports."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stagewright.events import Evaluated, GpuUsage, RankUsage, Step, Usage
from stagewright.metrics import Span, Timeline

PLAN = {
    "mode": "stale",
    "placement": "0:0-1.0:2",
    "cuts": ["classifier.0"],
    "batch": 64,
    "microbatches": 4,
    "versions": [2, 1],
    "depths": [3, 1],
    "agree": False,
    "flags": False,
}
CONFIG = """
[model]
name = "{model}"
[data]
source = "synthetic"
[optimizer]
name = "sgd"
lr = 0.02
[run]
precision = "fp32"
device = "cpu"
seed = 0
emulate = {emulate}
"""


def steps(count: int, batch: int = 64, speed: float = 320.0) -> list[Step]:
    """Batches of the same speed; the loss halves every ten, and an epoch has eight."""
    seconds = batch / speed
    return [Step(p, p // 8, 2.0 * 0.5 ** (p / 10), 0.02, (p + 1) * seconds, speed) for p in range(count)]


def timeline(batches: int = 3) -> Timeline:
    """Two ranks of stage 0 that compute 40 % of the time each, and one of stage 1 that always computes; M = 4."""
    spans = []
    for i in range(4 * batches):
        start, rank, version = i * 0.05, i % 2, max(0, i // 4 - 1)
        spans.append(Span(rank, "compute", "F", f"0F{i}@{version}", start, start + 0.015))
        spans.append(Span(rank, "compute", "B", f"0B{i}@{version}", start + 0.015, start + 0.04))
        spans.append(Span(rank, "wait", "RG", f"0RG{i}<2", start + 0.04, start + 0.1))
        spans.append(Span(rank, "transfer", "SA", f"0SA{i}>2", start + 0.015, start + 0.02))
        spans.append(Span(2, "compute", "F", f"1F{i}@{i // 4}", start, start + 0.02))
        spans.append(Span(2, "compute", "B", f"1B{i}@{i // 4}", start + 0.02, start + 0.05))
    return Timeline(tuple(spans))


def delayed(trace: Timeline, microbatch: int, by: float) -> Timeline:
    """A timeline that pauses for some seconds before a microbatch."""
    spans = []
    for span in trace.spans:
        moved = by if int(re.findall(r"[A-Z]+(\d+)", span.name)[0]) >= microbatch else 0.0
        spans.append(replace(span, start=span.start + moved, end=span.end + moved))
    return Timeline(tuple(spans))


def usage(count: int = 5, gpus: int = 0) -> list[Usage]:
    """Samples one second apart: rank r holds 100 + r MiB at first, and one more every second."""
    mib = 2**20
    return [
        Usage(
            float(second),
            2.0,
            1000 * mib,
            tuple(
                GpuUsage(
                    f"GPU-{g}", g, 2000 * mib, 0.9, 250.0, 1e3 + 250.0 * second, 60.0 + g, 1.7e9, ("power",)[: g % 2]
                )
                for g in range(gpus)
            ),
            tuple(RankUsage(r, (100 + r + second) * mib, 0.5) for r in range(3)),
        )
        for second in range(count)
    ]


def make_run(
    folder: Path,
    records: list[Any] | None = None,
    *,
    summary: dict[str, Any] | None = None,
    is_finished: bool = True,
    plan: dict[str, Any] | None = None,
    model: str = "vgg-small",
    emulate: bool = False,
    trace: Timeline | None = None,
    monitor: list[Usage] | None = None,
) -> Path:
    """A run folder as `train` leaves it."""
    folder.mkdir(parents=True)
    records = [*steps(20), Evaluated(20, 512, 0.5, {"top1": 0.75, "top5": 0.99})] if records is None else records
    (folder / "plan.json").write_text(json.dumps(PLAN | (plan or {})))
    (folder / "config.toml").write_text(CONFIG.format(model=model, emulate=str(emulate).lower()))
    (folder / "env.json").write_text(json.dumps({"command": ["/x/cli.py", "train", "--steps", "20"], "python": "3.11"}))
    (folder / "job.json").write_text(json.dumps({"batches": 20}))
    lines = [json.dumps({"kind": type(record).__name__.lower(), **asdict(record)}) for record in records]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    if monitor is not None:
        (folder / "monitor.jsonl").write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in monitor))
    if is_finished:
        trained = [record for record in records if isinstance(record, Step)]
        known = {"images_per_second": 320.0 if trained else None, "predicted_images_per_second": None}
        (folder / "summary.json").write_text(json.dumps(known | {"skipped_updates": [0, 0]} | (summary or {})))
        (folder / "trace.json").write_text(json.dumps((trace or timeline()).chrome_trace()))
    return folder


def append(folder: Path, *records: Any) -> None:
    """Append records to the metrics of a run."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"kind": type(r).__name__.lower(), **asdict(r)}) + "\n" for r in records)
