"""What the monitor saw of a run: memory of its stages, throttled GPUs, and others on the machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from stagewright.bench.outcome import Repeat
from stagewright.plan.plan import Plan

_FILE = "monitor.jsonl"


def watched(folder: Path, plan: Plan) -> Repeat:
    """A repeat with nothing in it but what the run's monitor tells; where there was none, nothing at all."""
    uses = list(_lines(folder / _FILE))
    nothing = Repeat(0.0, 0, False, (), None, folder.name)
    if not uses:
        return nothing
    memory: dict[int, int] = {}
    gpus: dict[int, int] = {}
    reasons: dict[str, None] = {}
    foreign, others = 0, []
    for use in uses:
        own = 0.0
        for rank in use.get("ranks", ()):
            held = rank.get("torch_memory") or rank["memory"]
            memory[rank["rank"]] = max(memory.get(rank["rank"], 0), held)
            own += rank["cores"]
        others.append(max(0.0, use["cores"] - own))
        for gpu in use.get("gpus", ()):
            gpus[gpu["index"]] = max(gpus.get(gpu["index"], 0), gpu["memory"])
            reasons.update(dict.fromkeys(gpu.get("throttled", ())))
            foreign = max(foreign, gpu.get("foreign", 0))
    return Repeat(
        *(0.0, 0, False, (), None, folder.name),
        memory=_by_stage(plan, memory),
        gpu_memory=_by_stage(plan, {rank: gpus[rank % len(gpus)] for rank in range(plan.world)}) if gpus else (),
        others=median(others),
        throttled=tuple(reasons),
        foreign=foreign,
    )


def _by_stage(plan: Plan, held: dict[int, int]) -> tuple[int, ...]:
    """The fullest rank of each stage."""
    if not held:
        return ()
    return tuple(max(held.get(rank, 0) for rank in stage.ranks) for stage in plan.stages)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines; a run that was ended may leave a torn one."""
    if not path.is_file():
        return
    for line in path.read_text(errors="replace").splitlines():
        try:
            use = json.loads(line)
            use["cores"], use["ranks"]
            yield use
        except (ValueError, KeyError, TypeError):
            continue
