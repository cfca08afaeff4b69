"""The page of a plan that has not run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stagewright.metrics import Timeline
from stagewright.report.figures import shown
from stagewright.report.page import Bar, Bars, Page, Pipeline, Stack, Stacks, Table, Verdict
from stagewright.report.record import Layout

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Outlook:
    """A prediction as a report needs it."""

    name: str
    layout: Layout
    plan: dict[str, Any]
    images_per_second: float
    bubble: float
    bound: str  # what the time goes to
    busy: tuple[float, ...]  # share of each rank's time
    memory: tuple[Mapping[str, float], ...]  # bytes by part, of each rank
    limits: tuple[int, ...]
    timeline: Timeline


def page_of_outlook(outlook: Outlook) -> Page:
    """Speed, memory by part and the timeline, all of it predicted."""
    ranks = outlook.layout.ranks
    stacks = tuple(
        Stack(label, tuple((name, size / _MIB) for name, size in parts.items() if size), limit / _MIB)
        for label, parts, limit in zip(ranks, outlook.memory, outlook.limits, strict=True)
    )
    busy = tuple(Bar(label, 100 * share, is_predicted=True) for label, share in zip(ranks, outlook.busy, strict=True))
    return Page(
        f"{outlook.name}: {outlook.plan['mode']} {outlook.plan['placement']}, predicted",
        (
            Verdict(tuple(_verdict(outlook))),
            Pipeline(
                "What each rank would do, while the pipeline fills, runs and drains", outlook.timeline, ranks, True
            ),
            Bars("Computing once the pipeline is full", "% of the time", busy),
            Stacks("Memory by part", "MiB", stacks),
            Table("Plan", ("what", "value"), _plan(outlook.plan)),
        ),
    )


def _plan(plan: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    values = {name: value for name, value in plan.items() if not isinstance(value, bool)}
    return tuple((name, ", ".join(map(str, v)) if isinstance(v, list) else str(v)) for name, v in values.items())


def _verdict(outlook: Outlook) -> list[str]:
    totals = [sum(parts.values()) for parts in outlook.memory]
    lines = [
        f"Predicted: {shown(outlook.images_per_second)} images/s; devices wait {outlook.bubble:.1%} of the time; "
        f"bound by {outlook.bound}.",
    ]
    short = [rank for rank, (total, limit) in enumerate(zip(totals, outlook.limits, strict=True)) if total > limit]
    if short:
        worst = max(short, key=lambda rank: totals[rank] / outlook.limits[rank])
        lines.append(
            f"It does not fit: {outlook.layout.ranks[worst]} needs {shown(totals[worst] / _MIB)} MiB "
            f"of {shown(outlook.limits[worst] / _MIB)}."
        )
    else:
        most = max(range(len(totals)), key=lambda rank: totals[rank])
        lines.append(f"The most memory needs {outlook.layout.ranks[most]}: {shown(totals[most] / _MIB)} MiB.")
    return lines
