"""The planner's answers: what it recommends, what it always compares with, and what it says when nothing fits."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest

from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import parse_placement
from stagewright.cluster.specs import DeviceSpec
from stagewright.cluster.topology import Cluster, Device, Level, Link, Machine
from stagewright.metrics import MIB
from stagewright.plan.estimate import Estimate, Setting
from stagewright.plan.make import make_plan, read_plan
from stagewright.plan.plan import Mode
from stagewright.plan.search import best_cuts, make_search
from stagewright.planning.climb import choose_depth, every_lag
from stagewright.planning.planner import Choice, choose, explain
from stagewright.planning.predict import predict
from stagewright.planning.setting import make_setting
from stagewright.planning.space import microbatch_counts
from stagewright.planning.traced import trace_model
from stagewright.profile.profile import Ceilings, Profile, Table, Transfer, Unit
from tests.unit.planning.laws import make_made_setting, random_setting

pytestmark = pytest.mark.xdist_group("planner")  # its plans of eight cards are made once


def setting(model: str, cluster: str, software: str = "stagewright", devices: int | None = None) -> Setting:
    catalog = shipped()
    where = catalog.cluster(cluster)
    where = where.first(devices) if devices else where
    return make_setting(trace_model(model).shapes, where, "fp32", catalog=catalog, software=software)


@pytest.mark.parametrize("placement", ["0:0-6.0:7", "0:0-3.0:4-5.0:6-7", "0:0.0:1-2.0:3", "0:0.0:1-7"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_software_that_passes_whole_batches_never_deadlocks(placement: str, staleness: int) -> None:
    where = setting("alexnet", "titan-v-8", "oneflow")
    stages = parse_placement(placement)
    cuts = ("features.6", "classifier.1")[-(len(stages) - 1) :]
    for count in (1, 3, 12, 42):
        plan = make_plan(stages, batch=84, microbatches=count, mode=Mode.STALE, staleness=staleness, cuts=cuts)
        assert predict(plan, where).images_per_second > 0


def test_plans_for_software_that_passes_whole_batches() -> None:
    assert choose(setting("alexnet", "titan-v-8", "oneflow", devices=3), 224).best.prediction.images_per_second > 0


@pytest.fixture(scope="module")
def titans() -> Choice:
    """VGG-16 on eight cards without NVLink."""
    return choose(setting("vgg16", "titan-v-8"), 224)


def test_vgg_on_eight_cards_without_nvlink_is_seven_and_one(titans: Choice) -> None:
    choice = titans
    assert choice.best.plan.shape == "7-1" and choice.best.plan.mode is Mode.STALE
    assert choice.best.speedup > 1.3
    parallel = next(candidate for candidate in choice.candidates if candidate.plan.mode is Mode.DP)
    assert parallel.speedup == 1.0 and "528 MiB of gradient" in parallel.why
    assert choice.best.prediction.images_per_second >= 0.97 * choice.fastest.prediction.images_per_second


def test_resnet_on_nvlink_is_plain_data_parallel() -> None:
    choice = choose(setting("resnet50", "v100-32", devices=4), 128)
    assert choice.best.plan.mode is Mode.DP


def test_candidates_are_sorted_and_each_has_a_reason() -> None:
    choice = choose(setting("alexnet", "rtx-2080ti-4"), 256)
    rates = [candidate.prediction.images_per_second for candidate in choice.candidates]
    assert rates == sorted(rates, reverse=True) and all(candidate.why for candidate in choice.candidates)
    assert any(candidate.plan.mode is Mode.DP for candidate in choice.candidates)


def test_the_best_plan_without_lag_is_among_the_candidates_where_it_is_asked_for() -> None:
    where = setting("vgg16", "titan-v-8", devices=4)
    (alone, lagging, both) = (
        choose(where, 128, modes=(Mode.SYNC,)).best,
        choose(where, 128).without_lag,
        choose(where, 128, synchronous=True),
    )
    assert lagging is not None and both.without_lag is not None
    assert lagging.plan.mode is Mode.DP, "a search with lag shows no plan of several stages without"
    assert both.without_lag.plan == alone.plan and alone.plan.mode is Mode.SYNC
    rates = [candidate.prediction.images_per_second for candidate in both.candidates]
    assert rates == sorted(rates, reverse=True) and not both.best.plan.is_synchronous


def test_a_shape_that_both_searches_find_is_listed_once() -> None:
    choice = choose(setting("alexnet", "titan-v-8", devices=4), 256, synchronous=True)
    shapes = [(candidate.plan.mode, candidate.plan.shape) for candidate in choice.candidates]
    assert len(set(shapes)) == len(shapes) and any(mode is Mode.SYNC for mode, _ in shapes)


def with_memory(where: Setting, mib: int) -> Setting:
    def devices(kind: str):  # type: ignore[no-untyped-def]
        return replace(shipped().device(kind), memory=mib * MIB)

    return replace(where, devices=devices)


def test_plans_fit_small_memory() -> None:
    choice = choose(with_memory(setting("vgg16", "rtx-2080ti-4"), 3300), 64)
    assert all(candidate.prediction.fits for candidate in choice.candidates)


def test_data_parallel_that_fits_in_more_microbatches_is_tried() -> None:
    where = with_memory(setting("vgg16", "rtx-2080ti-4", devices=2), 3500)
    (parallel,) = (c.plan for c in choose(where, 64).candidates if c.plan.mode is Mode.DP and c.plan.world == 2)
    assert parallel.microbatches > 2, "with one microbatch a device it does not fit"


def test_error_names_the_rank_and_bytes_if_nothing_fits() -> None:
    with pytest.raises(ValueError, match=r"nothing fits: .*rank 0.*too few"):
        choose(with_memory(setting("vgg16", "rtx-2080ti-4"), 1000), 64)


def test_a_plan_reads_back_from_its_file() -> None:
    plan = choose(setting("vgg16", "rtx-2080ti-4"), 64).best.plan
    assert read_plan(json.dumps(plan.describe()), "here", shipped().cluster("rtx-2080ti-4")) == plan


def test_microbatches_divide_the_batch() -> None:
    assert microbatch_counts(224, 8) == [8, 14, 16, 28, 32]
    assert microbatch_counts(7, 8) == [7]
    assert all(2016 % count == 0 for count in microbatch_counts(2016, 8))


@pytest.mark.parametrize(("mode", "own"), [(Mode.SYNC, "1,1"), (Mode.PIPEDREAM, "2,1")])
def test_refuses_a_plan_file_whose_versions_do_not_match_its_mode(mode: Mode, own: str) -> None:
    described = make_plan(parse_placement("0:0-1.0:2"), batch=8, microbatches=4, mode=mode).describe()
    assert read_plan(json.dumps(described), "here").mode is mode
    with pytest.raises(ValueError, match=f"plan here: versions 3,1 are not those of mode {mode}, {own}; use mode"):
        read_plan(json.dumps(described | {"versions": [3, 1]}), "here")


def profiled(*sizes: int) -> Setting:
    """Four equal units, measured on two processes at some sizes."""

    def table(samples: int) -> Table:
        return Table("fp32", samples, tuple(Unit(name, "linear", samples, samples, 9, 9, 9, 9, 9) for name in "abcd"))

    ceilings = Ceilings({"fp32": 1e9}, 1e9, 5e8, 1e8, (Transfer(0, 1, 1e9, 1e-5),))
    profile = Profile("m", "cpu", "stagewright", (3, 4, 4), 2, ceilings, tuple(table(size) for size in sizes))
    return make_setting(profile, None, "fp32")


def test_tries_only_sizes_that_the_profile_covers() -> None:
    choice = choose(profiled(8, 16), 64)
    assert {candidate.plan.samples for candidate in choice.candidates} == {8, 16} and choice.unprofiled == (32,)
    assert {candidate.plan.mode for candidate in choice.candidates} == {Mode.DP, Mode.SYNC, Mode.STALE}
    assert choose(profiled(8, 32), 64).unprofiled == ()
    assert microbatch_counts(240, 2, lambda samples: 40 <= samples <= 60) == [4, 5, 6]


def test_one_error_names_every_size_that_the_search_needs() -> None:
    with pytest.raises(ValueError, match=r"of 8 to 16 samples .* --samples 32,64,128$"):
        choose(profiled(8, 16), 256)
    with pytest.raises(ValueError, match=r"--samples 4$"):
        choose(profiled(8, 16), 64, microbatches=16)


def test_explains_a_unit() -> None:
    where = setting("vgg16", "rtx-2080ti-4")
    plan = choose(where, 64).best.plan
    unit = explain(where, plan, "classifier.0")
    assert unit["parameters"] == 25088 * 4096 + 4096 and unit["stage"] == len(plan.stages) - 1
    with pytest.raises(ValueError, match=r"'clasifier\.0'.*classifier\.0"):
        explain(where, plan, "clasifier.0")


def test_chooses_the_least_depth(titans: Choice) -> None:
    where = setting("vgg16", "titan-v-8")
    for candidate in titans.candidates[:3]:
        plan = candidate.plan
        if len(plan.stages) > 1 and plan.stages[0].depth > 1:
            stages = [s if s.is_last else replace(s, depth=max(1, s.depth - 1)) for s in plan.stages]
            shallower = predict(replace(plan, stages=tuple(stages)), where)
            usual = make_plan(plan.placement, batch=224, microbatches=plan.microbatches, mode=plan.mode, cuts=plan.cuts)
            if plan.stages[0].depth >= usual.stages[0].depth:
                assert shallower.images_per_second < candidate.prediction.images_per_second


def test_chooses_the_least_lag(titans: Choice) -> None:
    where = setting("vgg16", "titan-v-8")
    for candidate in titans.candidates:
        if candidate.plan.mode is Mode.STALE and len(candidate.plan.stages) == 3:
            full = replace(
                candidate.plan,
                stages=tuple(replace(stage, versions=3 - stage.index) for stage in candidate.plan.stages),
            )
            assert candidate.prediction.steady.bubble <= predict(full, where).steady.bubble + 0.02


# --- Faults that were there -------------------------------------------------------------------------------------------


def chain(*times: float, parameters: int = 1000, live: int = 100) -> list[Unit]:
    return [
        Unit(f"u{index}", "made", time, 2 * time, parameters, live, live, live, 100) for index, time in enumerate(times)
    ]


def box(kind: str, devices: int, bandwidth: float = 1e10) -> Machine:
    return Machine(devices, kind, (Level(Link("inside", bandwidth, 1e-6), (tuple(range(devices)),)),))


def on(*machines: Machine, network: float = 1e9) -> Cluster:
    return Cluster(machines, "made", Link("network", network, 1e-5))


def test_the_order_of_machines_does_not_decide_the_plan() -> None:
    units = chain(1e-3, 2e-3, 1e-3, 3e-3, 1e-3, parameters=2_000_000)
    machines = (box("fast", 2), box("slow", 2), box("fast", 1))
    orders = {
        choose(make_made_setting(on(*order), units), 16).fastest.prediction.images_per_second
        for order in (machines, machines[::-1], (machines[1], machines[0], machines[2]))
    }
    assert max(orders) == pytest.approx(min(orders), rel=1e-9)


def test_cuts_of_mixed_stages_go_by_the_slowest_card_whatever_its_name() -> None:
    units = chain(*[1e-3] * 8)
    where = make_made_setting(on(box("slow", 1), box("fast", 1)), units)  # "fast" comes first by name, "slow" by place
    cuts = best_cuts(where, ((Device(0, 0),), (Device(1, 0),)), Mode.STALE, 8, 8)
    assert cuts == ("u2",), "a card three times slower gets a quarter of the units"


def test_microbatches_are_chosen_by_simulation() -> None:
    where = make_made_setting(on(box("fast", 3)), chain(1e-3, 2e-3, 2e-3, 1e-3, parameters=3_000_000))
    choice = choose(where, 24)
    best = choice.fastest.prediction
    for count in (3, 4, 6, 8, 12, 24):
        if count >= max(stage.replicas for stage in best.plan.stages):
            other = predict(best.plan.with_microbatches(count), where)
            assert best.images_per_second >= other.images_per_second * 0.99


def test_a_part_of_the_devices_is_offered_where_the_rest_does_not_help() -> None:
    """Two machines on a slow network: one alone is as fast as both."""
    where = make_made_setting(on(box("fast", 2), box("fast", 2), network=1e6), chain(1e-3, 1e-3, parameters=5_000_000))
    choice = choose(where, 16)
    alone = choose(replace(where, cluster=on(box("fast", 2))), 16)
    assert choice.fastest.prediction.images_per_second >= 0.99 * alone.fastest.prediction.images_per_second
    fewer = next(c for c in choice.candidates if c.plan.world == 2)
    assert "leaves 2 of 4 devices out" in fewer.why


def test_no_plan_is_called_stale_that_lags_nowhere() -> None:
    where = make_made_setting(on(box("fast", 2)), chain(1e-3, 1e-3, 1e-3, parameters=3_000_000))
    for candidate in choose(where, 16).candidates:
        assert candidate.plan.mode is not Mode.STALE or any(stage.versions > 1 for stage in candidate.plan.stages)


def test_a_small_card_does_not_limit_the_stages_of_a_large_one() -> None:
    units = chain(1e-3, 1e-3, 1e-3, 1e-3, parameters=10_000_000)  # 40 MB of weights each
    memory = {"fast": 1 << 30, "slow": 1 << 28}

    def devices(kind: str) -> DeviceSpec:
        return DeviceSpec(kind, kind, memory[kind], 5e11, {"fp32": 1e13}, {})

    where = replace(make_made_setting(on(box("fast", 1), box("slow", 1)), units), devices=devices)
    found = make_search(where, Mode.SYNC, 8, 8).best(2)
    assert found is not None and (found.bounds[1], found.sizes) == (3, (1, 1)), "the large card takes three of four"


def test_one_more_device_is_planned_as_thoroughly() -> None:
    """Nine devices used to be searched far less than eight, so that the number of stages jumped."""
    units = chain(*(1e-3 * (1 + index % 3) for index in range(7)), parameters=3_000_000, live=50_000)
    found = [choose(make_made_setting(on(box("fast", count, 2e9)), units), 32) for count in (8, 9, 10)]
    rates = [choice.fastest.prediction.images_per_second for choice in found]
    assert all(more >= 0.99 * fewer for fewer, more in itertools.pairwise(rates))
    for choice in found:  # two stages are among the candidates of each, and within a few percent of the fastest
        two = [found.prediction for found in choice.candidates if len(found.plan.stages) == 2]
        assert max(p.images_per_second for p in two) >= 0.95 * choice.fastest.prediction.images_per_second


def test_lag_and_depth_are_chosen_together() -> None:
    """The lag used to be chosen at the default depth, where another depth needs less of it."""
    units = chain(1e-3, 2e-3, 1e-3, 3e-3, parameters=3_000_000, live=50_000)
    where = make_made_setting(on(box("fast", 4, 1e9)), units)
    checked = 0
    for candidate in choose(where, 16).candidates[:3]:
        plan = candidate.plan
        if plan.mode is not Mode.STALE:
            continue
        usual = make_plan(
            plan.placement, batch=16, microbatches=plan.microbatches, mode=plan.mode, cuts=plan.cuts
        )  # every lag at its own best of three depths
        bubbles = [
            choose_depth(lagging, lambda made: predict(made, where)).steady.bubble for lagging in every_lag(usual)
        ]
        lag = max(stage.versions for stage in plan.stages) - 1
        assert candidate.prediction.steady.bubble == pytest.approx(bubbles[lag])
        assert lag == next(n for n, bubble in enumerate(bubbles) if bubble <= bubbles[-1] + 0.02)
        checked += 1
    assert checked


def test_cut_and_microbatches_move_together() -> None:
    """The best cut differs with the number of microbatches: neither change alone was faster (case 89 of the laws)."""
    draw = random.Random(89)
    where, batch = random_setting(draw)
    plan = make_plan(parse_placement("0:0-1.0:2"), batch=batch, microbatches=8, mode=Mode.STALE, cuts=["u5"])
    best = choose(where, batch).fastest.prediction
    assert best.images_per_second >= predict(plan, where).images_per_second * 0.99


def test_the_bound_of_a_stage_without_lag_counts_whole_microbatches() -> None:
    """Six microbatches on four replicas take two turns, and a sum, before the next round may begin."""
    where = make_made_setting(on(box("fast", 5)), chain(1e-4, 1e-3, parameters=1_000_000))
    plan = make_plan(parse_placement("0:0.0:1-4", where.cluster), batch=6, microbatches=6, mode=Mode.STALE, cuts=["u1"])
    estimate = Estimate(plan, where)
    each = estimate.forward(1, 1) + estimate.backward(1, 1)
    assert estimate.floor == pytest.approx(2 * each + estimate.exposed(1) + estimate.update(1, 1))
    assert estimate.floor <= predict(plan, where).steady.batch_seconds < 1.05 * estimate.floor
