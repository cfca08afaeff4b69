"""Figures of a page: their numbers as tables, and their drawings as HTML.

Bars and stacks need no script; sizes are percentages, so that they fit any screen. The page's policy forbids styles in
elements, so positions are attributes of SVG. Scripts draw curves, from what `encode_curves` gives them, and timelines.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stagewright.errors import printable
from stagewright.metrics import Span
from stagewright.report.page import Bar, Bars, Curve, Curves, Look, Pipeline, Point, Stack, Stacks, Table
from stagewright.report.words import format_number, format_seconds, format_share

Figure = Bars | Stacks | Curves | Pipeline
KINDS = ("forward", "backward", "update", "evaluation", "transfer", "reduce", "waiting")
COLOURS = 8  # that figures tell apart
_DIGITS = 6  # of a point that a script draws
_NOISY = 100  # points from which a line is smoothed at first
_SMOOTHING = 0.6
_CAN_SMOOTH = 20  # points that a line needs to be smoothed at all
_OPTIONAL = ("95 % interval", "limit", "note")  # columns of tables that are left out where no row uses them
_KIND_OF_ACTION = {"F": "forward", "B": "backward", "U": "update", "R": "reduce", "T": "reduce", "A": "reduce"}
_SHAPES = (  # circle, square, triangle, diamond
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
    "M-3.5 -3.5h7v7h-7z",
    "M0 -4.6L4.6 3.4H-4.6z",
    "M0 -5L5 0L0 5L-5 0z",
)
_EVALUATED = re.compile(r"[0-9]+F[0-9]+")


def escape(text: str) -> str:
    """One line of text, as HTML shows it."""
    return html.escape(printable(text))


def kind_of(span: Span) -> str:
    """Which of `KINDS` a span belongs to; a forward without a version is one of an evaluation."""
    if span.lane == "wait":
        return "waiting"
    return "evaluation" if is_evaluation(span) else _KIND_OF_ACTION.get(span.kind, "transfer")


def is_evaluation(span: Span) -> bool:
    """Whether a span is a forward of an evaluation, which uses the newest weights and has no version."""
    return span.kind == "F" and span.lane == "compute" and _EVALUATED.fullmatch(span.name) is not None


def table_of(figure: Figure) -> Table:
    """The numbers behind a figure."""
    if isinstance(figure, Bars):
        return _of_bars(figure)
    if isinstance(figure, Stacks):
        return _of_stacks(figure)
    return _of_curves(figure) if isinstance(figure, Curves) else _of_pipeline(figure)


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
        interval = inner[len(inner) * number // intervals : len(inner) * (number + 1) // intervals]
        ends = {
            min(range(len(interval)), key=lambda at: interval[at].y),
            max(range(len(interval)), key=lambda at: interval[at].y),
        }
        mean = sum(point.y for point in interval) / len(interval)
        kept += [replace(interval[at], mean=mean) for at in sorted(ends)]
    return (*kept, points[-1])


def _used_columns(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without the optional columns that no row uses."""
    used = [at for at, name in enumerate(columns) if name not in _OPTIONAL or any(row[at] for row in rows)]
    return Table(title, tuple(columns[at] for at in used), tuple(tuple(row[at] for at in used) for row in rows))


def _of_bars(bars: Bars) -> Table:
    rows = [
        (bar.label, format_number(bar.value), _interval(bar), "predicted" if bar.is_predicted else "measured", bar.note)
        for bar in bars.bars
    ]
    return _used_columns(bars.title, ("", bars.unit, "95 % interval", "how", "note"), rows)


def part_names(stacks: Stacks) -> list[str]:
    """The names of all parts of all stacks, in order of appearance."""
    return list(dict.fromkeys(name for stack in stacks.stacks for name, _ in stack.parts))


