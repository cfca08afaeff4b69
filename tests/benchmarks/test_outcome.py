"""Ratios of two rows: their goals, and what pages and terminals show of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.outcome import at_least, at_most, new_outcome, not_slower, outcome_page, ratio_of, show
from stagewright.bench.result import measured_row
from stagewright.bench.statistics import Interval
from stagewright.report.markdown import as_markdown


def test_goals_are_met_by_the_ratio_or_by_its_interval() -> None:
    ratio = Interval(0.95, 0.9, 1.01)
    assert not_slower().is_met(ratio) is None, "it reaches 1 because it is wide"
    assert not_slower().is_met(Interval(0.99, 0.975, 1.01)) is True
    assert not_slower().is_met(Interval(0.95, 0.9, 0.98)) is False
    assert at_most(0.95).is_met(ratio) and not at_most(0.5).is_met(ratio)
    assert at_least(0.95).is_met(ratio) and not at_least(1.2).is_met(ratio)


def test_the_terminal_shows_rows_that_no_ratio_compares(capsys: pytest.CaptureFixture[str]) -> None:
    rows = tuple(measured_row("loader", f"{count} processes", [100.0 * count]) for count in (1, 2, 4))
    outcome = new_outcome("data", "", 1, rows=rows, ratios=(ratio_of(rows[2], rows[1]),))
    show(Console(width=80), outcome, Path("runs/x"))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "4 processes / 2 processes 400 200 2.000" in lines and "1 processes 100" in lines


def test_a_note_is_shown_once_and_not_slower_is_explained_where_it_is_a_goal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [measured_row("one", f"side {number}", [10.0, 11.0, 12.0], note=f"note {number}") for number in range(3)]
    for goal, is_explained in ((at_most(1.05), False), (not_slower(), True), (None, False)):
        ratios = (ratio_of(rows[2], rows[0], goal),)
        outcome = new_outcome("growth", "", 3, unit="MiB", rows=tuple(rows), ratios=ratios)
        show(Console(width=200), outcome, Path("x"))
        printed = capsys.readouterr().out
        assert [printed.count(f"note {number}") for number in range(3)] == [1, 1, 1]
        assert "side 2 use 1.00 times as much memory as side 0" in printed
        assert ("Not slower: a ratio" in as_markdown(outcome_page(outcome))) is is_explained
