"""Figures of a page, as HTML: drawings, legends, controls and what screen readers say of them.

Bars and stacks need no script; sizes are percentages, so that they fit any screen. The page's policy forbids styles in
elements, so positions are attributes of SVG. Scripts draw curves, from what `encode_curves` gives them, and timelines.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from stagewright.errors import printable
from stagewright.report.numbers import Figure, how, interval, part_names
from stagewright.report.page import MARKS, Bar, Bars, Curve, Curves, Look, Mark, Pipeline, Stack, Stacks
from stagewright.report.timeline import ACTION_WORDS, encode, first_view, kinds_of
from stagewright.report.words import format_number, format_seconds, upper_first

COLOURS = 8  # that figures tell apart
_DIGITS = 6  # of a point that a script draws
_NOISY = 100  # points from which a line is smoothed at first
_SMOOTHING = 0.6
_CAN_SMOOTH = 20  # points that a line needs to be smoothed at all
_MOST_SAID = 8  # curves in a description
_SHAPES = (  # circle, square, triangle, diamond
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
    "M-3.5 -3.5h7v7h-7z",
    "M0 -4.6L4.6 3.4H-4.6z",
    "M0 -5L5 0L0 5L-5 0z",
)
_HINTS = (
    "Drag to move, pinch or turn the wheel to zoom, touch or point at a bar to read it. By keyboard: arrows to move, "
    "+ and - to zoom, 0 to show all, m to the next evaluation or checkpoint; full stop and comma go from bar to bar, "
    "up and down from rank to rank."
)
_CURVE_HINTS = (
    "Point at it, or use the arrow keys, to read values; Home and End go to the ends, Escape hides the readout."
)
_CODE = (
    "A bar's code is stage, action, microbatch and @version of the weights: 0F3@2 is stage 0, forward, microbatch 3, "
    "version 2. A message also names the other rank: 0SA3>2."
)
_BUTTONS = (  # of a timeline: what the script does, its name, its sign
    ("in", "Zoom in", "+"),
    ("out", "Zoom out", "\N{MINUS SIGN}"),
    ("left", "Earlier", "◀"),
    ("right", "Later", "▶"),
    ("whole", "Show all", "All"),
    ("first", "Show the first view", "Steady part"),
)


def escape(text: str) -> str:
    """One line of text, as HTML shows it."""
    return html.escape(printable(text))


def swatch(name: str) -> str:
    """A spot of a colour, by its class."""
    return (
        f'<svg class="swatch" width="12" height="12" aria-hidden="true">'
        f'<rect class="{name}" width="12" height="12" rx="3"/></svg>'
    )


def draw(figure: Figure, part: str) -> tuple[str, str]:
    """A figure of the part of a page with this id, and its description for screen readers."""
    match figure:
        case Bars():
            return _draw_bars(figure)
        case Stacks():
            return _draw_stacks(figure), f"{len(figure.stacks)} bars, {figure.unit}, by part."
        case Curves():
            return _draw_curves(figure), _about_curves(figure)
        case Pipeline():
            return _draw_pipeline(figure, part)


# --- Bars and stacks --------------------------------------------------------------------------------------------------


def _draw_bars(figure: Bars) -> tuple[str, str]:
    """Bars from zero, one below the other; a line shows the interval, and predicted bars are outlined."""
    bars, unit = figure.bars, figure.unit
    most = max((max(bar.value, bar.high or 0.0) for bar in bars if math.isfinite(bar.value)), default=0.0)
    whole = max(most, 100.0) if unit.startswith("%") else most or 1.0
    parts = ["No bars."]
    if known := [bar for bar in bars if bar.value == bar.value]:
        parts = [f"{len(bars)} bars, {unit}; longest: {max(known, key=lambda bar: bar.value).label}."]
        parts += ["Lines are 95 % intervals."] * any(bar.low is not None for bar in bars)
        parts += ["Outlined bars are predicted."] * any(bar.is_predicted for bar in bars)
    return f'<div class="bars" role="list">{"".join(_bar(bar, whole, unit) for bar in bars)}</div>', " ".join(parts)


def _bar(bar: Bar, whole: float, unit: str) -> str:
    tag = '<span class="tag">predicted</span>' if bar.is_predicted else ""
    colour = f"{how(bar.is_predicted)} p{bar.colour % COLOURS}"
    drawn = f'<rect class="{colour}" width="{_share(bar.value, whole)}" height="20"/>'
    more = ""
    if spread := interval(bar):
        low, high = _share(bar.low or 0.0, whole), _share(bar.high or 0.0, whole)
        for left, right, top, bottom in ((low, high, 10, 10), (low, low, 5, 15), (high, high, 5, 15)):
            drawn += f'<line class="whisker" x1="{left}" x2="{right}" y1="{top}" y2="{bottom}"/>'
        more = f'<span class="interval">{spread}</span>'
    more += f'<span class="note">{escape(bar.note)}</span>' if bar.note else ""
    return _row(f"{escape(bar.label)}{tag}", drawn, bar.value, unit, more)


def _row(label: str, drawn: str, value: float, unit: str, more: str) -> str:
    """A label, what is drawn behind it, and its value."""
    return (
        f'<div class="bar" role="listitem"><span class="label">{label}</span>'
        f'<svg width="100%" height="20" aria-hidden="true"><rect class="track" width="100%" height="20"/>{drawn}</svg>'
        f'<span class="value"><b>{format_number(value)}</b> {escape(unit)} {more}</span></div>'
    )


def _draw_stacks(stacks: Stacks) -> str:
    """Bars made of named parts; a line marks the limit."""
    names = part_names(stacks)
    most = max((sum(value for _, value in stack.parts) for stack in stacks.stacks), default=0.0)
    whole = max([most, *(one.limit for one in stacks.stacks if one.limit is not None and one.limit < 4 * most)]) or 1.0
    rows = "".join(_stack(stack, names, whole, stacks.unit) for stack in stacks.stacks)
    keys = "".join(f"<li>{swatch(f'p{number % COLOURS}')}{escape(name)}</li>" for number, name in enumerate(names))
    legend = f'<ul class="legend">{keys}</ul>' if len(names) > 1 else ""
    return f'{legend}<div class="bars" role="list">{rows}</div>'


def _stack(stack: Stack, names: Sequence[str], whole: float, unit: str) -> str:
    drawn, at = "", 0.0
    for name, value in stack.parts:
        drawn += (
            f'<rect class="p{names.index(name) % COLOURS}" x="{_share(at, whole)}" '
            f'width="{_share(value, whole)}" height="20">'
            f"<title>{escape(name)}: {format_number(value)} {escape(unit)}</title></rect>"
        )
        at += value
    if stack.limit is None:
        return _row(escape(stack.label), drawn, at, unit, "")
    if stack.limit <= whole:
        x = _share(stack.limit, whole)
        drawn += f'<line class="limit" x1="{x}" x2="{x}" y1="0" y2="20"/>'
    return _row(escape(stack.label), drawn, at, unit, f'<span class="interval">of {format_number(stack.limit)}</span>')


def _share(value: float, whole: float) -> str:
    return f"{100 * min(1.0, max(0.0, value / whole)):.2f}%" if math.isfinite(value) else "0%"


# --- Curves -----------------------------------------------------------------------------------------------------------


def _draw_curves(block: Curves) -> str:
    """A plot that a script draws, with a button for every curve, and what lines can be changed by."""
    keys = "".join(
        f'<li><button type="button" class="toggle" aria-pressed="true" data-curve="{number}">'
        f"{_key(curve, number)}{escape(curve.label)}</button></li>"
        for number, curve in enumerate(block.curves)
    )
    legend = f'<ul class="legend">{keys}{_mark_keys(block.marks)}</ul>' if len(block.curves) > 1 or block.marks else ""
    tools = ""
    if (
        most := max((len(curve.points) for curve in block.curves if curve.look is Look.LINE), default=0)
    ) >= _CAN_SMOOTH:
        smoothing = f'min="0" max="0.95" step="0.05" value="{_SMOOTHING if most >= _NOISY else 0.0:g}"'
        tools += f'<label class="smooth">Smoothing <input type="range" {smoothing}></label>'
    values = [point.y for curve in block.curves for point in curve.points if math.isfinite(point.y)]
    if values and min(values) > 0 and "%" not in block.y:
        tools += '<button type="button" class="log" aria-pressed="false">Log axis</button>'
    return (
        f'<div class="curves"><div class="controls">{legend}<div class="tools">{tools}</div></div>'
        f'<div class="plot"><svg tabindex="0" role="application" aria-roledescription="chart" '
        f'aria-label="{escape(block.title)}. {_CURVE_HINTS}"></svg><div class="tip" hidden></div></div>'
        f'<noscript><p class="note">This chart needs a script; its numbers are below.</p></noscript>'
        f'<p class="live hidden" role="status" aria-live="polite"></p>{_data(encode_curves(block))}</div>'
    )


def _data(values: Any) -> str:
    """Values for a script, in an element that no text in them can end."""
    text = json.dumps(values, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


def encode_curves(curves: Curves) -> dict[str, Any]:
    """What the script that draws curves needs; values that are not finite become null."""
    found: list[dict[str, Any]] = []
    for number, curve in enumerate(curves.curves):
        colour = number if curve.colour is None else curve.colour
        found.append({"label": printable(curve.label), "look": curve.look, "colour": colour, "shape": _shape(curve)})
        for name in ("x", "y", "low", "high", "mean"):
            values = [getattr(point, name) for point in curve.points]
            if name in "xy" or any(value is not None for value in values):
                found[-1][name] = list(map(_rounded, values))
    return {
        "x": printable(curves.x),
        "y": printable(curves.y),
        "fromZero": curves.from_zero,
        "curves": found,
        "marks": [(mark.kind, _rounded(mark.start), _rounded(mark.end), mark.curve) for mark in curves.marks],
    }


def _rounded(value: float | None) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded == int(rounded) else rounded


def _shape(curve: Curve) -> str:
    """The outline of a curve's points around zero, as SVG writes it."""
    return _SHAPES[curve.shape % len(_SHAPES)]


