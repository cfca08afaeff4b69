"""A page as one HTML file that works offline: style and script are inside, and the policy lets nothing else load."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from urllib.parse import quote

from stagewright.report.charts import (
    COLOURS,
    draw_bars,
    draw_stacks,
    encode_curves,
    escape,
    has_log_axis,
    kinds_of,
    shape_of,
    smoothing_of,
    table_of,
    thinned,
)
from stagewright.report.page import (
    MARKS,
    Bars,
    Block,
    Curve,
    Curves,
    Listing,
    Look,
    Mark,
    Note,
    Page,
    Pipeline,
    Stacks,
    Summary,
    Table,
    Tiles,
)
from stagewright.report.timeline import ACTION_WORDS, MOST_BARS, encode, first_view, start_of_last
from stagewright.report.words import format_number, format_seconds, is_numeric

_MOST_POINTS = 400  # per curve: a screen can't show more
_ALL_POINTS = 5000  # of all curves of a page: with the bars of its timelines it stays below a megabyte
_NARROW = 5  # columns of a table that takes half the width
_SHORT = 16  # letters of cells that are never wrapped
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


def as_html(page: Page, *, poll: float | None = None, is_listed: bool = False) -> str:
    """The whole page; with `poll`, one that asks its own server for updates every so many seconds.

    `is_listed`: it is served below the list of all runs, to which it has a link.
    """
    style = _asset("page.css")
    scripts = [_asset("timeline.js"), _asset("curves.js"), _asset("page.js"), *([_asset("live.js")] if poll else [])]
    script = "\n".join(scripts)
    policy = content_policy(style, script, is_live=poll is not None)
    halves = _halves(page.blocks)
    sections = [_section(block, number, number in halves) for number, block in enumerate(_sized(page.blocks))]
    links = "".join(
        f'<a href="#part-{number}">{escape(block.title)}</a>'
        for number, block in enumerate(page.blocks)
        if not isinstance(block, Summary | Tiles)
    )
    above = '<a class="above" href="../">All runs</a>' if is_listed else ""
    wait = f' data-poll="{poll:g}"' if poll else ""
    requests = "It requests updates from this machine only." if poll else "It is one file and loads nothing."
    return (
        f'<!doctype html>\n<html lang="en"{wait}>\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(page.title)}</title>\n<style>{style}</style>\n</head>\n'
        f'<body>\n<a class="skip" href="#main">Skip to the report</a>\n'
        f"<header>{above}<h1>{escape(page.title)}</h1></header>\n"
        f'<nav aria-label="Parts of this report">{links}</nav>\n<main id="main">\n'
        + "\n".join(sections)
        + f"\n</main>\n<footer>Stagewright made this page. {requests}</footer>\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _sized(blocks: Sequence[Block]) -> Iterator[Block]:
    """The blocks, with fewer points and bars where a page would become too large."""
    curves = sum(len(block.curves) for block in blocks if isinstance(block, Curves))
    points = max(8, min(_MOST_POINTS, _ALL_POINTS // max(1, curves)))
    bars = MOST_BARS // max(1, sum(isinstance(block, Pipeline) for block in blocks))
    for block in blocks:
        if isinstance(block, Curves):
            yield thinned(block, points)
        elif isinstance(block, Pipeline):
            shown = block.since(start_of_last(block.timeline, bars))
            yield replace(shown, total=len(block.timeline.spans))
        else:
            yield block


def content_policy(style: str, script: str, *, is_live: bool = False) -> str:
    """Allow this page's own style and script, by hash, and no requests; a live page may ask its own origin."""
    connect = "; connect-src 'self'" if is_live else ""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        f"base-uri 'none'; form-action 'none'{connect}"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _asset(name: str) -> str:
    return (files("stagewright.report") / "assets" / name).read_text(encoding="utf-8")


