"""`bench checkpoint` with settings too small to mean anything: what it reports, never how fast."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from stagewright.bench.micro import checkpoint
from stagewright.cli.bench import Request, run_bench


def test_reports_times_of_both_sides_and_sizes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "REPEATS", 2)
    monkeypatch.setattr(checkpoint, "MODEL", "resnet8")
    run_bench(Request("checkpoint", as_json=True))
    found = json.loads(capsys.readouterr().out)
    assert all(len(found[side]) == 2 and min(found[side]) > 0 for side in ("stops", "copies", "quiet", "writing"))
    assert found["ratio"]["low"] <= found["ratio"]["value"] <= found["ratio"]["high"]
    assert 1 < found["size"] / found["state"] < 1.2  # headers and statistics, which weigh more in a small model
    console = Console(record=True, width=120)
    checkpoint.show(console, checkpoint.Found((1.0, 2.0), (1.0, 1.0), (1.0,), (1.0,), 2**20, 2**20))
    assert "ratio                  1.50 (1.00 to 2.00), goal <= 1.5: met" in console.export_text()
