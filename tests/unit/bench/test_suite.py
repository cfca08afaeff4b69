"""The bench command end to end, with settings too small to mean anything: what it reports, never how fast."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from stagewright.bench.peers.cases import SUITES
from stagewright.bench.peers.launch import Segment, open_ranks
from stagewright.bench.peers.run import PeerOutcome, make_series, show_machine, show_workload
from stagewright.cli.bench import Request, run_bench


def test_overhead_runs_both_sides_on_the_same_work(capfd: pytest.CaptureFixture[str]) -> None:
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


def test_a_rank_that_fails_is_one_line(tmp_path: Path) -> None:
    side = SUITES["overhead"].cases[0].sides[0]
    with ExitStack() as stack, pytest.raises(ValueError, match=r"^sync rank \d ended with code 1: FileNotFound.*$"):
        open_ranks(stack, {side: tmp_path / "no.json"}, tmp_path, 2)


@pytest.mark.parametrize("name", sorted(SUITES))
def test_a_table_fits_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suite": "zzz"}, "unknown suite 'zzz'.*; known: homelab, quick"),
        ({"suite": "peers", "repeats": 0}, "--repeats is 0"),
        ({"suite": "peers", "steps": -1}, "--steps is -1"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        run_bench(Request(**options))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
