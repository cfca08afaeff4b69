"""Figures of a page: their numbers as tables, and their drawings as HTML.

Bars, stacks and curves need no script; sizes are percentages, so that they fit any screen. The page's policy forbids
styles in elements, so positions are attributes of SVG. `html` draws the timeline of a pipeline with a script.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stagewright.errors import printable
from stagewright.metrics import Span
from stagewright.report.page import Bar, Bars, Curve, Curves, Pipeline, Point, Stack, Stacks, Table

Figure = Bars | Stacks | Curves | Pipeline
KINDS = ("forward", "backward", "update", "transfer", "reduce", "waiting")
_COLOURS = 8
_NEAR_ZERO = 0.75  # of the highest value: an axis starts at zero if the lowest value is below this, not to exaggerate
_WIDE, _HIGH = 1000, 300  # units of a plot, which is then stretched
_OPTIONAL = ("95 % interval", "limit", "note")  # columns of tables that are left out where no row uses them
_KIND_OF_ACTION = {"F": "forward", "B": "backward", "U": "update", "R": "reduce", "T": "reduce", "A": "reduce"}
_NUMBER = re.compile(r"[-+~<>]?[\d][\d.,]*(e[-+]?\d+)?( ?(%|x|s|ms|µs|ns|[KMGT]iB))?( to [-+]?[\d.,]+)?")


def escape(text: str) -> str:
    """One line of text, as HTML shows it."""
    return html.escape(printable(text))


def format_number(value: float) -> str:
    """A number with four significant digits."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    size = abs(value)
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}" if size < 1e15 else f"{value:.4g}"
    if size >= 0.001:
        return f"{value:.4g}"
    return f"{value:.3g}"


