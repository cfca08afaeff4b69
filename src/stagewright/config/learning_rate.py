"""The learning rate of a batch, by the options of its schedule."""

from __future__ import annotations

import math

from stagewright.config.sections import ScheduleConfig


def learning_rate(base: float, schedule: ScheduleConfig, batch: int, batches: int, share: float = 1.0) -> float:
    """The learning rate of one batch in a run of `batches`; `share`: of the final rate, where a group has another."""
    if schedule.kind == "one-cycle":
        return _one_cycle(base, schedule, batch, batches)
    if batch < schedule.warmup:
        return base * (batch + 1) / schedule.warmup
    progress = min(1.0, (batch - schedule.warmup) / max(1, batches - schedule.warmup))
    final = schedule.final * share
    if schedule.kind == "step":
        falls = sum(batch >= int(step) for step in schedule.steps.split(",") if step.strip())
        return float(base * schedule.gamma**falls)
    if schedule.kind == "poly":
        return float(final + (base - final) * (1 - progress) ** schedule.power)
    if schedule.kind == "cosine":
        return final + (base - final) * (1 + math.cos(math.pi * progress)) / 2
    return base


def _one_cycle(peak: float, schedule: ScheduleConfig, batch: int, batches: int) -> float:
    """The rate of torch's OneCycleLR, which counts batches from 0 and peaks at a fraction of one; momentum stays."""
    top, last = schedule.peak * batches - 1, batches - 1
    batch, start = min(batch, last), peak / schedule.start_div
    begin, end, low, high = (0.0, top, start, peak) if batch <= top else (top, last, peak, start / schedule.final_div)
    progress = (batch - begin) / (end - begin) if end > begin else 1.0
    if schedule.anneal == "linear":
        return low + (high - low) * progress
    return high + (low - high) / 2 * (1 + math.cos(math.pi * progress))
