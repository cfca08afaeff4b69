"""`stagewright compare`: two runs or two benches side by side, and whether their speeds differ."""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from stagewright.bench.compare import Comparison, Pair, compare, describe
from stagewright.bench.pages import format_figure, format_span
from stagewright.bench.statistics import Interval
from stagewright.report.columns import Column
from stagewright.report.live.terminal import open_console, print_table, say
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
    columns: tuple[Column[Pair], ...] = (
        Column(comparison.unit, lambda pair: pair.what, is_text=True, wraps=True),
        Column("A", lambda pair: format_figure(pair.first.value)),
        Column("95 % interval", lambda pair: _spread(pair, pair.first)),
        Column("B", lambda pair: format_figure(pair.second.value)),
        Column("95 % interval", lambda pair: _spread(pair, pair.second)),
    )
    if comparison.pairs:
        print_table(console, columns, comparison.pairs)
    for reason in comparison.reasons:
        say(console, f"not comparable: {reason}")
    for pair in comparison.pairs if comparison.is_comparable else ():
        say(console, pair.summary if len(comparison.pairs) == 1 else f"{pair.what}: {pair.summary}")
    for note in comparison.notes:
        say(console, f"note: {note}")


def _spread(pair: Pair, side: Interval) -> str:
    return "predicted" if pair.is_predicted else format_span(side)
