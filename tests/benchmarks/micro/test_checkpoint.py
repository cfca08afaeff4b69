"""`bench checkpoint` with settings too small to mean anything: what it reports, never how fast."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.micro import checkpoint
from benchmarks.outcome import Outcome
from stagewright.bench.result import read_outcome


def test_reports_times_of_both_sides_and_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checkpoint, "REPEATS", 2)
    monkeypatch.setattr(checkpoint, "MODEL", "resnet8")
    main(["checkpoint", "--runs", str(tmp_path)])
    (folder,) = tmp_path.iterdir()
    found = read_outcome(folder, Outcome)
    assert [row.name for row in found.rows][:2] == ["pause of training", "plain copy"] and found.unit == "ms"
    assert all(len(row.repeats) == 2 and min(repeat.rate for repeat in row.repeats) > 0 for row in found.rows)
    (ratio,) = found.ratios
    assert ratio.ratio.low <= ratio.ratio.value <= ratio.ratio.high
    assert 1 < found.figures["on disk, MiB"] / found.figures["state, MiB"] < 1.2  # headers weigh more in a small model


def test_the_goal_is_for_the_pause_over_the_copy() -> None:
    series = {"stops": (1.5, 3.0), "copies": (1.0, 2.0), "quiet": (1.0,), "writing": (1.0,)}
    (ratio,) = checkpoint.make_outcome(series, 2**20, 2**20).ratios
    assert ratio.ratio.value == pytest.approx(1.5) and (ratio.first.value, ratio.goal) == (2250.0, "<= 1.5")
    series["copies"] = (0.9, 1.8)
    (ratio,) = checkpoint.make_outcome(series, 2**20, 2**20).ratios
    assert ratio.is_met is False