def _halves(blocks: Sequence[Block]) -> set[int]:
    """The numbers of narrow tables, or small figures, that follow each other: a wide screen shows two side by side."""
    halves: set[int] = set()
    for number, (block, following) in enumerate(pairwise(blocks)):
        if number not in halves and (_are_narrow(block, following) or (_is_small(block) and _is_small(following))):
            halves |= {number, number + 1}
    return halves


def _are_narrow(block: Block, following: Block) -> bool:
    """Whether two tables fit beside each other, and the shorter one would not leave most of its half empty."""
    if not isinstance(block, Table) or not isinstance(following, Table):
        return False
    few, many = sorted((len(block.rows), len(following.rows)))
    return max(len(block.columns), len(following.columns)) <= _NARROW and many <= 2 * few


def _is_small(block: Block) -> bool:
    return isinstance(block, Curves) and block.is_small


def _section(block: Block, number: int, is_half: bool) -> str:
    part = f"part-{number}"
    if isinstance(block, Tiles):
        return f'<section id="{part}" class="tiles" aria-label="Figures">{_tiles(block)}</section>'
    if isinstance(block, Summary):
        lines = "".join(f"<p>{escape(line)}</p>" for line in block.lines)
        return f'<section id="{part}" class="summary" aria-label="Summary">{lines}</section>'
    colour = block.colour if isinstance(block, Pipeline) else None
    swatch = "" if colour is None else _swatch(f"p{colour % COLOURS}")
    title = f'<h2 id="{part}-title">{swatch}{escape(block.title)}</h2>'
    half = ' class="half"' if is_half else ""
    return f'<section id="{part}"{half} aria-labelledby="{part}-title">{title}{_body(block, part)}</section>'


def _tiles(block: Tiles) -> str:
    tiles = (
        f'<div class="tile"><dt>{escape(tile.label)}</dt>'
        f'<dd class="figure">{escape(tile.value)} <small>{escape(tile.unit)}</small></dd>'
        f'<dd class="note">{escape(tile.detail)}</dd></div>'
        for tile in block.tiles
    )
    return f"<dl>{''.join(tiles)}</dl>"


def _body(block: Table | Bars | Stacks | Curves | Pipeline | Listing | Note, part: str) -> str:
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Note):
        return f'<p class="empty">{escape(block.text)}</p>'
    if isinstance(block, Listing):
        text = "\n".join(map(escape, block.text.rstrip().split("\n")))
        return (
            f'<div class="listing"><button type="button" class="copy" data-copies="{part}-text">Copy</button>'
            f'<pre id="{part}-text" tabindex="0">{text}</pre></div>'
        )
    if isinstance(block, Pipeline):
        return _pipeline(block, part)
    if isinstance(block, Bars):
        return _figure(draw_bars(block), block, part, _about_bars(block))
    if isinstance(block, Stacks):
        return _figure(draw_stacks(block), block, part, f"{len(block.stacks)} bars, {block.unit}, by part.")
    return _curves(block, part)


def _figure(drawn: str, block: Bars | Stacks | Curves | Pipeline, part: str, about: str) -> str:
    """A drawing, its description for screen readers, and its numbers."""
    note = f'<p class="note lead">{escape(block.note)}</p>' if block.note else ""
    return (
        f'<figure role="group" aria-labelledby="{part}-title" aria-describedby="{part}-about">{note}{drawn}'
        f'<figcaption id="{part}-about" class="hidden">{escape(about)}</figcaption></figure>'
        f'<details><summary>Numbers</summary><button type="button" class="copy" data-copies="{part}-numbers">Copy'
        f"</button>{_table(table_of(block), f'{part}-numbers')}</details>"
    )


