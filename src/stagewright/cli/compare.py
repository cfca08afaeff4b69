"""`stagewright compare`: two runs or two benches side by side, and whether their speeds differ."""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from stagewright.bench.compare import Comparison, compare, describe
from stagewright.bench.pages import format_figure, format_span
from stagewright.report.live.terminal import open_console, plain_table, say
from stagewright.run.folder import find_run


def run_compare(parsed: argparse.Namespace) -> None:
    comparison = compare(find_run(parsed.first), find_run(parsed.second))
    if parsed.json:
        print(json.dumps(describe(comparison)))
    else:
        show_comparison(open_console(), comparison)


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Print both sides in a table, then what the difference means."""
    say(console, f"A: {comparison.first}")
    say(console, f"B: {comparison.second}")
    columns = (comparison.unit, "A", "95 % interval", "B", "95 % interval")
    table = plain_table(*columns, left=columns[:1], no_wrap=columns[1:])
    for pair in comparison.pairs:
        sides = [(format_figure(side.value), format_span(side)) for side in (pair.first, pair.second)]
        cells = [cell for value, spread in sides for cell in (value, "predicted" if pair.is_predicted else spread)]
        table.add_row(pair.what, *cells)
    if comparison.pairs:
        console.print(table)
    for reason in comparison.reasons:
        say(console, f"not comparable: {reason}")
    for pair in comparison.pairs if comparison.is_comparable else ():
        say(console, pair.summary if len(comparison.pairs) == 1 else f"{pair.what}: {pair.summary}")
    for note in comparison.notes:
        say(console, f"note: {note}")
