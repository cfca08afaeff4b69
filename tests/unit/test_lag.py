"""The lag that a run gets by default, and what is said where no lag fills its pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from stagewright.cli.main import main
from stagewright.cluster.placement import parse_placement
from stagewright.config.toml import make_config
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode, Plan
from stagewright.planning import build as lag
from stagewright.profile.profile import NotProfiled


def chosen(monkeypatch: pytest.MonkeyPatch, bubble: Callable[[int, int], float]) -> tuple[int, list[str]]:
    """The lag of three stages and what was said, where the bubble is a function of lag and microbatches."""

    def of(plan: Plan) -> float:
        return bubble(max(stage.versions for stage in plan.stages) - 1, plan.microbatches)

    monkeypatch.setattr(lag, "_bubble", lambda config, chain, plan: of)
    plan = make_plan(parse_placement("0:0.0:1.0:2"), batch=64, microbatches=2, mode=Mode.STALE)
    said: list[str] = []
    found = lag.least_stale(make_config({}), None, plan, said.append)
    return max(stage.versions for stage in found.stages) - 1, said


def test_the_least_lag_within_two_points_of_the_fullest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, lambda by, pieces: (0.4, 0.05, 0.031)[by]) == (1, [])
    assert chosen(monkeypatch, lambda by, pieces: (0.4, 0.05, 0.029)[by]) == (2, [])
    assert chosen(monkeypatch, lambda by, pieces: (0.04, 0.03, 0.025)[by]) == (0, [])


def test_where_no_lag_fills_it_the_microbatches_that_would_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    by, (said,) = chosen(monkeypatch, lambda by, pieces: 0.5 / pieces if by else 0.9)
    assert by == 1 and said == "ranks would wait 25% of the time; --microbatches 16 would fill it"
    _, (said,) = chosen(monkeypatch, lambda by, pieces: 0.3)
    assert (
        said == "ranks would wait 30% of the time; stages take unequally long: stagewright plan finds a better layout"
    )


def test_depths_that_hold_stages_back_are_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag, "_bubble", lambda config, chain, plan: lambda candidate: 0.75)
    plan = make_plan(parse_placement("0:0.0:1.0:2"), batch=64, microbatches=2, mode=Mode.STALE, depths=(1, 1, 1))
    said: list[str] = []
    lag.least_stale(make_config({}), None, plan, said.append)
    assert said == ["ranks would wait 75% of the time; depths 1,1,1 hold stages back: leave --depths out"]


def test_what_can_not_be_predicted_is_said() -> None:
    plan = make_plan(parse_placement("0:0.0:1"), batch=64, microbatches=2, mode=Mode.STALE)
    for momentum, said in ((0.0, ["--predict changes nothing: --momentum is 0"]), (0.9, [])):
        heard: list[str] = []
        config = make_config({"optimizer": {"predict": True, "momentum": momentum, "lr": 0.01}})
        lag.warn_of_lag(config, plan, heard.append)
        assert heard == said


def test_sizes_that_nobody_profiled_are_no_fault_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def bubble(by: int, pieces: int) -> float:
        if pieces > 4:
            raise NotProfiled(f"{64 // pieces} samples")
        return 0.2

    _, (said,) = chosen(monkeypatch, bubble)
    assert said == "ranks would wait 20% of the time; more --microbatches may fill it: profile with --samples 8 to know"


@pytest.mark.parametrize(
    ("mode", "versions", "offers"), [("stale", None, True), ("stale", "4,3,2,1", False), ("pipedream", None, False)]
)
def test_less_staleness_is_a_remedy_where_it_may_be_chosen(mode: str, versions: str | None, offers: bool) -> None:
    plan = make_plan(parse_placement("0:0.0:1.0:2.0:3"), batch=64, microbatches=1, mode=Mode(mode))
    heard: list[str] = []
    lag.warn_of_lag(make_config({"optimizer": {"lr": 0.3}, "plan": {"versions": versions}}), plan, heard.append)
    assert len(heard) == 1 and ("--staleness 1" in heard[0]) == offers


def test_a_picture_with_times_has_the_lag_that_they_ask_for(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = ("schedule", "--placement", "0:0.0:1.0:2", "--mode", "stale", "--batch", "8", "--microbatches", "8")
    main([*schedule, "--json"])
    assert json.loads(capsys.readouterr().out)["plan"]["versions"] == [2, 2, 1]
    main([*schedule, "--forward", "1,1,9", "--backward", "1,1,9", "--json"])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["plan"]["versions"] == [1, 1, 1], "the last stage never waits"
    assert "ranks would wait 60% of the time; stages take unequally long" in printed.err


def test_microbatches_that_leave_devices_idle_are_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    on = ("alexnet", "--cluster", "titan-v-8", "--devices", "4", "--batch", "224")
    main(["plan", *on, "--microbatches", "2", "--json"])
    told = json.loads(capsys.readouterr().out)["remarks"]
    assert told == ["ranks would wait 9% of the time; without --microbatches 2 other numbers are looked at"]
    main(["plan", *on, "--json"])
    assert json.loads(capsys.readouterr().out)["remarks"] == []
    few = ("--placement", "0:0-2.0:3", "--mode", "stale", "--microbatches", "2", "--json")
    main(["simulate", *on, *few])
    told = capsys.readouterr().err
    assert "2 microbatches for 3 replicas" in told and "ranks would wait" in told
    main(["simulate", *on, *few, "--staleness", "0"])
    assert "ranks would wait" not in capsys.readouterr().err
