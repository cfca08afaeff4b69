"""The page, the terminal tables and the JSON object of a study."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.learning.findings import Study, TrainingSpeed
from benchmarks.learning.pages import describe_study, headlines, show_study, study_page
from stagewright.report.html import as_html
from stagewright.report.markdown import as_markdown
from stagewright.report.page import Curves
from tests.benchmarks.learning.made import findings, trained


def test_a_page_has_tables_curves_and_every_run(tmp_path: Path) -> None:
    runs = [trained("sync", seed, 0.5, 0.9) for seed in range(2)] + [trained("stale", 0, 0.4, 0.8)]
    study = Study(
        "Lag",
        "2026-01-01",
        "stagewright bench learning",
        {"GPU": "none"},
        tuple(findings(*runs, speed=1.0)),
        {"R": 0.85},
    )
    text = as_markdown(study_page(study))
    sync, stale, slow = findings(*runs, trained("slow", 0, 0.6, 0.95), speed=64.0)
    stale = replace(stale, speed=TrainingSpeed(128.0, "measured here", 4))
    raced = replace(study, findings=(sync, stale, slow), targets={"R": 0.8})
    assert list(headlines(raced)) == [
        "R reaches 80.0% first with stale: after 10 s on 4 devices, sync after 20 s on 2 devices (measured here)."
    ]
    of_sync = study_page(raced).blocks[2:5]
    assert all(isinstance(block, Curves) for block in of_sync)
    by_epoch, last, by_time = ([(p.x, round(p.y, 6)) for p in block.curves[0].points] for block in of_sync)
    assert by_epoch == [(1.0, 50.0), (2.0, 90.0)] and last == [(2.0, 90.0)] and by_time == [(10.0, 50.0), (20.0, 90.0)]
    runs = [trained("sync", seed, 0.9 + 0.05 * seed) for seed in range(2)]  # whose interval would exceed 100 %
    assert "- 100.00%" in as_markdown(study_page(replace(study, findings=tuple(findings(*runs)))))
    for part in (
        "lower by 10.00 points",
        "90.00%",
        "top-1 against epochs",
        "top-1 against time",
        "measured here",
        "first with sync",
    ):
        assert part in text
    assert "</html>" in as_html(study_page(study))
    assert json.loads(json.dumps(describe_study(study)))["findings"][1]["difference"]["value"] == pytest.approx(-0.1)
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    show_study(console, study, tmp_path)
    assert all(len(line) <= 80 or str(tmp_path) in line for line in console.export_text().splitlines())
