"""What a bench's summary, terminal tables and commands say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from stagewright.bench.pages import show, summary
from stagewright.bench.result import Outcome, PublishedRow
from stagewright.bench.statistics import Interval


def test_the_summary_warns_of_a_busy_machine_and_of_missing_repeats(outcome: Outcome) -> None:
    repeats = tuple(replace(repeat, others=1.5) for repeat in outcome.rows[0].repeats)
    busy = replace(outcome, rows=(replace(outcome.rows[0], repeats=repeats),), cores=2, repeats=5)
    lines = list(summary(busy))
    assert "Only 3 of 5 repeats fit the time limit of the suite." in lines
    assert "Warning: other processes kept 1.5 of 2 cores busy; repeat the bench on an idle machine." in lines
    assert not [line for line in summary(replace(busy, cores=16, repeats=3)) if "repeats" in line or "cores" in line]


def test_terminal_tables_fit_80_columns(outcome: Outcome, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tuple(replace(row, outliers=(0,)) for row in outcome.rows)
    show(Console(width=80), replace(outcome, rows=rows), Path("runs/x"))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80 and "*: a repeat is an outlier" in printed


def test_published_runs_are_shown_with_their_predictions(outcome: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    run = PublishedRow(
        "OneFlow dev_ssp", "vgg16", "titan-v-8", "dp", "synthetic", "fp32", "224", 708.4, 727.8, (), (), ()
    )
    point = Interval(100.0, 100.0, 100.0)
    rows = tuple(replace(row, kind="predicted", rate=point, speedup=point) for row in outcome.rows)
    show(Console(width=80), replace(outcome, rows=rows, published=(run, replace(run, published=None))), Path("runs/x"))
    printed = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in printed.splitlines() if line.startswith("OneFlow")]
    assert lines == ["OneFlow dev_ssp, vgg16, dp 224, synthetic 728 708p -2.7%"]
    assert "interval" not in printed, "a prediction is a point"
