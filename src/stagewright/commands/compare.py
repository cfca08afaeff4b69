"""`stagewright compare`: two runs or two benches, and whether they differ."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.commands.options import Commands, add_json

if TYPE_CHECKING:
    from rich.console import Console

    from stagewright.bench.compare import Comparison


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "compare",
        help="say whether two runs or two benches differ",
        usage="stagewright compare A B [options]",
        description="Compare the throughput of two run folders or two bench folders, with intervals, and say whether "
        "they differ, or why they can't be compared.",
    )
    parser.add_argument("first", metavar="A", help="a run folder or a bench folder")
    parser.add_argument("second", metavar="B", help="another of the same kind")
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> None:
    from rich.console import Console

    from stagewright.bench.compare import compare, describe

    comparison = compare(Path(parsed.first), Path(parsed.second))
    if parsed.json:
        print(json.dumps(describe(comparison)))
    else:
        show(Console(), comparison)


def show(console: Console, comparison: Comparison) -> None:
    """Both sides in a table, then what to make of it."""
    from rich.table import Table

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    say(f"A: {comparison.first}")
    say(f"B: {comparison.second}")
    table = Table(box=None, pad_edge=False)
    for name in ("images/s", "A", "95 % interval", "B", "95 % interval"):
        table.add_column(name, justify="left" if name == "images/s" else "right", no_wrap=name != "images/s")
    for pair in comparison.pairs:
        sides = [(f"{side.value:,.0f}", f"{side.low:,.0f} - {side.high:,.0f}") for side in (pair.first, pair.second)]
        cells = [cell for value, spread in sides for cell in (value, "predicted" if pair.is_predicted else spread)]
        table.add_row(pair.what, *cells)
    if comparison.pairs:
        console.print(table)
    for reason in comparison.reasons:
        say(f"not comparable: {reason}")
    for pair in comparison.pairs if comparison.is_comparable else ():
        say(pair.verdict if len(comparison.pairs) == 1 else f"{pair.what}: {pair.verdict}")
    for note in comparison.notes:
        say(f"note: {note}")
