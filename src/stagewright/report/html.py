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
    KINDS,
    draw_bars,
    draw_curves,
    draw_stacks,
    escape,
    format_number,
    format_seconds,
    is_numeric,
    table_of,
    thinned,
)
from stagewright.report.page import Bars, Block, Curve, Curves, Listing, Page, Pipeline, Stacks, Summary, Table
from stagewright.report.timeline import MOST_BARS, encode, last_bars

_MOST_POINTS = 400  # per curve: a screen can't show more
_ALL_POINTS = 5000  # of all curves of a page: with the bars of its timelines it stays below a megabyte
_NARROW = 5  # columns of a table that takes half the width
_HINTS = (
    "Drag to move, pinch or turn the wheel to zoom, touch or point at a bar to read it. By keyboard: arrows to move, "
    "+ and - to zoom, 0 to show all; full stop and comma go from bar to bar, up and down from rank to rank."
)
_HATCH = (  # what predicted bars are filled with
    '<svg width="0" height="0" class="defined" aria-hidden="true"><pattern id="hatch" width="8" height="8" '
    'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect class="hatch-back" width="8" height="8"/>'
    '<line class="hatch-line" x1="0" x2="0" y1="0" y2="8"/></pattern></svg>'
)


def as_html(page: Page, *, poll: float | None = None) -> str:
    """The whole page; with `poll`, one that asks its own server for updates every so many seconds."""
    style = _asset("page.css")
    scripts = [_asset("timeline.js"), _asset("page.js"), *([_asset("live.js")] if poll else [])]
    script = "\n".join(scripts)
    policy = content_policy(style, script, is_live=poll is not None)
    halves = _halves(page.blocks)
    sections = [_section(block, number, number in halves) for number, block in enumerate(_sized(page.blocks))]
    links = "".join(
        f'<a href="#part-{number}">{escape(block.title)}</a>'
        for number, block in enumerate(page.blocks)
        if not isinstance(block, Summary)
    )
    wait = f' data-poll="{poll:g}"' if poll else ""
    requests = "It requests updates from this machine only." if poll else "It is one file and loads nothing."
    return (
        f'<!doctype html>\n<html lang="en"{wait}>\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(page.title)}</title>\n<style>{style}</style>\n</head>\n'
        f'<body>\n{_HATCH}<a class="skip" href="#main">Skip to the report</a>\n<header><h1>{escape(page.title)}</h1>'
        f'<nav aria-label="Parts of this report">{links}</nav></header>\n<main id="main">\n'
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
            yield replace(block, timeline=last_bars(block.timeline, bars), total=len(block.timeline.spans))
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
        if number not in halves and any(all(map(is_half, (block, following))) for is_half in (_is_narrow, _is_small)):
            halves |= {number, number + 1}
    return halves


def _is_narrow(block: Block) -> bool:
    return isinstance(block, Table) and len(block.columns) <= _NARROW


def _is_small(block: Block) -> bool:
    return isinstance(block, Curves) and block.is_small


def _section(block: Block, number: int, is_half: bool) -> str:
    part = f"part-{number}"
    if isinstance(block, Summary):
        lines = "".join(f"<p>{escape(line)}</p>" for line in block.lines)
        return f'<section id="{part}" class="summary" aria-label="Summary">{lines}</section>'
    title = f'<h2 id="{part}-title">{escape(block.title)}</h2>'
    half = ' class="half"' if is_half else ""
    return f'<section id="{part}"{half} aria-labelledby="{part}-title">{title}{_body(block, part)}</section>'


def _body(block: Table | Bars | Stacks | Curves | Pipeline | Listing, part: str) -> str:
    if isinstance(block, Table):
        return _table(block)
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
    return _figure(draw_curves(block), block, part, _about_curves(block))


def _figure(drawn: str, block: Bars | Stacks | Curves | Pipeline, part: str, about: str) -> str:
    """A drawing, its description in words, and its numbers."""
    return (
        f'<figure role="group" aria-labelledby="{part}-title" aria-describedby="{part}-about">{drawn}'
        f'<figcaption id="{part}-about">{escape(about)}</figcaption></figure>'
        f'<details><summary>Numbers</summary><button type="button" class="copy" data-copies="{part}-numbers">Copy'
        f"</button>{_table(table_of(block), f'{part}-numbers')}</details>"
    )


def _table(table: Table, name: str = "") -> str:
    numeric = [is_numeric([row[at] for row in table.rows]) for at in range(len(table.columns))]
    kinds = [' class="number"' if right else "" for right in numeric]
    head = "".join(
        f'<th scope="col"{kind}>{escape(column)}</th>' for column, kind in zip(table.columns, kinds, strict=True)
    )
    lines = [[escape(cell) for cell in row] for row in table.rows]
    for line, link in zip(lines, table.links, strict=False):
        line[0] = f'<a href="{escape(quote(link))}">{line[0]}</a>'
    rows = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(line, kinds, strict=True)) + "</tr>"
        for line in lines
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    label = f' id="{name}"' if name else ""
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(table.title)}, table">'
        f"<table{label}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}"
    )


def _pipeline(block: Pipeline, part: str) -> str:
    timeline = block.timeline
    data = json.dumps({**encode(timeline), "ranks": block.ranks}, ensure_ascii=True).replace("<", "\\u003c")
    keys = "".join(
        f'<li><svg width="14" height="14" aria-hidden="true"><rect class="k-{kind} key" width="14" height="14"/></svg>'
        f"{kind}</li>"
        for kind in KINDS
    )
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
        )
    )
    drawn = (
        f'<div class="timeline" id="{part}-timeline"><ul class="legend">{keys}</ul><div class="buttons">{buttons}'
        f'<span class="range" data-shows="range"></span></div><div class="canvas">'
        f'<canvas tabindex="0" role="application" aria-roledescription="timeline" '
        f'aria-label="{escape(block.title)}. {escape(about)} {_HINTS}"></canvas>'
        f'<div class="tip" hidden></div></div><p class="live" role="status" aria-live="polite"></p>'
        f'<p class="note">{_HINTS}</p><script type="application/json">{data}</script></div>'
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
        parts.append("Hatched bars are predicted.")
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
