"""A page as one HTML file that works offline: style and script are inside, and the policy lets nothing else load."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from urllib.parse import quote

from stagewright.report.charts import COLOURS, draw, escape, swatch
from stagewright.report.numbers import table_of, thinned
from stagewright.report.page import Block, Curves, Listing, Note, Page, Pipeline, Summary, Table, Tiles
from stagewright.report.timeline import MOST_BARS, start_of_last
from stagewright.report.words import is_numeric

_MOST_POINTS = 400  # per curve: a screen can't show more
_ALL_POINTS = 5000  # of all curves of a page: with the bars of its timelines it stays below a megabyte
_NARROW = 5  # columns of a table that takes half the width
_SHORT = 16  # letters of cells that are never wrapped


def as_html(page: Page, *, poll: float | None = None, is_listed: bool = False) -> str:
    """The whole page; with `poll`, one that asks its own server for updates every so many seconds.

    `is_listed`: it is served below the list of all runs, to which it has a link.
    """
    style = _asset("page.css")
    script = "\n".join(map(_asset, ("timeline.js", "curves.js", "page.js", *(("live.js",) if poll else ()))))
    halves = _halves(page.blocks)
    sections = [_section(block, number, number in halves) for number, block in enumerate(_sized(page.blocks))]
    links = "".join(
        f'<a href="#part-{number}">{escape(block.title)}</a>'
        for number, block in enumerate(page.blocks)
        if not isinstance(block, Summary | Tiles)
    )
    above = '<a class="above" href="../">All runs</a>' if is_listed else ""
    wait = f' data-poll="{poll:g}"' if poll else ""
    connect = "; connect-src 'self'" if poll else ""  # a live page may ask its own server, any other page nothing
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        f"base-uri 'none'; form-action 'none'{connect}"
    )
    requests = "It requests updates from this machine only." if poll else "It is one file and loads nothing."
    return (
        f'<!doctype html>\n<html lang="en"{wait}>\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" '
        f'content="{escape(policy)}">\n'
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


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _asset(name: str) -> str:
    return (files("stagewright.report") / "assets" / name).read_text(encoding="utf-8")


def _halves(blocks: Sequence[Block]) -> set[int]:
    """The numbers of narrow tables, or small figures, that follow each other: a wide screen shows two side by side."""
    halves: set[int] = set()
    for number, pair in enumerate(pairwise(blocks)):
        if number not in halves and (_are_narrow(*pair) or all(isinstance(b, Curves) and b.is_small for b in pair)):
            halves |= {number, number + 1}
    return halves


def _are_narrow(block: Block, following: Block) -> bool:
    """Whether two tables fit beside each other, and the shorter one would not leave most of its half empty."""
    if not isinstance(block, Table) or not isinstance(following, Table):
        return False
    few, many = sorted((len(block.rows), len(following.rows)))
    return max(len(block.columns), len(following.columns)) <= _NARROW and many <= 2 * few


def _section(block: Block, number: int, is_half: bool) -> str:
    part = f"part-{number}"
    if isinstance(block, Tiles | Summary):
        name, kind = ("Figures", "tiles") if isinstance(block, Tiles) else ("Summary", "summary")
        return f'<section id="{part}" class="{kind}" aria-label="{name}">{_body(block, part)}</section>'
    colour = block.colour if isinstance(block, Pipeline) else None
    spot = "" if colour is None else swatch(f"p{colour % COLOURS}")
    title = f'<h2 id="{part}-title">{spot}{escape(block.title)}</h2>'
    half = ' class="half"' if is_half else ""
    return f'<section id="{part}"{half} aria-labelledby="{part}-title">{title}{_body(block, part)}</section>'


def _body(block: Block, part: str) -> str:
    match block:
        case Tiles():
            tiles = "".join(
                f'<div class="tile"><dt>{escape(tile.label)}</dt>'
                f'<dd class="figure">{escape(tile.value)} <small>{escape(tile.unit)}</small></dd>'
                f'<dd class="note">{escape(tile.detail)}</dd></div>'
                for tile in block.tiles
            )
            return f"<dl>{tiles}</dl>"
        case Summary():
            return "".join(f"<p>{escape(line)}</p>" for line in block.lines)
        case Table():
            return _table(block)
        case Note():
            return f'<p class="empty">{escape(block.text)}</p>'
        case Listing():
            text, copy = "\n".join(map(escape, block.text.rstrip().split("\n"))), _copy(f"{part}-text")
            return f'<div class="listing">{copy}<pre id="{part}-text" tabindex="0">{text}</pre></div>'
        case figure:  # a drawing, its description for screen readers, and its numbers
            drawn, about = draw(figure, part)
            note = f'<p class="note lead">{escape(figure.note)}</p>' if figure.note else ""
            return (
                f'<figure role="group" aria-labelledby="{part}-title" aria-describedby="{part}-about">{note}{drawn}'
                f'<figcaption id="{part}-about" class="hidden">{escape(about)}</figcaption></figure>'
                f"<details><summary>Numbers</summary>{_copy(f'{part}-numbers')}"
                f"{_table(table_of(figure), f'{part}-numbers')}</details>"
            )


def _copy(part: str) -> str:
    """A button that copies a part of the page."""
    return f'<button type="button" class="copy" data-copies="{part}">Copy</button>'


def _table(table: Table, name: str = "") -> str:
    columns = [[row[at] for row in table.rows] for at in range(len(table.columns))]
    kinds = ["number" if is_numeric(cells) else "short" if _is_short(*cells) else "text" for cells in columns]
    own = [f' class="{kind}"' for kind in kinds]
    if kinds[0] != "number":  # the table has it, because large tables would become much larger
        own[0] = ""
    head = "".join(
        f'<th scope="col" class="{kind}{"" if _is_short(title) else " long"}">{escape(title)}</th>'
        for title, kind in zip(table.columns, kinds, strict=True)
    )
    lines = [[escape(cell) for cell in row] for row in table.rows]
    for line, link in zip(lines, table.links, strict=False):
        line[0] = f'<a href="{escape(quote(link))}">{line[0]}</a>'
    for line, colour in zip(lines, table.colours, strict=False):
        line[0] = swatch(f"p{colour % COLOURS}") + line[0]
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
