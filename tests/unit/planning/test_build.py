"""From options to a plan: its defaults, its lag, the warnings about it, and which machines it may name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stagewright
from stagewright.cli.main import main
from stagewright.cluster.placement import parse_placement
from stagewright.config.toml import make_config
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode, Plan
from stagewright.planning.build import build_plan, choose_staleness, stage_numbers, warn_about_lag
from stagewright.planning.simulate import balanced_costs, steady
from stagewright.profile.profile import NotProfiled


def three_stages(**choices: Any) -> Plan:
    return make_plan(parse_placement("0:0.0:1.0:2"), batch=64, microbatches=2, mode=Mode.STALE, **choices)


def chosen(bubble: Callable[[int, int], float]) -> tuple[int, list[str]]:
    """The lag of three stages and the warnings, where the bubble is a function of lag and microbatches."""

    def bubble_of(plan: Plan) -> float:
        return bubble(max(stage.versions for stage in plan.stages) - 1, plan.microbatches)

    warnings: list[str] = []
    plan = choose_staleness(make_config({}), three_stages(), bubble_of, warnings.append)
    return max(stage.versions for stage in plan.stages) - 1, warnings


def test_chooses_the_least_lag_within_two_points_of_the_fullest() -> None:
    assert chosen(lambda lag, microbatches: (0.4, 0.05, 0.031)[lag]) == (1, [])
    assert chosen(lambda lag, microbatches: (0.4, 0.05, 0.029)[lag]) == (2, [])
    assert chosen(lambda lag, microbatches: (0.04, 0.03, 0.025)[lag]) == (0, [])


def test_names_the_microbatches_that_would_fill_the_pipeline() -> None:
    lag, (warning,) = chosen(lambda lag, microbatches: 0.5 / microbatches if lag else 0.9)
    assert lag == 1 and "wait 25% of the time" in warning and "--microbatches 16 would" in warning
    _, (warning,) = chosen(lambda lag, microbatches: 0.3)
    assert "wait 30% of the time" in warning and "unequally long: stagewright plan" in warning


def test_blames_depths_that_hold_stages_back() -> None:
    warnings: list[str] = []
    choose_staleness(make_config({}), three_stages(depths=(1, 1, 1)), lambda plan: 0.75, warnings.append)
    (warning,) = warnings
    assert "wait 75% of the time" in warning and "depths 1,1,1" in warning and "leave --depths out" in warning


def test_asks_for_a_profile_of_sizes_that_it_does_not_cover() -> None:
    def bubble(lag: int, microbatches: int) -> float:
        if microbatches > 4:
            raise NotProfiled(f"{64 // microbatches} samples")
        return 0.2

    _, (warning,) = chosen(bubble)
    assert "wait 20% of the time" in warning and "profile with --samples 8" in warning


def test_warns_when_there_is_nothing_to_extrapolate() -> None:
    plan = make_plan(parse_placement("0:0.0:1"), batch=64, microbatches=2, mode=Mode.STALE)
    for momentum, expected in ((0.0, ["--predict changes nothing: --momentum is 0"]), (0.9, [])):
        warnings: list[str] = []
        config = make_config({"optimizer": {"predict": True, "momentum": momentum, "lr": 0.01}})
        warn_about_lag(config, plan, warnings.append)
        assert warnings == expected


@pytest.mark.parametrize(
    ("mode", "versions", "offers"), [("stale", None, True), ("stale", "4,3,2,1", False), ("pipedream", None, False)]
)
def test_offers_less_staleness_only_where_it_is_an_option(mode: str, versions: str | None, offers: bool) -> None:
    plan = make_plan(parse_placement("0:0.0:1.0:2.0:3"), batch=64, microbatches=1, mode=Mode(mode))
    warnings: list[str] = []
    warn_about_lag(make_config({"optimizer": {"lr": 0.3}, "plan": {"versions": versions}}), plan, warnings.append)
    assert len(warnings) == 1 and ("--staleness 1" in warnings[0]) == offers


def test_schedule_chooses_the_lag_by_the_given_times(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = ("schedule", "--placement", "0:0.0:1.0:2", "--mode", "stale", "--batch", "8", "--microbatches", "8")
    main([*schedule, "--json"])
    assert json.loads(capsys.readouterr().out)["plan"]["versions"] == [2, 2, 1]
    main([*schedule, "--forward", "1,1,9", "--backward", "1,1,9", "--json"])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["plan"]["versions"] == [1, 1, 1], "the last stage never waits"
    assert "ranks would wait 60% of the time; stages take unequally long" in printed.err


def test_warns_about_microbatches_that_leave_devices_idle(capsys: pytest.CaptureFixture[str]) -> None:
    on = ("alexnet", "--cluster", "titan-v-8", "--devices", "4", "--batch", "224")
    main(["plan", *on, "--microbatches", "2", "--json"])
    (warning,) = json.loads(capsys.readouterr().out)["remarks"]
    assert "wait 9% of the time" in warning and "--microbatches 2" in warning
    main(["plan", *on, "--json"])
    assert json.loads(capsys.readouterr().out)["remarks"] == []
    few = ("--placement", "0:0-2.0:3", "--mode", "stale", "--microbatches", "2", "--json")
    main(["simulate", *on, *few])
    error = capsys.readouterr().err
    assert "2 microbatches for 3 replicas" in error and "ranks would wait" in error
    main(["simulate", *on, *few, "--staleness", "0"])
    assert "ranks would wait" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"mode": "pipedream", "placement": "0:0.0:1"}, "fp16 .*sync, stale and dp.* pipedream"),
        ({"placement": "0:0-3.0:4", "microbatches": 2}, "a microbatch for each of the 4 replicas, but a batch has 2"),
    ],
)
def test_refuses_plans_that_fp16_does_not_support(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_plan(make_config({"plan": plan, "run": {"precision": "fp16"}}), None)


def test_fp16_stages_exchange_overflow_flags() -> None:
    def exchanged(mode: str, placement: str) -> tuple[bool, bool]:
        tables = {"plan": {"mode": mode, "placement": placement}, "run": {"precision": "fp16"}}
        plan = build_plan(make_config(tables), None)
        return plan.agree, plan.flags

    assert exchanged("sync", "0:0.0:1") == (True, False)
    assert exchanged("stale", "0:0.0:1") == (False, True)
    assert exchanged("dp", "0:0-1") == (False, False)


def test_default_lag_is_the_least_that_keeps_the_pipeline_full() -> None:
    def versions(microbatches: int) -> list[int]:
        tables = {"plan": {"placement": "0:0.0:1.0:2.0:3", "batch": 64, "microbatches": microbatches}}
        return [stage.versions for stage in build_plan(make_config(tables), None).stages]

    assert versions(64) == [2, 2, 2, 1]  # many microbatches: one update of lag is enough
    assert max(versions(2)) > 2  # few: it takes more


def test_warns_about_a_pipeline_that_can_not_be_filled() -> None:
    warnings: list[str] = []
    tables = {"plan": {"placement": "0:0-2.0:3", "batch": 24, "microbatches": 1}}
    build_plan(make_config(tables), None, warnings.append)
    (idle,) = (warning for warning in warnings if "would wait" in warning)
    filling = int(idle.partition("--microbatches ")[2].split()[0])
    plan = make_plan(parse_placement("0:0-2.0:3"), batch=filling, microbatches=filling, mode=Mode.STALE)
    assert steady(plan, balanced_costs(plan)).bubble < 0.05
    warnings.clear()
    build_plan(make_config(tables | {"run": {"emulate": True}}), None, warnings.append)
    assert not any("would wait" in warning for warning in warnings)  # ranks of one process take turns


@pytest.mark.parametrize(
    ("plan", "optimizer", "expected"),
    [
        ({"mode": "stale", "staleness": 1}, {"lr": 0.4}, "lag 1 learning rate x curvature is stable up to 0.1"),
        ({"mode": "stale", "staleness": 1}, {"lr": 0.4, "predict": True}, "stable up to 0.25"),
        ({"mode": "stale", "staleness": 1}, {"lr": 0.05}, None),
        ({"mode": "stale", "staleness": 1}, {"lr": 0.4, "name": "adamw"}, None),
        ({"mode": "sync"}, {"lr": 0.4}, None),
        ({"mode": "sync"}, {"predict": True}, "--predict changes nothing: no stage lags"),
    ],
)
def test_warns_when_the_rate_is_unstable_at_the_lag(
    plan: dict[str, object], optimizer: dict[str, object], expected: str | None
) -> None:
    warnings: list[str] = []
    tables = {"plan": {"placement": "0:0.0:1", "batch": 64, "microbatches": 16, **plan}, "optimizer": optimizer}
    build_plan(make_config(tables), None, warnings.append)
    assert [expected in warning for warning in warnings] == [True] if expected else warnings == []


def test_numbers_per_stage_are_integers() -> None:
    assert stage_numbers("3,1", "versions", ",") == [3, 1] and stage_numbers("11:7", "shares", ":") == [11, 7]
    assert stage_numbers(None, "depths", ",") is None
    with pytest.raises(ValueError, match=r"^--versions .*comma-separated.*3,1.*'3;1'"):
        stage_numbers("3;1", "versions", ",")


# --- Machines ---------------------------------------------------------------------------------------------------------


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10))


def test_an_emulated_placement_may_name_any_machine(tmp_path: Path) -> None:
    def trained(placement: str) -> dict[str, torch.Tensor]:
        file = tmp_path / f"{placement}.safetensors"
        result = stagewright.train(
            net, image=8, samples=64, batch=32, steps=3, mode="stale", cut="3", emulate=True, placement=placement,
            runs=str(tmp_path), export=str(file), monitor_every=0,
        )  # fmt: skip
        assert json.loads((result.folder / "plan.json").read_text())["placement"] == placement
        return result.weights()

    one, two = trained("0:0-15.0:0-15"), trained("0:0-7,1:0-7.0:0-7,1:0-7")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_only_emulated_placements_may_name_machines_that_are_not_there() -> None:
    tables: dict[str, dict[str, Any]] = {"plan": {"placement": "0:0.1:0"}}
    with pytest.raises(ValueError, match=r"'1:0' names machine 1 .* 1 \(0-0\)"):
        build_plan(make_config(tables), None)
    assert build_plan(make_config(tables | {"run": {"emulate": True}}), None).world == 2


def test_every_machine_of_nodes_needs_a_stage() -> None:
    tables = {"plan": {"placement": "0:0.0:1"}, "nodes": {"list": "10.0.0.1,10.0.0.2"}}
    with pytest.raises(ValueError, match=r"machine 1 but placement 0:0\.0:1"):
        build_plan(make_config(tables), None)