def _key(curve: Curve, number: int) -> str:
    """The sign of a curve in its legend: a line, a point, or a dashed line."""
    numbered = number if curve.colour is None else curve.colour
    colour = f"c{numbered % COLOURS}"
    if curve.look is Look.POINTS:
        inner = f'<path class="dot {colour}" d="{_shape(curve)}" transform="translate(9 7)"/>'
    else:
        dash = " dashed" if curve.look is Look.REFERENCE or numbered >= COLOURS else ""
        inner = f'<line class="line {colour}{dash}" x1="0" x2="18" y1="7" y2="7"/>'
    return f'<svg class="swatch" width="18" height="14" aria-hidden="true">{inner}</svg>'


def _mark_keys(marks: Iterable[Mark], without: Sequence[str] = ()) -> str:
    """The legend of the marks that a figure has."""
    found = {mark.kind for mark in marks}
    return "".join(f"<li>{swatch(f'k-{kind}')}{kind}</li>" for kind in MARKS if kind in found and kind not in without)


def _about_curves(curves: Curves) -> str:
    """The ends of the first curves, and their extremes where those differ from the ends."""
    parts, more = [], len(curves.curves) - _MOST_SAID
    for curve in (curve for curve in curves.curves[:_MOST_SAID] if curve.points):
        first, last = (format_number(curve.points[end].y) for end in (0, -1))
        known = [point.y for point in curve.points if math.isfinite(point.y)]
        extremes = (("lowest", min(known)), ("highest", max(known))) if known else ()
        said = [f"{name} {shown}" for name, y in extremes if (shown := format_number(y)) not in (first, last)]
        parts.append(f"{curve.label}: {', '.join((f'first {first}', f'last {last}', *said))}")
    band = " Shaded: 95 % intervals." if any(p.low is not None for c in curves.curves for p in c.points) else ""
    return f"{'; '.join(parts)}{f'; and {more} more' if more > 0 else ''}.{band}" if parts else "No points."


