"""The numbers behind a figure, as a table; and curves with fewer points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stagewright.report.page import Bar, Bars, Curves, Pipeline, Point, Stacks, Table
from stagewright.report.timeline import kind_of, kinds_of
from stagewright.report.words import format_number, format_seconds, format_share

Figure = Bars | Stacks | Curves | Pipeline
_OPTIONAL = ("95 % interval", "limit", "note")  # columns that are left out where no row uses them


def table_of(figure: Figure) -> Table:
    """The numbers behind a figure."""
    match figure:
        case Bars():
            bars = [(b.label, format_number(b.value), interval(b), how(b.is_predicted), b.note) for b in figure.bars]
            return _used_columns(figure.title, ("", figure.unit, "95 % interval", "how", "note"), bars)
        case Stacks():
            names, rows = part_names(figure), []
            for stack in figure.stacks:
                parts = dict(stack.parts)
                own = (format_number(parts[name]) if name in parts else "" for name in names)
                limit = "" if stack.limit is None else format_number(stack.limit)
                rows.append((stack.label, *own, format_number(sum(parts.values())), limit))
            return _used_columns(figure.title, ("", *names, f"total {figure.unit}", "limit"), rows)
        case Curves():
            points = [(curve.label, point) for curve in figure.curves for point in curve.points]
            cells = [(label, format_number(one.x), format_number(one.y), interval(one)) for label, one in points]
            return _used_columns(figure.title, ("curve", figure.x, figure.y, "95 % interval"), cells)
        case Pipeline():
            return _of_pipeline(figure)


def how(is_predicted: bool) -> str:
    return "predicted" if is_predicted else "measured"


def interval(value: Bar | Point) -> str:
    """The 95 % interval of a value that has one."""
    if value.low is None or value.high is None:
        return ""
    return f"{format_number(value.low)} to {format_number(value.high)}"


def part_names(stacks: Stacks) -> list[str]:
    """The names of all parts of all stacks, in order of appearance."""
    return list(dict.fromkeys(name for stack in stacks.stacks for name, _ in stack.parts))


def _used_columns(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without the optional columns that no row uses."""
    used = [at for at, name in enumerate(columns) if name not in _OPTIONAL or any(row[at] for row in rows)]
    return Table(title, tuple(columns[at] for at in used), tuple(tuple(row[at] for at in used) for row in rows))


def _of_pipeline(pipeline: Pipeline) -> Table:
    """How each rank spent the time of the timeline; the share that it computes is the one of the whole page."""
    kinds, rows = kinds_of(pipeline), []
    for rank, label in enumerate(pipeline.ranks):
        own = [span for span in pipeline.timeline.spans if span.rank == rank]
        by_kind = (sum(span.end - span.start for span in own if kind_of(span) == kind) for kind in kinds)
        share = map(format_share, pipeline.shares[rank : rank + 1])
        rows.append((label, *share, *map(format_seconds, by_kind), str(len(own))))
    computes = ("computes",) if len(pipeline.shares) >= len(pipeline.ranks) > 0 else ()
    note = "Seconds are of all bars shown; the share leaves out start-up, evaluations and checkpoints." * bool(computes)
    return Table(pipeline.title, ("rank", *computes, *kinds, "spans"), tuple(rows), note)


def thinned(curves: Curves, most: int) -> Curves:
    """The curves with at most so many points each."""
    return replace(curves, curves=tuple(replace(one, points=_thinned(one.points, most)) for one in curves.curves))


def _thinned(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """The ends, and the lowest and highest of each interval with its mean, so that no peak is lost."""
    if len(points) <= most:
        return tuple(points)
    inner, intervals = points[1:-1], max(1, (most - 2) // 2)
    kept = [points[0]]
    for number in range(intervals):
        part = inner[len(inner) * number // intervals : len(inner) * (number + 1) // intervals]
        heights = [point.y for point in part]
        ends = {heights.index(min(heights)), heights.index(max(heights))}
        kept += [replace(part[at], mean=sum(heights) / len(part)) for at in sorted(ends)]
    return (*kept, points[-1])
