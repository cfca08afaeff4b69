"""What the monitor saw of a run: memory of its stages, throttled GPUs, and others on the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from stagewright.metrics import Use
from stagewright.plan.plan import Plan
from stagewright.report.record import read_uses


@dataclass(frozen=True, slots=True)
class Seen:
    """A run from outside; empty where nobody watched."""

    memory: tuple[int, ...] = ()  # bytes of the fullest rank of each stage
    gpu_memory: tuple[int, ...] = ()  # the same as the GPU's driver counts it
    others: float | None = None  # cores that other processes kept busy
    throttled: tuple[str, ...] = ()
    foreign: int = 0  # most processes of others on the GPUs


def watched(folder: Path, plan: Plan) -> Seen:
    """What the monitor of a run on this machine has left."""
    uses = [use for path in sorted(folder.glob("monitor*.jsonl")) for use in read_uses(path)]
    return seen(uses, plan) if uses else Seen()


def seen(uses: Sequence[Use], plan: Plan) -> Seen:
    """The peaks of its moments, and what was out of the ordinary."""
    ranks: dict[int, int] = {}
    gpus: dict[int, int] = {}
    for use in uses:
        for rank in use.ranks:
            held = rank.memory if rank.torch_memory is None else rank.torch_memory
            ranks[rank.rank] = max(ranks.get(rank.rank, 0), held)
        for gpu in use.gpus:
            if gpu.memory is not None:
                gpus[gpu.index] = max(gpus.get(gpu.index, 0), gpu.memory)
    placed = {rank: gpus[device.index % len(gpus)] for rank, device in enumerate(plan.devices)} if gpus else {}
    return Seen(
        memory=_by_stage(plan, ranks),
        gpu_memory=_by_stage(plan, placed),
        others=median(max(0.0, use.cores - sum(rank.cores for rank in use.ranks)) for use in uses),
        throttled=tuple(dict.fromkeys(reason for use in uses for gpu in use.gpus for reason in gpu.throttled)),
        foreign=max((gpu.foreign for use in uses for gpu in use.gpus), default=0),
    )


def _by_stage(plan: Plan, held: Mapping[int, int]) -> tuple[int, ...]:
    """The fullest rank of each stage."""
    return tuple(max(held.get(rank, 0) for rank in stage.ranks) for stage in plan.stages) if held else ()
