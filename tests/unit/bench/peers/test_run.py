"""Comparisons with stock PyTorch, with settings too small to mean anything: what they report, never how fast."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from stagewright.bench.peers.cases import SUITES
from stagewright.bench.peers.launch import Segment
from stagewright.bench.peers.run import PeerOutcome, make_series, show_machine, show_workload
from stagewright.cli.bench import Request, run_bench


def test_overhead_trains_both_sides_on_the_same_work(capfd: pytest.CaptureFixture[str]) -> None:
    run_bench(Request("overhead", repeats=2, steps=1, as_json=True))
    result = json.loads(capfd.readouterr().out)
    assert result.keys() == {"suite", "measure", "contests", "machine", "others", "date", "command"}
    assert result["command"] == "stagewright bench overhead --repeats 2 --steps 1"
    (contest,) = result["contests"]
    assert contest["ours"]["side"] == "sync" and contest["theirs"]["side"] == "torch 1F1B"
    for side in (contest["ours"], contest["theirs"]):
        assert len(side["values"]) == 2 and min(side["values"]) > 0
    assert contest["interval"][0] <= contest["ratio"] <= contest["interval"][1]
    assert contest["ours"]["losses"] == pytest.approx(contest["theirs"]["losses"], rel=1e-5)


@pytest.mark.parametrize("name", sorted(SUITES))
def test_tables_fit_80_columns(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    suite = SUITES[name]
    segments = [Segment(1.0, 2.0, 0.0), Segment(1.5, 2.0, 1.5)]
    outcomes = [
        PeerOutcome(
            pairing,
            case.workload,
            make_series(pairing.ours, suite.measure, case.workload, case.steps, segments),
            make_series(pairing.theirs, suite.measure, case.workload, case.steps, segments),
        )
        for case in suite.cases
        for pairing in case.pairings
    ]
    for case in suite.cases:
        show_workload(Console(), suite, [outcome for outcome in outcomes if outcome.workload == case.workload])
    show_machine(Console(), outcomes, f"stagewright bench {name}")
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    for outcome in outcomes:
        assert f"{outcome.ours.side} / {outcome.theirs.side}" in printed
    assert "1.00 - 1.00" in printed and "torch" in printed and f"stagewright bench {name}" in printed
