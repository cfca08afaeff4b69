"""Plans: every default of the design in numbers, and the questions a plan answers."""

import json
import re
from dataclasses import replace
from typing import get_args, get_type_hints

import numpy as np
import pytest

from stagewright.cluster.placement import format_placement, parse_placement
from stagewright.cluster.topology import Cluster, Machine
from stagewright.config.modes import PRESETS
from stagewright.config.sections import AUTO, RunConfig
from stagewright.errors import UserError
from stagewright.plan.make import default_depths, default_microbatches, make_plan, read_plan
from stagewright.plan.plan import Mode, Plan, TiedParameter
from stagewright.runtime.comm.device import DEVICES

CLUSTER = Cluster((Machine(8), Machine(8)))
SEVEN_ONE = "0:0-6.0:7"
UNEQUAL = "0:0-2.0:3-4.0:5-6.0:7"  # 3, 2, 2 and 1 replicas


def plan(placement: str, batch: int = 12, microbatches: int | None = 4, **choices: object) -> Plan:
    return make_plan(
        parse_placement(placement, CLUSTER),
        batch=batch,
        microbatches=microbatches,
        **choices,  # type: ignore[arg-type]
    )


def versions(placement: str, mode: Mode, **choices: object) -> list[int]:
    return [stage.versions for stage in plan(placement, mode=mode, **choices).stages]


# --- Microbatches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "replicas", "expected"),
    [
        (256, [7, 1], 16),  # the first divisor from 14
        (256, [1, 7], 16),
        (256, [8], 8),  # one stage needs no filling
        (90, [7], 9),
        (90, [3, 2, 2, 1], 6),
        (97, [2, 1], 97),  # a prime: one sample each
        (4, [7, 1], 4),  # no divisor is large enough, so as many as there are
    ],
)
def test_default_microbatches_keep_every_replica_busy(batch: int, replicas: list[int], expected: int) -> None:
    assert default_microbatches(batch, replicas) == expected


def test_plans_use_the_default_microbatches() -> None:
    by_default = plan(SEVEN_ONE, batch=256, microbatches=None)
    assert (by_default.microbatches, by_default.samples) == (16, 16)


@pytest.mark.parametrize(
    ("batch", "microbatches", "near"),
    [
        (256, 15, "nearest that divide it: 4, 8, 16"),
        (10, 3, "nearest that divide it: 1, 2, 5"),
        (12, 24, "nearest that divide it: 4, 6, 12"),
        (12, 0, "nearest that divide it: 1, 2, 3"),
        (10_000, 9_999, "nearest that divide it: 2500, 5000, 10000"),
        (1, 2, "try 1"),
    ],
)
def test_error_names_microbatches_that_divide_the_batch(batch: int, microbatches: int, near: str) -> None:
    message = f"batch {batch} is not divisible by {microbatches} microbatches; {near}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        plan(SEVEN_ONE, batch=batch, microbatches=microbatches)


def test_refuses_a_batch_without_samples() -> None:
    with pytest.raises(ValueError, match="batch is 0 samples"):
        plan(SEVEN_ONE, batch=0, microbatches=None)


# --- Depths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [([7, 1], [3, 1]), ([3, 2, 2, 1], [6, 5, 3, 1]), ([1, 1, 1, 1], [7, 5, 3, 1]), ([1, 7], [9, 1]), ([8], [1])],
)
def test_default_depths_cover_what_is_behind_a_stage(replicas: list[int], expected: list[int]) -> None:
    assert default_depths(replicas) == expected


def test_plans_use_default_or_given_depths() -> None:
    assert [stage.depth for stage in plan(SEVEN_ONE).stages] == [3, 1]
    assert [stage.depth for stage in plan(SEVEN_ONE, depths=[9, 2]).stages] == [9, 2]