def _table(table: Table, name: str = "") -> str:
    columns = [[row[at] for row in table.rows] for at in range(len(table.columns))]
    kinds = ["number" if is_numeric(cells) else "short" if _is_short(*cells) else "text" for cells in columns]
    own = [f' class="{kind}"' for kind in kinds]
    if kinds[0] != "number":  # the table has it, because large tables would become much larger
        own[0] = ""
    head = "".join(
        f'<th scope="col" class="{kind}{"" if _is_short(name) else " long"}">{escape(name)}</th>'
        for name, kind in zip(table.columns, kinds, strict=True)
    )
    lines = [[escape(cell) for cell in row] for row in table.rows]
    for line, link in zip(lines, table.links, strict=False):
        line[0] = f'<a href="{escape(quote(link))}">{line[0]}</a>'
    for line, colour in zip(lines, table.colours, strict=False):
        line[0] = _swatch(f"p{colour % COLOURS}") + line[0]
    rows = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(line, own, strict=True)) + "</tr>"
        for line in lines
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    label = f' id="{name}"' if name else ""
    named = " ".join(("runs",) * bool(table.colours) + (f"first-{kinds[0]}",))
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(table.title)}, table">'
        f'<table{label} class="{named}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}'
    )


def _is_short(*cells: str) -> bool:
    return all(len(cell) <= _SHORT for cell in cells)


def _swatch(name: str) -> str:
    return (
        f'<svg class="swatch" width="12" height="12" aria-hidden="true">'
        f'<rect class="{name}" width="12" height="12" rx="3"/></svg>'
    )


def _mark_keys(marks: Sequence[Mark]) -> str:
    """The legend of the marks that a figure has."""
    found = {mark.kind for mark in marks}
    return "".join(f"<li>{_swatch(f'k-{kind}')}{kind}</li>" for kind in MARKS if kind in found)


def _curves(block: Curves, part: str) -> str:
    """A plot that a script draws, with a button for every curve, and what lines can be changed by."""
    keys = "".join(
        f'<li><button type="button" class="toggle" aria-pressed="true" data-curve="{number}">'
        f"{_key(curve, number)}{escape(curve.label)}</button></li>"
        for number, curve in enumerate(block.curves)
    )
    legend = f'<ul class="legend">{keys}{_mark_keys(block.marks)}</ul>' if len(block.curves) > 1 or block.marks else ""
    smoothing, tools = smoothing_of(block), ""
    if smoothing is not None:
        tools += (
            '<label class="smooth">Smoothing <input type="range" min="0" max="0.95" step="0.05" '
            f'value="{smoothing:g}"></label>'
        )
    if has_log_axis(block):
        tools += '<button type="button" class="log" aria-pressed="false">Log axis</button>'
    about = _about_curves(block)
    drawn = (
        f'<div class="curves"><div class="controls">{legend}<div class="tools">{tools}</div></div>'
        f'<div class="plot"><svg tabindex="0" role="application" aria-roledescription="chart" '
        f'aria-label="{escape(block.title)}. {_CURVE_HINTS}"></svg><div class="tip" hidden></div></div>'
        f'<noscript><p class="note">This chart needs a script; its numbers are below.</p></noscript>'
        f'<p class="live hidden" role="status" aria-live="polite"></p>'
        f'<script type="application/json">{encode_curves(block)}</script></div>'
    )
    return _figure(drawn, block, part, about)


def _key(curve: Curve, number: int) -> str:
    """The sign of a curve in its legend: a line, a point, or a dashed line."""
    numbered = number if curve.colour is None else curve.colour
    colour = f"c{numbered % COLOURS}"
    if curve.look is Look.POINTS:
        inner = f'<path class="dot {colour}" d="{shape_of(curve)}" transform="translate(9 7)"/>'
    else:
        dash = " dashed" if curve.look is Look.REFERENCE or numbered >= COLOURS else ""
        inner = f'<line class="line {colour}{dash}" x1="0" x2="18" y1="7" y2="7"/>'
    return f'<svg class="swatch" width="18" height="14" aria-hidden="true">{inner}</svg>'