def _of_stacks(stacks: Stacks) -> Table:
    names = part_names(stacks)
    rows = []
    for stack in stacks.stacks:
        parts = dict(stack.parts)
        own = (format_number(parts[name]) if name in parts else "" for name in names)
        limit = "" if stack.limit is None else format_number(stack.limit)
        rows.append((stack.label, *own, format_number(sum(parts.values())), limit))
    return _used_columns(stacks.title, ("", *names, f"total {stacks.unit}", "limit"), rows)


def _of_curves(curves: Curves) -> Table:
    rows = [
        (curve.label, format_number(point.x), format_number(point.y), _interval(point))
        for curve in curves.curves
        for point in curve.points
    ]
    return _used_columns(curves.title, ("curve", curves.x, curves.y, "95 % interval"), rows)


def _interval(value: Bar | Point) -> str:
    known = value.low is not None and value.high is not None
    return f"{format_number(value.low)} to {format_number(value.high)}" if known else ""  # type: ignore[arg-type]


def _of_pipeline(pipeline: Pipeline) -> Table:
    """How each rank spent the time of the timeline; the share that it computes is the one of the whole page."""
    spans = pipeline.timeline.spans
    kinds = kinds_of(pipeline)
    rows = []
    for rank, label in enumerate(pipeline.ranks):
        own = [span for span in spans if span.rank == rank]
        by_kind = {kind: sum(span.end - span.start for span in own if kind_of(span) == kind) for kind in kinds}
        share = (format_share(pipeline.shares[rank]),) if rank < len(pipeline.shares) else ()
        rows.append((label, *share, *(format_seconds(by_kind[kind]) for kind in kinds), str(len(own))))
    computes = ("computes",) if len(pipeline.shares) >= len(pipeline.ranks) > 0 else ()
    note = "Seconds are of all bars shown; the share leaves out start-up, evaluations and checkpoints." * bool(computes)
    return Table(pipeline.title, ("rank", *computes, *kinds, "spans"), tuple(rows), note)


def kinds_of(pipeline: Pipeline) -> list[str]:
    """The kinds of spans that a timeline has, in the order of `KINDS`."""
    found = {kind_of(span) for span in pipeline.timeline.spans}
    return [kind for kind in KINDS if kind in found]


def draw_bars(bars: Bars) -> str:
    """Bars from zero, one below the other; a line shows the interval, and predicted bars are outlined."""
    most = max((max(bar.value, bar.high or 0.0) for bar in bars.bars if math.isfinite(bar.value)), default=0.0)
    whole = max(most, 100.0) if bars.unit.startswith("%") else most or 1.0
    return f'<div class="bars" role="list">{"".join(_bar(bar, whole, bars.unit) for bar in bars.bars)}</div>'


def _bar(bar: Bar, whole: float, unit: str) -> str:
    tag = '<span class="tag">predicted</span>' if bar.is_predicted else ""
    note = f'<span class="note">{escape(bar.note)}</span>' if bar.note else ""
    interval = whisker = ""
    if bar.low is not None and bar.high is not None:
        interval = f'<span class="interval">{_interval(bar)}</span>'
        low, high = _share(bar.low, whole), _share(bar.high, whole)
        whisker = (
            f'<line class="whisker" x1="{low}" x2="{high}" y1="10" y2="10"/>'
            f'<line class="whisker" x1="{low}" x2="{low}" y1="5" y2="15"/>'
            f'<line class="whisker" x1="{high}" x2="{high}" y1="5" y2="15"/>'
        )
    fill = f"{'predicted' if bar.is_predicted else 'measured'} p{bar.colour % COLOURS}"
    return (
        f'<div class="bar" role="listitem"><span class="label">{escape(bar.label)}{tag}</span>'
        f'<svg width="100%" height="20" aria-hidden="true"><rect class="track" width="100%" height="20"/>'
        f'<rect class="{fill}" width="{_share(bar.value, whole)}" height="20"/>{whisker}</svg>'
        f'<span class="value"><b>{format_number(bar.value)}</b> {escape(unit)} {interval}{note}</span></div>'
    )