# --- Timelines --------------------------------------------------------------------------------------------------------


def _draw_pipeline(block: Pipeline, part: str) -> tuple[str, str]:
    shown = len(block.timeline.spans)
    bars = (
        f"the last {shown:,} bars of {block.total:,}; the trace has them all"
        if block.total > shown
        else f"{shown:,} bars"
    )
    about = f"{len(block.ranks)} ranks over {format_seconds(block.timeline.end)}, {bars}."
    about = f"{upper_first(how(block.is_predicted))}: {about}"
    encoded, kinds = encode(block.timeline), kinds_of(block)
    found = {mark for mark, _, _ in encoded["operations"]}
    words = "".join(
        f"<li><b>{escape(mark)}</b> {escape(text)}</li>" for mark, text in ACTION_WORDS.items() if mark in found
    )
    marks = [(mark.kind, mark.start, mark.end) for mark in block.marks]
    keys = "".join(f"<li>{swatch(f'k-{kind}')}{kind}</li>" for kind in kinds) + _mark_keys(block.marks, kinds)
    buttons = "".join(
        f'<button type="button" data-does="{does}" aria-label="{label}">{sign}</button>'
        for does, label, sign in _BUTTONS
    )
    return (
        f'<div class="timeline" id="{part}-timeline"><div class="controls"><ul class="legend">{keys}</ul>'
        f'<div class="buttons">{buttons}<span class="range" data-shows="range"></span></div></div><div class="canvas">'
        f'<canvas tabindex="0" role="application" aria-roledescription="timeline" '
        f'aria-label="{escape(block.title)}. {escape(about)} {_HINTS}"></canvas>'
        f'<div class="tip" hidden></div></div><p class="live" role="status" aria-live="polite"></p>'
        f'<ul class="codes" aria-label="Codes of actions">{words}</ul>'
        f'<details class="how"><summary>How to read and move it</summary><p class="note">{_HINTS}</p>'
        f'<p class="note">{escape(_CODE)} {escape(about)}</p></details>'
        f"{_data({**encoded, 'ranks': block.ranks, 'marks': marks, 'view': first_view(block)})}</div>"
    ), about