@pytest.mark.parametrize(
    ("depths", "message"),
    [([3], "depths 3 name 1 stages but the placement has 2"), ([3, 0], "depths 3,0: a stage needs at least 1")],
)
def test_refuses_wrong_depths(depths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(SEVEN_ONE, depths=depths)


# --- Versions --------------------------------------------------------------------------------------------------------


def test_sync_keeps_one_version() -> None:
    assert versions(UNEQUAL, Mode.SYNC) == [1, 1, 1, 1]
    assert plan(UNEQUAL).is_synchronous


@pytest.mark.parametrize(
    ("staleness", "expected"),
    [
        (None, [4, 3, 2, 1]),
        (0, [1, 1, 1, 1]),
        (1, [2, 2, 2, 1]),
        (2, [3, 3, 2, 1]),
        (3, [4, 3, 2, 1]),
        (9, [4, 3, 2, 1]),
    ],
)
def test_stale_stages_lag_by_the_stages_behind_at_most_n(staleness: int | None, expected: list[int]) -> None:
    assert versions(UNEQUAL, Mode.STALE, staleness=staleness) == expected


def test_only_a_lag_makes_a_plan_asynchronous() -> None:
    assert plan(UNEQUAL, mode=Mode.STALE, staleness=0).is_synchronous
    assert not plan(UNEQUAL, mode=Mode.STALE, staleness=1).is_synchronous
    assert not plan("0:0.0:1", mode=Mode.PIPEDREAM).is_synchronous
    # One stage of PipeDream has one version too, but it updates every round, not every batch.
    assert not plan("0:0-3", mode=Mode.PIPEDREAM).is_synchronous


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (SEVEN_ONE, [2, 1]),  # ceil(8/7)
        (UNEQUAL, [3, 3, 2, 1]),  # ceil(8/3), ceil(5/2), ceil(3/2)
        ("0:0.0:1.0:2.0:3", [4, 3, 2, 1]),
        ("0:0.0:1-7", [8, 1]),
        ("0:0-7", [1]),
    ],
)
def test_pipedream_keeps_a_version_for_each_round_in_flight(placement: str, expected: list[int]) -> None:
    assert versions(placement, Mode.PIPEDREAM) == expected


