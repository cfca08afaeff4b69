"""Figures as tables: what a chart says in numbers that can be read and copied."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stagewright.metrics import Span
from stagewright.report.page import Bars, Curve, Curves, Pipeline, Point, Stacks, Table

Figure = Bars | Stacks | Curves | Pipeline
KINDS = ("forward", "backward", "update", "transfer", "reduce", "waiting")
_OF_ACTIONS = {"F": "forward", "B": "backward", "U": "update", "R": "reduce", "A": "reduce"}
_NUMBER = re.compile(r"[-+~<>]?[\d][\d.,]*(e[-+]?\d+)?( ?(%|x|s|ms|µs|ns|[KMGT]iB))?( to [-+]?[\d.,]+)?")


def shown(value: float) -> str:
    """A number with four digits that matter."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    size = abs(value)
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}" if size < 1e15 else f"{value:.4g}"
    if size >= 0.001:
        return f"{value:.4g}"
    return f"{value:.3g}"


def seconds(value: float) -> str:
    """A duration in the unit that suits it."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= scale:
            return f"{shown(value / scale)} {unit}"
    return "0 s" if value == 0 else f"{shown(value * 1e9)} ns"


def is_numeric(values: list[str]) -> bool:
    """Whether a column holds numbers, so that it stands right."""
    known = [value for value in values if value not in ("", "-")]
    return bool(known) and all(_NUMBER.fullmatch(value) for value in known)


def kind_of(span: Span) -> str:
    """What a span counts as, of the kinds that a timeline tells apart."""
    return "waiting" if span.lane == "wait" else _OF_ACTIONS.get(span.kind, "transfer")


def table_of(figure: Figure) -> Table:
    """The numbers behind a figure."""
    if isinstance(figure, Bars):
        return _of_bars(figure)
    if isinstance(figure, Stacks):
        return _of_stacks(figure)
    return _of_curves(figure) if isinstance(figure, Curves) else _of_pipeline(figure)


def thinned(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """At most so many points: of each stretch the lowest and the highest, so that no peak is lost, and the ends."""
    if len(points) <= most:
        return tuple(points)
    inner, stretches = points[1:-1], max(1, (most - 2) // 2)
    kept = [points[0]]
    for number in range(stretches):
        stretch = inner[len(inner) * number // stretches : len(inner) * (number + 1) // stretches]
        ends = {
            min(range(len(stretch)), key=lambda at: stretch[at].y),
            max(range(len(stretch)), key=lambda at: stretch[at].y),
        }
        kept += [stretch[at] for at in sorted(ends)]
    return (*kept, points[-1])


def _of_bars(bars: Bars) -> Table:
    has_interval = any(bar.low is not None for bar in bars.bars)
    has_note = any(bar.note for bar in bars.bars)
    rows = []
    for bar in bars.bars:
        row = [bar.label, shown(bar.value)]
        if has_interval:
            known = bar.low is not None and bar.high is not None
            row.append(f"{shown(bar.low)} to {shown(bar.high)}" if known else "")  # type: ignore[arg-type]
        row.append("predicted" if bar.is_predicted else "measured")
        rows.append((*row, bar.note) if has_note else tuple(row))
    columns = ("", bars.unit, *(["95 % interval"] if has_interval else []), "how", *(["note"] if has_note else []))
    return Table(bars.title, columns, tuple(rows))


def part_names(stacks: Stacks) -> list[str]:
    """Every part of any stack, in the order they come."""
    return list(dict.fromkeys(name for stack in stacks.stacks for name, _ in stack.parts))


def _of_stacks(stacks: Stacks) -> Table:
    names = part_names(stacks)
    has_limit = any(stack.limit is not None for stack in stacks.stacks)
    rows = []
    for stack in stacks.stacks:
        parts = dict(stack.parts)
        row = [
            stack.label,
            *(shown(parts[name]) if name in parts else "" for name in names),
            shown(sum(parts.values())),
        ]
        if has_limit:
            row.append("" if stack.limit is None else shown(stack.limit))
        rows.append(tuple(row))
    columns = ("", *names, f"total {stacks.unit}", *(["limit"] if has_limit else []))
    return Table(stacks.title, columns, tuple(rows))


def _of_curves(curves: Curves) -> Table:
    has_band = any(point.low is not None for curve in curves.curves for point in curve.points)
    rows = tuple(_point_row(curve, point, has_band) for curve in curves.curves for point in curve.points)
    return Table(curves.title, ("curve", curves.x, curves.y, *(["95 % interval"] if has_band else [])), rows)


def _point_row(curve: Curve, point: Point, has_band: bool) -> tuple[str, ...]:
    row = (curve.label, shown(point.x), shown(point.y))
    if not has_band:
        return row
    known = point.low is not None and point.high is not None
    return (*row, f"{shown(point.low)} to {shown(point.high)}" if known else "")  # type: ignore[arg-type]


def _of_pipeline(pipeline: Pipeline) -> Table:
    """What each rank did with the time that the timeline covers."""
    spans = pipeline.timeline.spans
    end = pipeline.timeline.end
    rows = []
    for rank, label in enumerate(pipeline.ranks):
        own = [span for span in spans if span.rank == rank]
        by_kind = {kind: sum(span.end - span.start for span in own if kind_of(span) == kind) for kind in KINDS}
        busy = pipeline.timeline.busy(rank, 0.0, end) / end if end else 0.0
        rows.append((label, f"{busy:.1%}", *(seconds(by_kind[kind]) for kind in KINDS), str(len(own))))
    return Table(pipeline.title, ("rank", "computes", *KINDS, "spans"), tuple(rows))
