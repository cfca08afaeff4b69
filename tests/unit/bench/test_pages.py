"""What a bench's summary, terminal tables and commands say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from stagewright.bench.pages import outcome_page, show, summary
from stagewright.bench.result import Outcome, Repeat, Row, measured_row
from stagewright.bench.run import with_speedups
from stagewright.bench.statistics import Interval
from stagewright.report.markdown import as_markdown
from stagewright.report.page import Bars

pytestmark = pytest.mark.xdist_group("suite")  # which is measured once


def test_the_summary_warns_of_a_busy_machine_and_of_missing_repeats(outcome: Outcome) -> None:
    repeats = tuple(replace(repeat, others=1.5) for repeat in outcome.rows[0].repeats)
    busy = replace(outcome, rows=(replace(outcome.rows[0], repeats=repeats),), cores=2, repeats=5)
    lines = list(summary(busy))
    assert "Only 3 of 5 repeats fit the time limit of the suite." in lines
    assert "Warning: other processes kept 1.5 of 2 cores busy; repeat the bench on an idle machine." in lines
    assert not [line for line in summary(replace(busy, cores=16, repeats=3)) if "repeats" in line or "cores" in line]


def test_terminal_tables_fit_80_columns(outcome: Outcome, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tuple(replace(row, outliers=(0,)) for row in outcome.rows)
    show(Console(width=80, force_terminal=True, color_system=None), replace(outcome, rows=rows), Path("runs/x"))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80 and "*: a repeat is an outlier" in printed


def test_a_prediction_is_a_point(outcome: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    point = Interval(100.0, 100.0, 100.0)
    rows = tuple(replace(row, kind="predicted", rate=point, speedup=point) for row in outcome.rows)
    show(Console(width=80), replace(outcome, rows=rows), Path("runs/x"))
    assert "interval" not in capsys.readouterr().out


def test_a_group_of_token_runs_is_in_tokens_and_shows_its_metrics() -> None:
    repeats = tuple(Repeat(rate, metrics={"perplexity": 20.0, "top1": 0.25}) for rate in (5000.0, 5100.0))
    rows = [measured_row("GPT", name, repeats, is_baseline=name == "dp", unit="tokens/s") for name in ("dp", "stale")]
    images = measured_row("VGG", "dp", [100.0, 101.0])
    mixed = with_speedups([*rows, replace(images, group="GPT", name="other")])
    assert mixed[1].speedup is not None and mixed[2].speedup is None, "tokens over images mean nothing"
    found = Outcome("own", "Own", "bench own", "today", 2, 1, {}, (*rows, images))
    page = outcome_page(found)
    bars = {block.title: block.unit for block in page.blocks if isinstance(block, Bars)}
    assert bars == {"GPT: throughput": "tokens/s", "VGG: throughput": "images/s"}
    drawn = [(bar.label, bar.colour) for block in page.blocks if isinstance(block, Bars) for bar in block.bars]
    assert drawn == [("dp", 0), ("stale", 1), ("dp", 0)], "one colour per side, in every group"
    text = as_markdown(page)
    assert "| 5,000.0 tokens/s |" in text and "| 25.00% |" in text and "perplexity" in text


@pytest.mark.parametrize(
    ("factor", "noise", "said"),
    [
        (8.0, 0.03, "Stale 7+1 trains VGG-16 8.0 times as fast as data parallel (7.8 to 8.2)."),
        (
            0.8,
            0.02,
            "Data parallel is the fastest way to train VGG-16: the best other, stale 7+1, is only 0.80 times as",
        ),
        (1.0, 0.10, "No significant difference for VGG-16: stale 7+1 is 1.00 ("),
    ],
)
def test_a_bench_begins_with_a_sentence_to_say_aloud(factor: float, noise: float, said: str) -> None:
    spread = [1 - noise, 1 - noise / 2, 1.0, 1 + noise / 2, 1 + noise]
    rows = [
        measured_row("VGG-16", "dp", [100.0] * 5, is_baseline=True, data="synthetic"),
        measured_row("VGG-16", "stale 7+1", [100 * factor * part for part in spread], data="synthetic"),
    ]
    first = next(summary(Outcome("own", "Own", "bench own", "today", 5, 1, {}, tuple(with_speedups(rows)))))
    assert first.startswith(said)


def test_a_predicted_bench_says_so_in_its_headline() -> None:
    point = Interval(1.5, 1.5, 1.5)
    rows = [
        Row("VGG-16", name, kind="predicted", cluster="titan-v-8", rate=Interval(900, 900, 900), speedup=point)
        for name in ("dp", "stale 7+1")
    ]
    rows[0] = replace(rows[0], is_baseline=True)
    first = next(summary(Outcome("own", "Own", "bench own", "today", 1, 1, {}, tuple(rows))))
    assert (
        first
        == "Stale 7+1 is predicted to train VGG-16 on titan-v-8 1.50 times as fast as data parallel, at 900 images/s."
    )