def test_plans_use_given_versions() -> None:
    assert versions(SEVEN_ONE, Mode.STALE, versions=[3, 2]) == [3, 2]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"mode": Mode.STALE, "versions": [3]}, "versions 3 name 1 stages but the placement has 2"),
        ({"mode": Mode.STALE, "versions": [3, 0]}, "versions 3,0: a stage needs at least 1"),
        ({"mode": Mode.STALE, "staleness": -1}, "staleness is -1; it must be 0"),
    ],
)
def test_refuses_wrong_versions(choices: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(SEVEN_ONE, **choices)


# --- Ranks -----------------------------------------------------------------------------------------------------------


def test_ranks_are_numbered_by_machine_then_device() -> None:
    mixed = plan("1:0.0:3,0,1:0")
    assert [str(device) for device in mixed.devices] == ["0:0", "0:3", "1:0"]
    assert [stage.ranks for stage in mixed.stages] == [(2,), (1, 0, 2)]
    assert mixed.world == 3
    assert format_placement(mixed.placement) == "1:0.0:3,0,1:0"


def test_a_rank_may_carry_several_stages() -> None:
    shared = plan("0:0-1.0:1-2.0:1")
    assert [[stage.index for stage in shared.stages_of(rank)] for rank in range(3)] == [[0], [0, 1, 2], [1]]


def test_dp_is_one_stage_over_all_devices() -> None:
    (stage,) = plan("0:4-6.0:0-1,5.1:0", mode=Mode.DP).stages
    assert (stage.ranks, stage.versions, stage.depth) == ((2, 3, 4, 0, 1, 5), 1, 1)
    assert stage.is_first and stage.is_last


def test_first_and_last_stage() -> None:
    stages = plan(UNEQUAL).stages
    assert [stage.is_first for stage in stages] == [True, False, False, False]
    assert [stage.is_last for stage in stages] == [False, False, False, True]


# --- Microbatches of a stage -----------------------------------------------------------------------------------------


def test_microbatch_i_runs_on_replica_i_mod_r() -> None:
    first, last = plan("0:2,0,1.0:3").stages
    assert [first.rank_of(i) for i in range(7)] == [2, 0, 1, 2, 0, 1, 2]
    assert [last.rank_of(i) for i in range(3)] == [3, 3, 3]


def test_own_microbatches_of_a_span() -> None:
    stage = plan("0:0-2.0:3").stages[0]
    assert list(stage.own(0, range(8))) == [0, 3, 6]
    assert list(stage.own(1, range(8))) == [1, 4, 7]
    assert list(stage.own(1, range(5, 12))) == [7, 10]
    assert list(stage.own(2, range(8, 9))) == [8]
    assert list(stage.own(2, range(3, 5))) == []


def test_versions_of_a_stale_stage() -> None:
    stage = plan(SEVEN_ONE, microbatches=4, mode=Mode.STALE, versions=[3, 1]).stages[0]
    firsts_of_batches = range(0, 24, 4)
    assert [stage.update_of(i) for i in firsts_of_batches] == [0, 1, 2, 3, 4, 5]
    assert [stage.version_of(i) for i in firsts_of_batches] == [0, 0, 0, 1, 2, 3]
    assert [stage.version_of(i) for i in range(12, 17)] == [1, 1, 1, 1, 2]


def test_after_a_change_of_plan_versions_begin_at_its_first_batch() -> None:
    stage = replace(plan(SEVEN_ONE, microbatches=4, mode=Mode.STALE, versions=[3, 1]).stages[0], origin=10)
    assert [stage.version_of(4 * batch) for batch in range(10, 15)] == [10, 10, 10, 11, 12]


def test_rounds_of_a_pipedream_stage_have_one_microbatch_per_replica() -> None:
    first, last = plan("0:0-1.0:2", mode=Mode.PIPEDREAM).stages
    assert [first.update_of(i) for i in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [first.version_of(i) for i in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert [last.version_of(i) for i in range(4)] == [0, 1, 2, 3]


def test_two_gradient_buffers_if_a_reduce_can_be_hidden() -> None:
    stale = plan("0:0-1.0:2.0:3-4", mode=Mode.STALE)
    assert [stage.num_gradients for stage in stale.stages] == [2, 1, 1]  # K>1 and r>1; r=1; K=1


# --- Pauses ----------------------------------------------------------------------------------------------------------


def test_rounds_of_all_stages_end_with_the_batch() -> None:
    stale = plan(SEVEN_ONE, microbatches=4, mode=Mode.STALE)
    assert stale.alignment == 4
    assert [stale.boundary(batch) for batch in range(4)] == [0, 4, 8, 12]


def test_pipedream_pauses_where_all_rounds_end() -> None:
    pipedream = plan(UNEQUAL, microbatches=4, mode=Mode.PIPEDREAM)
    assert pipedream.alignment == 6  # lcm of 3, 2, 2, 1
    assert [pipedream.boundary(batch) for batch in range(5)] == [0, 6, 12, 12, 18]


# --- plan.json -------------------------------------------------------------------------------------------------------


def test_describe_lists_every_choice() -> None:
    assert plan(SEVEN_ONE, mode=Mode.STALE, cuts=["classifier"]).describe() == {
        "mode": "stale",
        "placement": "0:0-6.0:7",
        "cuts": ["classifier"],
        "batch": 12,
        "microbatches": 4,
        "versions": [2, 1],
        "depths": [3, 1],
        "agree": False,
        "flags": False,
    }


@pytest.mark.parametrize("mode", list(Mode))
def test_a_plan_in_more_microbatches_is_the_plan_made_with_so_many(mode: Mode) -> None:
    placement = parse_placement("0:0-1.0:2")
    plans = [make_plan(placement, batch=24, microbatches=count, mode=mode, depths=None) for count in (4, 12)]
    assert plans[0].with_microbatches(12) == plans[1]


# --- options ---------------------------------------------------------------------------------------------------------


def test_options_name_every_kind_of_device() -> None:
    assert set(get_args(get_type_hints(RunConfig)["device"])) == {AUTO, *DEVICES}


def test_a_plan_file_keeps_its_ties_and_may_have_none() -> None:
    tied = [TiedParameter(("embed.weight", "head.weight"), (0, 2), 42), TiedParameter(("gain",), (0, 1), 6)]
    plan = make_plan(
        parse_placement("0:0.0:1.0:2"), batch=8, microbatches=4, mode=Mode.STALE, cuts=("b", "c"), tied=tied
    )
    assert [stage.versions for stage in plan.stages] == [3, 3, 3]  # homes that overlap are one tie
    assert [tie.stages for tie in plan.ties] == [(0, 1, 2)]
    described = plan.describe()
    assert read_plan(json.dumps(described), "file") == plan
    described.pop("ties")
    assert read_plan(json.dumps(described), "file").ties == ()
    with pytest.raises(UserError, match=r"plan file: PlanFile\.ties: Tie\.parameters"):
        read_plan(json.dumps(described | {"ties": [{"stages": [0, 1], "parameters": "w"}]}), "file")
    with pytest.raises(UserError, match="stages 0, 5 share 'w', but the plan has 3 stages"):
        ties = [{"stages": [0, 5], "parameters": [{"names": ["w"], "homes": [0, 5], "size": 1}]}]
        read_plan(json.dumps(described | {"ties": ties}), "file")


def test_every_mode_has_a_preset_whose_versions_take_arrays() -> None:
    assert list(PRESETS) == list(Mode)
    replicas = np.array([4, 2, 1])
    behind = replicas.sum() - replicas.cumsum()
    for mode, preset in PRESETS.items():
        plan = make_plan(parse_placement("0:0-3.0:4-5.0:6"), batch=8, microbatches=8, mode=mode)
        if preset.has_stages:
            found = [preset.versions(3 - index, behind, replicas, None)[index] for index in range(3)]
            assert found == [stage.versions for stage in plan.stages]
