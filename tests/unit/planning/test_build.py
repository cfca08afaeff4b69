"""From options to a plan: its defaults, its lag, the warnings about it, and which machines it may name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stagewright
from stagewright.cli.main import main
from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import Placement, parse_placement
from stagewright.cluster.topology import ANYWHERE, Cluster
from stagewright.config.sections import PlanConfig
from stagewright.config.toml import make_config
from stagewright.errors import UserError
from stagewright.model.chain import Chain
from stagewright.plan.estimate import Setting
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode, Plan
from stagewright.plan.search import best_cuts
from stagewright.planning.build import (
    build_plan,
    resolved_options,
    stage_numbers,
    warn_about_lag,
    warn_about_waiting,
    with_agreement,
)
from stagewright.planning.climb import bubble_in, least_lag
from stagewright.planning.setting import make_setting
from stagewright.planning.simulate import StageCosts, balanced_costs, steady
from stagewright.planning.traced import chain_of, trace_model
from stagewright.profile.profile import NotProfiled
from stagewright.runtime.multinode.nodes import cluster_of
from stagewright.voice import SILENT, Voice


def built(tables: dict[str, dict[str, Any]], voice: Voice = SILENT) -> Plan:
    """The plan of a run without a model, as `stagewright schedule` makes it."""
    config = make_config(tables)
    emulated = config.run.emulate
    plan = build_plan(config.plan, cluster_of(config), costs=balanced_costs, never_waits=emulated, voice=voice)
    warn_about_lag(config, plan, voice)
    return with_agreement(config, plan)


def three_stages(**choices: Any) -> Plan:
    return make_plan(parse_placement("0:0.0:1.0:2"), batch=64, microbatches=2, mode=Mode.STALE, **choices)


def chosen(bubble: Callable[[int, int], float]) -> tuple[int, list[str]]:
    """The lag of three stages and the warnings, where the bubble is a function of lag and microbatches."""

    def bubble_of(plan: Plan) -> float:
        return bubble(max(stage.versions for stage in plan.stages) - 1, plan.microbatches)

    warnings: list[str] = []
    plan = least_lag(three_stages(), bubble_of)
    warn_about_waiting(plan, bubble_of, Voice(warnings.append))
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
    warn_about_waiting(three_stages(depths=(1, 1, 1)), lambda plan: 0.75, Voice(warnings.append))
    (warning,) = warnings
    assert "wait 75% of the time" in warning and "depths 1,1,1" in warning and "leave --depths out" in warning


def test_asks_for_a_profile_of_sizes_that_it_does_not_cover() -> None:
    def bubble(lag: int, microbatches: int) -> float:
        if microbatches > 4:
            raise NotProfiled(f"{64 // microbatches} samples")
        return 0.2

    _, (warning,) = chosen(bubble)
    assert "wait 20% of the time" in warning and "profile with --samples 8" in warning


@pytest.mark.parametrize(
    ("mode", "versions", "offers"), [("stale", None, True), ("stale", "4,3,2,1", False), ("pipedream", None, False)]
)
def test_offers_less_staleness_only_where_it_is_an_option(mode: str, versions: str | None, offers: bool) -> None:
    plan = make_plan(parse_placement("0:0.0:1.0:2.0:3"), batch=64, microbatches=1, mode=Mode(mode))
    warnings: list[str] = []
    warn_about_lag(
        make_config({"optimizer": {"lr": 0.3}, "plan": {"versions": versions}}), plan, Voice(warnings.append)
    )
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
    assert re.search(r"wait \d+% of the time", warning) and "--microbatches 2" in warning
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
        ({"mode": "pipedream", "placement": "0:0.0:1"}, "fp16 .*dp, sync, stale, .* pipedream"),
        ({"placement": "0:0-3.0:4", "microbatches": 2}, "a microbatch for each of the 4 replicas, but a batch has 2"),
    ],
)
def test_refuses_plans_that_fp16_does_not_support(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built({"plan": plan, "run": {"device": "cuda", "precision": "fp16"}})


def test_fp16_stages_exchange_overflow_flags() -> None:
    def exchanged(mode: str, placement: str) -> tuple[bool, bool]:
        tables = {"plan": {"mode": mode, "placement": placement}, "run": {"device": "cuda", "precision": "fp16"}}
        plan = built(tables)
        return plan.agree, plan.flags

    assert exchanged("sync", "0:0.0:1") == (True, False)
    assert exchanged("stale", "0:0.0:1") == (False, True)
    assert exchanged("dp", "0:0-1") == (False, False)


def test_default_lag_is_the_least_that_keeps_the_pipeline_full() -> None:
    def versions(microbatches: int) -> list[int]:
        tables = {"plan": {"placement": "0:0.0:1.0:2.0:3", "batch": 64, "microbatches": microbatches}}
        return [stage.versions for stage in built(tables).stages]

    assert versions(64) == [2, 2, 2, 1]  # many microbatches: one update of lag is enough
    assert max(versions(2)) > 2  # few: it takes more


def test_warns_about_a_pipeline_that_can_not_be_filled() -> None:
    warnings: list[str] = []
    tables = {"plan": {"placement": "0:0-2.0:3", "batch": 24, "microbatches": 1}}
    built(tables, Voice(warnings.append))
    (idle,) = (warning for warning in warnings if "would wait" in warning)
    filling = int(idle.partition("--microbatches ")[2].split()[0])
    plan = make_plan(parse_placement("0:0-2.0:3"), batch=filling, microbatches=filling, mode=Mode.STALE)
    assert steady(plan, balanced_costs(plan)).bubble < 0.05
    warnings.clear()
    built(tables | {"run": {"emulate": True}}, Voice(warnings.append))
    assert not any("would wait" in warning for warning in warnings)  # ranks of one process take turns


@pytest.mark.parametrize(
    ("plan", "optimizer", "expected"),
    [
        ({"mode": "stale", "staleness": 1}, {"lr": 0.4}, "lag 1 learning rate x curvature is stable up to 0.1"),
        ({"mode": "stale", "staleness": 1}, {"lr": 0.4, "predict": True}, "stable up to 0.25"),
        ({"mode": "stale", "staleness": 1}, {"lr": 0.05}, None),
        ({"mode": "stale", "staleness": 1}, {"lr": 0.4, "name": "adamw"}, None),
        ({"mode": "sync"}, {"lr": 0.4}, None),
        ({"mode": "stale", "staleness": 0}, {"predict": True}, "--predict changes nothing: no stage lags"),
    ],
)
def test_warns_when_the_rate_is_unstable_at_the_lag(
    plan: dict[str, object], optimizer: dict[str, object], expected: str | None
) -> None:
    warnings: list[str] = []
    tables = {"plan": {"placement": "0:0.0:1", "batch": 64, "microbatches": 16, **plan}, "optimizer": optimizer}
    built(tables, Voice(warnings.append))
    assert [expected in warning for warning in warnings] == [True] if expected else warnings == []


def test_numbers_per_stage_are_integers() -> None:
    assert stage_numbers("3,1", "versions", ",") == [3, 1] and stage_numbers("11:7", "shares", ":") == [11, 7]
    assert stage_numbers(None, "depths", ",") is None
    with pytest.raises(ValueError, match=r"^--versions .*comma-separated.*3,1.*'3;1'"):
        stage_numbers("3;1", "versions", ",")


# --- Sizes, cuts and lag ----------------------------------------------------------------------------------------------


def sizes(placement: str, **choices: Any) -> tuple[int, int]:
    given = {name: choices.pop(name) for name in ("batch", "microbatches", "mode") if name in choices}
    plan = build_plan(make_config({"plan": {"placement": placement} | given}).plan, Cluster(), **choices)
    return plan.batch, plan.microbatches


def test_the_number_of_microbatches_follows_from_the_widest_stage() -> None:
    assert sizes("0:0-2.0:3", batch=24) == (24, 6)
    assert sizes("0:0-2.0:3", batch=24, one_each=True) == (24, 3)
    assert sizes("0:0-2.0:3", batch=16, one_each=True) == (16, 8), "3 do not divide 16"
    assert sizes("0:0-2.0:3", batch=24, microbatches=12, one_each=True) == (24, 12)
    assert sizes("0:0-1.0:1-2", mode="dp", batch=15, one_each=True) == (15, 3), "one stage of three devices"
    with pytest.raises(UserError, match="batch 24 is not divisible by 5 microbatches"):
        sizes("0:0.0:1", batch=24, microbatches=5)


def small() -> tuple[Chain, Setting]:
    model = trace_model("resnet8", image=32)
    return chain_of("resnet8", image=32), make_setting(model.shapes, shipped().cluster("rtx-3090-2"), "fp32")


def options(**plan: Any) -> PlanConfig:
    return make_config({"plan": {"placement": "0:0.0:1", "batch": 8, "microbatches": 4} | plan}).plan


def test_cuts_are_given_or_the_settings_or_by_operations() -> None:
    chain, setting = small()
    where = setting.cluster
    named = build_plan(options(cut="layer2"), where, chain)
    assert named.cuts == chain.by_names(["layer2"])
    assert build_plan(options(shares="1:2"), where, chain).cuts == chain.by_shares([1, 2])
    best = best_cuts(setting, named.placement, Mode.SYNC, 8, 4)
    assert build_plan(options(mode="sync"), where, chain, lambda placement: setting).cuts == best
    assert build_plan(options(mode="sync"), where, None, lambda placement: setting).cuts == best
    assert build_plan(options(), where, chain).cuts == chain.by_shares([1, 1]) != best
    assert build_plan(options(mode="dp"), where, chain, lambda placement: setting).cuts == ()
    with pytest.raises(UserError, match="--cut layer2,layer3 makes 3 stages but the placement has 2"):
        build_plan(options(cut="layer2,layer3"), where, chain)


def test_the_setting_is_asked_once_and_only_for_what_is_open() -> None:
    chain, setting = small()
    asked: list[Placement] = []

    def ask(placement: Placement) -> Setting:
        asked.append(placement)
        return setting

    for given in ({"cut": "layer2", "staleness": 1}, {"cut": "layer2", "mode": "sync"}, {"mode": "dp"}):
        build_plan(options(**given), setting.cluster, chain, ask)
        assert asked == []
    build_plan(options(), setting.cluster, chain, ask)
    assert asked == [parse_placement("0:0.0:1")]


def test_the_lag_is_the_settings_choice_or_that_of_costs_or_the_largest() -> None:
    def lag(**choices: Any) -> int:
        plan = build_plan(
            make_config({"plan": {"placement": "0:0.0:1.0:2", "batch": 8, "microbatches": 8}}).plan, ANYWHERE, **choices
        )
        return max(stage.versions for stage in plan.stages) - 1

    assert lag() == 2, "nothing to choose by"
    assert lag(costs=lambda plan: StageCosts([1, 1, 9], [1, 1, 9])) == 0, "the last stage never waits"
    chain, setting = small()
    two = options(microbatches=8)
    chosen = build_plan(two, setting.cluster, chain, lambda placement: setting)
    assert chosen == least_lag(chosen, bubble_in(setting))
    other = build_plan(two, setting.cluster, chain, lambda placement: setting, costs=lambda plan: 1 / 0)
    assert other == chosen, "costs are only for where there is no setting"


def test_gpipe_holds_a_whole_batch_in_flight() -> None:
    plan = build_plan(options(placement="0:0-1.0:2", policy="gpipe", mode="sync"), Cluster())
    assert [stage.depth for stage in plan.stages] == [2, 4]
    uneven = build_plan(options(placement="0:0-2.0:3", policy="gpipe", mode="sync"), Cluster())
    assert [stage.depth for stage in uneven.stages] == [2, 4], "one of the three replicas has two of the four"


# --- Plan files -------------------------------------------------------------------------------------------------------


def plan_file(path: Path, **changes: Any) -> PlanConfig:
    chain, setting = small()
    plan = build_plan(options(staleness=0, depths="3,2", cut="layer2"), setting.cluster, chain)
    path.write_text(json.dumps(plan.describe() | changes))
    return make_config({"plan": {"file": str(path)}}).plan


def test_a_plan_file_is_the_plan(tmp_path: Path) -> None:
    chain, setting = small()
    file = plan_file(tmp_path / "plan.json", versions=[3, 1])
    plan = build_plan(file, setting.cluster, chain, lambda placement: 1 / 0)
    assert [(stage.versions, stage.depth) for stage in plan.stages] == [(3, 3), (1, 2)]
    assert (plan.batch, plan.microbatches, plan.cuts) == (8, 4, chain.by_names(["layer2"]))
    assert build_plan(file, setting.cluster) == plan, "without a model, too"
    resolved = resolved_options(file, plan)
    assert resolved.file is None and build_plan(resolved, setting.cluster, chain) == plan


def test_the_cuts_of_a_plan_file_are_units_of_the_model(tmp_path: Path) -> None:
    chain, setting = small()
    path = tmp_path / "plan.json"
    assert build_plan(plan_file(path, cuts=["layer3"]), setting.cluster, chain).cuts == chain.by_names(["layer3"])
    for cuts in ([], ["layer2", "layer3"], [chain.units[0]]):
        with pytest.raises(UserError, match=r"plan\.json has 2 stages, but its cuts"):
            build_plan(plan_file(path, cuts=cuts), setting.cluster, chain)
    with pytest.raises(UserError, match=r"plan\.json is of another model: .*'features'"):
        build_plan(plan_file(path, cuts=["features"]), setting.cluster, chain)
    with pytest.raises(UserError, match=r"none\.json: No such file .*stagewright plan -o"):
        build_plan(make_config({"plan": {"file": "none.json"}}).plan, setting.cluster, chain)


def test_a_plan_file_with_idle_ranks_is_warned_about(tmp_path: Path) -> None:
    warnings: list[str] = []
    file = plan_file(tmp_path / "plan.json", placement="0:0-1.0:2", microbatches=1)
    build_plan(file, Cluster(), voice=Voice(warnings.append))
    assert len(warnings) == 1 and "1 microbatch for 2 replicas" in warnings[0]


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

    one, two = trained("0:0-3.0:0-3"), trained("0:0-1,1:0-1.0:0-1,1:0-1")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_only_emulated_placements_may_name_machines_that_are_not_there() -> None:
    tables: dict[str, dict[str, Any]] = {"plan": {"placement": "0:0.1:0"}}
    with pytest.raises(ValueError, match=r"'1:0' names machine 1 .* 1 \(0-0\)"):
        built(tables)
    assert built(tables | {"run": {"emulate": True}}).world == 2
