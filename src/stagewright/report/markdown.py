"""A page as Markdown, for a repository, a forum or a diff."""

from __future__ import annotations

import re
from dataclasses import replace

from stagewright.errors import printable, printable_lines
from stagewright.report.numbers import table_of, thinned
from stagewright.report.page import Block, Curves, Listing, Note, Page, Pipeline, Summary, Table, Tiles
from stagewright.report.words import format_seconds, is_numeric

_MOST_POINTS = 12  # per curve: the HTML page has them all
_SPECIAL = re.compile(r"[\\`*\[\]<>|&#~$]|(?<!\w)_|_(?!\w)")


def as_markdown(page: Page) -> str:
    """The whole page; every figure becomes a table of its numbers."""
    return "\n\n".join([f"# {_plain(page.title)}", *(_block(block) for block in page.blocks)]) + "\n"


def _block(block: Block) -> str:
    match block:
        case Summary():
            return "\n".join(f"- {_plain(line)}" for line in block.lines)
        case Tiles():
            rows = tuple((tile.label, f"{tile.value} {tile.unit}".rstrip(), tile.detail) for tile in block.tiles)
            return _table(Table("Figures", ("figure", "value", "about it"), rows))
        case Note():
            return f"## {_plain(block.title)}\n\n{_plain(block.text)}"
        case Listing():
            fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall("`+", block.text)), default=0))
            return f"## {_plain(block.title)}\n\n{fence}text\n{printable_lines(block.text.rstrip())}\n{fence}"
        case Table():
            return _table(block)
        case Pipeline():
            how = "Predicted" if block.is_predicted else "Measured"
            about = f"{how} over {format_seconds(block.timeline.end)}; the HTML page beside this file draws it."
            return f"{_table(table_of(block))}\n\n{about}"
        case figure:
            table = table_of(thinned(figure, _MOST_POINTS) if isinstance(figure, Curves) else figure)
            return _table(replace(table, note=" ".join(filter(None, (figure.note, table.note)))))


def _table(table: Table) -> str:
    numeric = [is_numeric([row[at] for row in table.rows]) for at in range(len(table.columns))]
    lines = [
        f"## {_plain(table.title)}",
        "",
        as_row(table.columns),
        "|" + "|".join("--:" if right else "---" for right in numeric) + "|",
        *(as_row(row) for row in table.rows),
    ]
    if table.note:
        lines += ["", _plain(table.note)]
    return "\n".join(lines)


def as_row(cells: tuple[str, ...]) -> str:
    """Cells as one line of a table."""
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    """Text on one line, escaped so that Markdown shows it as it is."""
    return _SPECIAL.sub(lambda match: f"\\{match[0]}", printable(" ".join(text.split())))
