"""The simulator times the programs that ranks run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stagewright.cluster.placement import parse_placement
from stagewright.cluster.specs import DeviceSpec, Software
from stagewright.cluster.topology import HOST, Cluster, Level, Link, Machine
from stagewright.plan.estimate import Estimate, Setting
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode, Plan, Stage, TiedParameter
from stagewright.planning.climb import every_lag
from stagewright.planning.predict import predict, traffic
from stagewright.planning.simulate import (
    ClusterCosts,
    SharedCard,
    StageCosts,
    balanced_costs,
    find_like,
    simulate,
    steady,
    steady_state,
)
from stagewright.profile.profile import Table, Unit
from stagewright.schedule.action import Action, Op
from tests.unit.planning.laws import make_made_setting, random_units


def plan_of(placement: str, mode: Mode, microbatches: int, **rest: int) -> Plan:
    return make_plan(
        parse_placement(placement),
        batch=microbatches,
        microbatches=microbatches,
        mode=mode,
        **rest,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("microbatches", [1, 4, 9])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_synchronous_1f1b_takes_m_plus_s_minus_1_rounds(stages: int, microbatches: int) -> None:
    """The textbook: (M + S - 1) * (F + B) for equal stages of one replica."""
    plan = plan_of(".".join(f"0:{device}" for device in range(stages)), Mode.SYNC, microbatches)
    timeline = simulate(plan, StageCosts([1.0] * stages, [2.0] * stages), range(microbatches))
    assert timeline.end == (microbatches + stages - 1) * 3
    bubble = timeline.bubble(range(stages), 0.0, timeline.end)
    assert bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_a_full_stale_pipeline_has_no_bubble() -> None:
    plan = plan_of("0:0.0:1", Mode.STALE, 8)
    assert steady(plan, StageCosts([1.0, 1.0], [2.0, 2.0])).bubble == pytest.approx(0.0)


def test_the_slowest_stage_sets_the_pace() -> None:
    plan = plan_of("0:0.0:1", Mode.STALE, 8)
    assert steady(plan, StageCosts([1.0, 0.5], [2.0, 1.0])).bubble == pytest.approx(0.25)


def test_transfers_take_time_on_their_own_lane() -> None:
    plan = plan_of("0:0.0:1", Mode.SYNC, 1)
    timeline = simulate(plan, StageCosts([1.0, 1.0], [1.0, 1.0], transfer=0.5), range(1))
    assert timeline.end == 5.0
    assert [(span.name, span.start) for span in timeline.spans if span.lane == "transfer"] == [
        ("0SA0>1", 1.0),
        ("1SG0>0", 3.5),
    ]


def test_balanced_costs_give_every_rank_the_same_work() -> None:
    plan = plan_of("0:0-2.0:3", Mode.STALE, 12)
    timeline = simulate(plan, balanced_costs(plan), range(120))
    busy = timeline.busy_shares(4, 0.0, timeline.end)
    assert max(busy) == min(busy)


SECOND = 1 << 20  # bytes that a link of the made cluster carries a second


def made(software: Software, placement: str, mode: Mode, microbatches: int) -> tuple[Plan, ClusterCosts]:
    """Two units of 1 + 1 and 2 + 2 seconds; a message of 3 seconds one way and 1 the other."""
    units = (
        Unit("a", "made", 1.0, 1.0, 0, 0, 3 * SECOND, 1 * SECOND, 0),
        Unit("b", "made", 2.0, 2.0, 0, 0, 0, 0, 0),
    )
    level = Level(Link("made", SECOND, 0.0), (tuple(range(8)),))
    cluster = Cluster((Machine(8, "made", (level,)),))
    device = DeviceSpec("made", "made", 1 << 40, 1e9, {"fp32": 1.0}, {})
    setting = Setting(
        cluster, lambda kind: device, software, "fp32", lambda kind, samples: Table("fp32", samples, units)
    )
    plan = make_plan(parse_placement(placement), batch=microbatches, microbatches=microbatches, mode=mode, cuts=("b",))
    return plan, ClusterCosts(Estimate(plan, setting))


PLAIN = Software("plain", "plain", 1.0)


def ends(made: tuple[Plan, ClusterCosts], microbatches: int) -> dict[str, float]:
    plan, costs = made
    return {span.name: span.end for span in simulate(plan, costs, range(microbatches)).spans}


def test_a_message_takes_its_bytes_over_the_link() -> None:
    found = ends(made(PLAIN, "0:0.0:1", Mode.SYNC, 1), 1)
    assert (found["0F0@0"], found["0SA0>1"], found["1F0@0"], found["1SG0>0"], found["0B0@0"]) == (1, 4, 6, 9, 10)


def test_senders_that_share_a_receiver_take_turns() -> None:
    found = ends(made(PLAIN, "0:0-2.0:3", Mode.SYNC, 3), 3)
    assert [found[f"0SA{i}>3"] for i in range(3)] == [4, 7, 10]  # all three are ready after a second


def test_messages_in_both_directions_do_not_delay_each_other() -> None:
    _, costs = made(PLAIN, "0:0.0:1", Mode.STALE, 2)
    assert set(costs.lanes(Action(Op.SEND_ACT, 0, 0, 0, None, 1))).isdisjoint(
        costs.lanes(Action(Op.SEND_GRAD, 1, 1, 0, None, 0))
    )


def test_software_that_passes_whole_batches_waits_for_the_last_microbatch() -> None:
    whole = Software("whole", "whole", 1.0, whole_batches=True)
    found = ends(made(whole, "0:0-2.0:3", Mode.SYNC, 3), 3)
    assert found["1F0@0"] == 10 + 2  # the third message has come
    assert found["1SG0>0"] == 10 + 3 * 4 + 1  # the last backward is over
    assert found["0B0@0"] == found["0B2@0"] == 22 + 3 + 1  # and the last gradient has come


def test_updates_and_reductions_are_timed() -> None:
    units = (Unit("a", "made", 1.0, 1.0, SECOND // 4, 0, 0, 0, 0),)
    level = Level(Link("made", SECOND, 0.0, staged=True), ((0, 1),))
    cluster = Cluster((Machine(2, "made", (level,)),))
    device = DeviceSpec("made", "made", 1 << 40, 5 * SECOND, {"fp32": 1.0}, {})
    setting = Setting(cluster, lambda kind: device, PLAIN, "fp32", lambda kind, samples: Table("fp32", samples, units))
    plan = make_plan(parse_placement("0:0-1"), batch=2, microbatches=2, mode=Mode.DP)
    spans = {span.name: span for span in simulate(plan, ClusterCosts(Estimate(plan, setting)), range(2)).spans}
    assert (spans["0R@0"].start, spans["0R@0"].end) == (2, 3)  # 1 MiB over 1 MiB a second, each byte once
    assert (spans["0U@0"].start, spans["0U@0"].end) == (3, 4)  # five passes at five a second


@pytest.mark.parametrize(("placement", "seconds"), [("0:0-1.0:2-3", 25), ("0:0-1.0:0-1", 100), ("0:0.0:1", 0)])
def test_backward_hides_all_but_the_last_bucket_of_a_reduce_on_ranks_of_one_stage(
    placement: str, seconds: float
) -> None:
    """A rank of several stages reduces at the end of the round, so that nothing is hidden."""
    units = tuple(Unit(name, "made", 1.0, 200.0, 100 * SECOND // 4, 0, 0, 0, 0) for name in "ab")
    cluster = Cluster((Machine(4, "made", (Level(Link("made", SECOND, 0.0), (tuple(range(4)),)),)),))
    device = DeviceSpec("made", "made", 1 << 40, 1e12, {"fp32": 1.0}, {})
    setting = Setting(cluster, lambda kind: device, PLAIN, "fp32", lambda kind, samples: Table("fp32", samples, units))
    plan = make_plan(parse_placement(placement), batch=2, microbatches=2, mode=Mode.SYNC, cuts=("b",))
    assert ClusterCosts(Estimate(plan, setting)).seconds(Action(Op.REDUCE, 0, 0, None, 0)) == seconds


def many(placement: str, count: int) -> Estimate:
    """Stages on machines of eight devices, each with a network card that its replicas share."""
    level = Level(Link("inside", 1e9, 1e-6), (tuple(range(8)),))
    cluster = Cluster((Machine(8, "fast", (level,)),) * 4, "made", Link("network", 1e8, 1e-5))
    units = [Unit(f"u{n}", "made", 1e-3, 2e-3, 1000, 1000, 20_000, 20_000, 10) for n in range(4)]
    setting = make_made_setting(cluster, units)
    stages = parse_placement(placement, cluster)
    cuts = tuple(f"u{index + 1}" for index in range(len(stages) - 1))
    return Estimate(make_plan(stages, batch=count, microbatches=count, mode=Mode.STALE, cuts=cuts), setting)


@pytest.mark.parametrize("placement", ["0:0-7,1:0-7.2:0-7", "0:0-7.1:0-7,2:0-7.3:0-7"])
def test_like_pipelines_simulated_once_take_as_long_as_all_of_them(placement: str) -> None:
    estimate = many(placement, 48)
    like = find_like(estimate.plan, estimate)
    assert like is not None and like.copies == 8 and like.plan.world == estimate.plan.world // 8
    whole = steady(estimate.plan, ClusterCosts(estimate))
    once = steady_state(estimate)
    assert once.batch_seconds == pytest.approx(whole.batch_seconds, rel=0.03)
    assert len(once.busy) == estimate.plan.world


def test_a_long_period_is_not_simulated_whole() -> None:
    """Replicas 7, 5 and 3 repeat after 105 batches."""
    estimate = many("0:0-6.1:0-4.2:0-2", 32)
    asked: list[Action] = []

    class Counting(ClusterCosts):
        def seconds(self, action: Action) -> float:
            asked.append(action)
            return super().seconds(action)

    found = steady(estimate.plan, Counting(estimate))
    assert len(asked) < 20_000
    assert found.batch_seconds == pytest.approx(estimate.floor, rel=0.15)


# --- Ties ------------------------------------------------------------------------------------------------------------

ENDS = TiedParameter(("w",), (0, 3), 10**6)


def tied_pipeline(**more: object) -> Plan:
    placement = parse_placement("0:0.0:1.0:2.0:3")
    return make_plan(placement, batch=8, microbatches=8, mode=Mode.STALE, tied=[ENDS], **more)  # type: ignore[arg-type]


def test_homes_have_the_largest_lag_and_two_gradient_buffers() -> None:
    plan = tied_pipeline()
    assert [stage.versions for stage in plan.stages] == [4, 3, 2, 4]
    assert [stage.num_gradients for stage in plan.stages] == [2, 1, 1, 2]


def test_a_tied_pipeline_waits_only_with_one_gradient_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """K 4,3,2,4: the sum of a batch ends with the first stage's backward, a pipeline after the last stage's."""
    plan = tied_pipeline()
    assert steady(plan, balanced_costs(plan)).bubble == pytest.approx(0.0)
    monkeypatch.setattr(Stage, "num_gradients", property(lambda stage: 1))
    assert 0.15 < steady(plan, balanced_costs(plan)).bubble < 0.4


def test_a_tie_costs_a_synchronous_pipeline_nothing_but_its_sum() -> None:
    placement = parse_placement("0:0.0:1.0:2.0:3")
    plain, tied = (make_plan(placement, batch=8, microbatches=8, tied=ties) for ties in ((), (ENDS,)))
    costs = StageCosts([1.0] * 4, [2.0] * 4, reduce=0.5)
    assert simulate(tied, costs, range(8)).end == simulate(plain, costs, range(8)).end + 0.5


def test_an_estimate_counts_a_tied_parameter_in_each_home_and_its_sum_over_the_link() -> None:
    setting, devices = many("0:0.0:1", 4).setting, many("0:0-3.0:4", 4).plan.devices
    cuts, placement = ("u1", "u3"), (devices[:2], devices[2:3], devices[3:4])
    tied = TiedParameter(("w",), (0, 2), 500)
    plain = Estimate(make_plan(placement, batch=8, microbatches=4, cuts=cuts), setting)
    shared = Estimate(make_plan(placement, batch=8, microbatches=4, cuts=cuts, tied=[tied]), setting)
    assert shared.parameters(0) == plain.parameters(0)  # a table counts it at its first use
    assert shared.parameters(2) == plain.parameters(2) + 500
    assert shared.own_parameters(0) == plain.parameters(0) - 500
    assert shared.memories[3].weights == plain.memories[3].weights + 500 * 4
    (tie,) = shared.plan.ties
    assert shared.tie(tie) > 0
    assert predict(shared.plan, setting).images_per_second < predict(plain.plan, setting).images_per_second
    assert traffic(shared) == traffic(plain) + (2 * 2 - 2 * 1) * 500 * 4


def test_a_prediction_takes_the_ties_of_a_settings_model() -> None:
    estimate = many("0:0.0:1", 8)
    setting, plan = estimate.setting, estimate.plan
    model = replace(setting, tied=lambda cuts: [TiedParameter(("w",), (0, 1), 10)] if cuts else [])
    assert [stage.versions for stage in predict(plan, setting).plan.stages] == [2, 1]
    assert [stage.versions for stage in predict(plan, model).plan.stages] == [2, 2]
    assert [[stage.versions for stage in lag.stages] for lag in every_lag(predict(plan, model).plan)] == [
        [1, 1],
        [2, 2],
    ]


def test_computes_on_a_shared_card_divide_its_speed() -> None:
    """Four ranks share it: two at once take half of the time with all at work, one alone no less than a third."""
    card, work = SharedCard(4, most=3.0), Action(Op.FORWARD, 0, 0, 0, 0)
    card.begin(0.0, 6.0, work)
    assert card.next_end() == pytest.approx(2.0)
    card.begin(1.0, 6.0, work)  # 3 of 6 seconds are done; from here on both run twice as fast as with all
    assert card.end() == (work, 0.0, pytest.approx(2.5))
    assert card.end() == (work, 1.0, pytest.approx(3.5))  # 3 done, then alone
    assert card.next_end() == float("inf")


@pytest.mark.parametrize(("ranks", "share"), [(1, 1 / 4), (2, 2 / 4), (4, 1.0)])
def test_ranks_on_a_shared_card_are_faster_the_fewer_compute(ranks: int, share: float) -> None:
    level = Level(Link("fast", 1e15, 0.0), ((0, 1, 2, 3),))
    units = random_units(random.Random(0))
    own, shared = (Cluster((Machine(4, "fast", (level,), is_shared=is_shared),)) for is_shared in (False, True))
    plan = make_plan(parse_placement(f"0:0-{ranks - 1}"), batch=8, microbatches=ranks, mode=Mode.DP)
    apart, together = (predict(plan, make_made_setting(cluster, units)).steady for cluster in (own, shared))
    assert together.batch_seconds == pytest.approx(apart.batch_seconds * share, rel=1e-3)


def test_a_fast_edge_is_free_before_a_slow_one() -> None:
    """Two pairs of devices with slow links of their own share a host that is twice as fast: they send at once."""
    level = Level(Link("own", 1e9, 0.0, staged=True), ((0, 1, 2, 3),))
    cluster = Cluster((Machine(4, "fast", (level,), host=2e9),))
    plan = make_plan(parse_placement("0:0-1.0:2-3"), batch=4, microbatches=4, mode=Mode.STALE, cuts=["u1"])
    costs = ClusterCosts(Estimate(plan, make_made_setting(cluster, random_units(random.Random(1)))))
    send = Action(Op.SEND_ACT, 0, 0, 0, None, 2)
    by_edge = dict(costs.lanes(send))
    (host,) = [seconds for (edge, _), seconds in by_edge.items() if edge[1] == HOST]  # type: ignore[misc]
    assert costs.seconds(send) == pytest.approx(2 * host)