def draw_stacks(stacks: Stacks) -> str:
    """Bars made of named parts; a line marks the limit."""
    names = part_names(stacks)
    most = max((sum(value for _, value in stack.parts) for stack in stacks.stacks), default=0.0)
    limits = [stack.limit for stack in stacks.stacks if stack.limit is not None]
    whole = max([most, *(limit for limit in limits if limit < 4 * most)]) or 1.0
    rows = "".join(_stack(stack, names, whole, stacks.unit) for stack in stacks.stacks)
    return f'{_legend(names) if len(names) > 1 else ""}<div class="bars" role="list">{rows}</div>'


def _stack(stack: Stack, names: Sequence[str], whole: float, unit: str) -> str:
    rects, at = [], 0.0
    for name, value in stack.parts:
        rects.append(
            f'<rect class="p{names.index(name) % COLOURS}" x="{_share(at, whole)}" '
            f'width="{_share(value, whole)}" height="20">'
            f"<title>{escape(name)}: {format_number(value)} {escape(unit)}</title></rect>"
        )
        at += value
    limit = ""
    if stack.limit is not None:
        if stack.limit <= whole:
            x = _share(stack.limit, whole)
            rects.append(f'<line class="limit" x1="{x}" x2="{x}" y1="0" y2="20"/>')
        limit = f'<span class="interval">of {format_number(stack.limit)}</span>'
    return (
        f'<div class="bar" role="listitem"><span class="label">{escape(stack.label)}</span>'
        f'<svg width="100%" height="20" aria-hidden="true"><rect class="track" width="100%" height="20"/>'
        f"{''.join(rects)}</svg>"
        f'<span class="value"><b>{format_number(at)}</b> {escape(unit)} {limit}</span></div>'
    )


def encode_curves(curves: Curves) -> str:
    """What the script that draws curves needs, as JSON for an element; values that are not finite become null."""
    found = []
    for number, curve in enumerate(curves.curves):
        points = curve.points
        known = {
            "label": printable(curve.label),
            "look": curve.look,
            "colour": number if curve.colour is None else curve.colour,
            "shape": shape_of(curve),
            "x": [_rounded(point.x) for point in points],
            "y": [_rounded(point.y) for point in points],
        }
        for name in ("low", "high", "mean"):
            values = [getattr(point, name) for point in points]
            if any(value is not None for value in values):
                known[name] = [_rounded(value) for value in values]
        found.append(known)
    data = {
        "x": printable(curves.x),
        "y": printable(curves.y),
        "fromZero": curves.from_zero,
        "curves": found,
        "marks": [(mark.kind, _rounded(mark.start), _rounded(mark.end), mark.curve) for mark in curves.marks],
    }
    return json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")


def shape_of(curve: Curve) -> str:
    """The outline of a curve's points around zero, as SVG writes it."""
    return _SHAPES[curve.shape % len(_SHAPES)]


def _rounded(value: float | None) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded == int(rounded) else rounded


def smoothing_of(curves: Curves) -> float | None:
    """How much lines are smoothed at first; None where none has enough points to be smoothed."""
    most = max((len(curve.points) for curve in curves.curves if curve.look is Look.LINE), default=0)
    return None if most < _CAN_SMOOTH else _SMOOTHING if most >= _NOISY else 0.0


def has_log_axis(curves: Curves) -> bool:
    """Whether values can be shown on a logarithmic axis: not shares, and none below or at zero."""
    values = [point.y for curve in curves.curves for point in curve.points if math.isfinite(point.y)]
    return bool(values) and min(values) > 0 and "%" not in curves.y


def _legend(names: Iterable[str]) -> str:
    keys = "".join(
        f'<li><svg width="14" height="14" aria-hidden="true"><rect class="p{number % COLOURS}" width="14" '
        f'height="14" rx="3"/></svg>{escape(name)}</li>'
        for number, name in enumerate(names)
    )
    return f'<ul class="legend">{keys}</ul>'


def _share(value: float, whole: float) -> str:
    return f"{100 * min(1.0, max(0.0, value / whole)):.2f}%" if math.isfinite(value) else "0%"