def format_seconds(value: float) -> str:
    """A duration in a suitable unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= scale:
            return f"{format_number(value / scale)} {unit}"
    return "0 s" if value == 0 else f"{format_number(value * 1e9)} ns"


def is_numeric(values: list[str]) -> bool:
    """Whether a column holds only numbers, so that it is right-justified."""
    known = [value for value in values if value not in ("", "-")]
    return bool(known) and all(_NUMBER.fullmatch(value) for value in known)


def kind_of(span: Span) -> str:
    """Which of `KINDS` a span belongs to."""
    return "waiting" if span.lane == "wait" else _KIND_OF_ACTION.get(span.kind, "transfer")


def table_of(figure: Figure) -> Table:
    """The numbers behind a figure."""
    if isinstance(figure, Bars):
        return _of_bars(figure)
    if isinstance(figure, Stacks):
        return _of_stacks(figure)
    return _of_curves(figure) if isinstance(figure, Curves) else _of_pipeline(figure)


def thinned(curves: Curves, most: int) -> Curves:
    """The curves with at most so many points each."""
    return replace(curves, curves=tuple(Curve(one.label, _thinned(one.points, most)) for one in curves.curves))


def _thinned(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """The ends, and the lowest and highest of each interval, so that no peak is lost."""
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
        kept += [interval[at] for at in sorted(ends)]
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
    """How each rank spent the time of the timeline."""
    spans = pipeline.timeline.spans
    end = pipeline.timeline.end
    rows = []
    for rank, label in enumerate(pipeline.ranks):
        own = [span for span in spans if span.rank == rank]
        by_kind = {kind: sum(span.end - span.start for span in own if kind_of(span) == kind) for kind in KINDS}
        busy = pipeline.timeline.busy(rank, 0.0, end) / end if end else 0.0
        rows.append((label, f"{busy:.1%}", *(format_seconds(by_kind[kind]) for kind in KINDS), str(len(own))))
    return Table(pipeline.title, ("rank", "computes", *KINDS, "spans"), tuple(rows))


def draw_bars(bars: Bars) -> str:
    """Bars from zero, one below the other; a line shows the interval, and predicted bars are hatched."""
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
    fill = "predicted" if bar.is_predicted else "measured"
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
    return f'{_legend(names, "p")}<div class="bars" role="list">{rows}</div>'


def _stack(stack: Stack, names: Sequence[str], whole: float, unit: str) -> str:
    rects, at = [], 0.0
    for name, value in stack.parts:
        rects.append(
            f'<rect class="p{names.index(name) % _COLOURS}" x="{_share(at, whole)}" '
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


def draw_curves(curves: Curves) -> str:
    """Lines on shared axes, with a band where points have intervals."""
    drawn = [Curve(curve.label, _finite(curve.points)) for curve in curves.curves]
    points = [point for curve in drawn for point in curve.points]
    if not points:
        return '<p class="note">No points to draw.</p>'
    across = ticks(min(point.x for point in points), max(point.x for point in points))
    values = [value for point in points for value in (point.y, point.low, point.high) if value is not None]
    low, high = min(values), max(values)
    up = ticks(0.0 if 0 < low < _NEAR_ZERO * high else low, high)
    frame = _Frame(across[0], across[-1], up[0], up[-1])
    grid = "".join(f'<line class="grid" x1="0" x2="{_WIDE}" y1="{frame.y(y):.1f}" y2="{frame.y(y):.1f}"/>' for y in up)
    shapes = "".join(_curve(curve, frame, number) for number, curve in enumerate(drawn))
    legend = _legend([curve.label for curve in drawn], "c") if len(drawn) > 1 else ""
    labels_up = "".join(f"<span>{format_number(y)}</span>" for y in reversed(up))
    labels_across = "".join(f"<span>{format_number(x)}</span>" for x in across)
    return (
        f'{legend}<p class="axis">{escape(curves.y)}</p><div class="plot">'
        f'<div class="up" aria-hidden="true">{labels_up}</div>'
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" preserveAspectRatio="none" aria-hidden="true">{grid}{shapes}</svg>'
        f'<div class="across" aria-hidden="true">{labels_across}</div></div>'
        f'<p class="axis below">{escape(curves.x)}</p>'
    )


class _Frame:
    """Maps values to positions in a plot."""

    def __init__(self, left: float, right: float, bottom: float, top: float) -> None:
        self._left, self._right, self._bottom, self._top = left, right, bottom, top

    def x(self, value: float) -> float:
        return _WIDE * (value - self._left) / (self._right - self._left)

    def y(self, value: float) -> float:
        return _HIGH * (1 - (value - self._bottom) / (self._top - self._bottom))


def _curve(curve: Curve, frame: _Frame, number: int) -> str:
    colour = f"c{number % _COLOURS}"
    shapes = ""
    banded = [point for point in curve.points if point.low is not None and point.high is not None]
    if len(banded) > 1:
        outline = [(point.x, point.high) for point in banded] + [(point.x, point.low) for point in reversed(banded)]
        shapes += f'<polygon class="band {colour}" points="{_path(frame, outline)}"/>'
    if len(curve.points) == 1:
        x, y = frame.x(curve.points[0].x), frame.y(curve.points[0].y)
        return f'{shapes}<line class="line dot {colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
    dash = " dashed" if number >= _COLOURS else ""
    path = _path(frame, [(point.x, point.y) for point in curve.points])
    return f'{shapes}<polyline class="line {colour}{dash}" points="{path}"/>'


def _path(frame: _Frame, points: Iterable[tuple[float, float | None]]) -> str:
    return " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points if y is not None)


def _finite(points: Iterable[Point]) -> tuple[Point, ...]:
    return tuple(point for point in points if math.isfinite(point.x) and math.isfinite(point.y))


def ticks(low: float, high: float) -> list[float]:
    """A few evenly spaced round numbers, from at most the lowest value to at least the highest."""
    if high <= low:
        low, high = (low - 1, high + 1) if low == 0 else (low - abs(low) / 2, high + abs(high) / 2)
    rough = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _legend(names: Iterable[str], prefix: str) -> str:
    keys = "".join(
        f'<li><svg width="14" height="14" aria-hidden="true"><rect class="{prefix}{number % _COLOURS} key" '
        f'width="14" height="14"/></svg>{escape(name)}</li>'
        for number, name in enumerate(names)
    )
    return f'<ul class="legend">{keys}</ul>'


def _share(value: float, whole: float) -> str:
    return f"{100 * min(1.0, max(0.0, value / whole)):.2f}%" if math.isfinite(value) else "0%"