def _pipeline(block: Pipeline, part: str) -> str:
    timeline = block.timeline
    encoded = encode(timeline)
    found = {mark for mark, _, _ in encoded["operations"]}
    codes = [(mark, words) for mark, words in ACTION_WORDS.items() if mark in found]
    marks = [(mark.kind, mark.start, mark.end) for mark in block.marks]
    shown = {**encoded, "ranks": block.ranks, "marks": marks, "view": first_view(block)}
    data = json.dumps(shown, ensure_ascii=True).replace("<", "\\u003c")
    keys = "".join(f"<li>{_swatch(f'k-{kind}')}{kind}</li>" for kind in kinds_of(block))
    keys += _mark_keys([mark for mark in block.marks if mark.kind not in kinds_of(block)])
    how = "Predicted" if block.is_predicted else "Measured"
    bars = f"{len(timeline.spans):,} bars"
    if block.total > len(timeline.spans):
        bars = f"the last {bars} of {block.total:,}; the trace has them all"
    about = f"{how}: {len(block.ranks)} ranks over {format_seconds(timeline.end)}, {bars}."
    buttons = "".join(
        f'<button type="button" data-does="{does}" aria-label="{label}">{sign}</button>'
        for does, label, sign in (
            ("in", "Zoom in", "+"),
            ("out", "Zoom out", "\N{MINUS SIGN}"),
            ("left", "Earlier", "◀"),
            ("right", "Later", "▶"),
            ("whole", "Show all", "All"),
            ("first", "Show the first view", "Steady part"),
        )
    )
    words = "".join(f"<li><b>{escape(mark)}</b> {escape(text)}</li>" for mark, text in codes)
    drawn = (
        f'<div class="timeline" id="{part}-timeline"><div class="controls"><ul class="legend">{keys}</ul>'
        f'<div class="buttons">{buttons}<span class="range" data-shows="range"></span></div></div><div class="canvas">'
        f'<canvas tabindex="0" role="application" aria-roledescription="timeline" '
        f'aria-label="{escape(block.title)}. {escape(about)} {_HINTS}"></canvas>'
        f'<div class="tip" hidden></div></div><p class="live" role="status" aria-live="polite"></p>'
        f'<ul class="codes" aria-label="Codes of actions">{words}</ul>'
        f'<details class="how"><summary>How to read and move it</summary><p class="note">{_HINTS}</p>'
        f'<p class="note">{escape(_CODE)} {escape(about)}</p></details>'
        f'<script type="application/json">{data}</script></div>'
    )
    return _figure(drawn, block, part, about)


def _about_bars(bars: Bars) -> str:
    known = [bar for bar in bars.bars if bar.value == bar.value]
    if not known:
        return "No bars."
    best = max(known, key=lambda bar: bar.value)
    parts = [f"{len(bars.bars)} bars, {bars.unit}; longest: {best.label}."]
    if any(bar.low is not None for bar in bars.bars):
        parts.append("Lines are 95 % intervals.")
    if any(bar.is_predicted for bar in bars.bars):
        parts.append("Outlined bars are predicted.")
    return " ".join(parts)


def _about_curve(curve: Curve) -> str:
    """The ends of a curve, and its extremes where they differ from the ends."""
    ends = [format_number(curve.points[0].y), format_number(curve.points[-1].y)]
    text = f"first {ends[0]}, last {ends[1]}"
    if known := [point.y for point in curve.points if math.isfinite(point.y)]:
        for name, extreme in (("lowest", format_number(min(known))), ("highest", format_number(max(known)))):
            text += f", {name} {extreme}" if extreme not in ends else ""
    return text


def _about_curves(curves: Curves) -> str:
    parts = [f"{curve.label}: {_about_curve(curve)}" for curve in curves.curves[:8] if curve.points]
    more = f"; and {len(curves.curves) - 8} more" if len(curves.curves) > 8 else ""
    band = " Shaded: 95 % intervals." if any(p.low is not None for c in curves.curves for p in c.points) else ""
    return f"{'; '.join(parts)}{more}.{band}" if parts else "No points."
