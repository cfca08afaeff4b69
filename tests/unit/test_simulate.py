"""The simulator times the programs that ranks run."""

from __future__ import annotations

import pytest

from stagewright.cluster import parse_placement
from stagewright.config import make_config
from stagewright.plan.plan import Mode, Plan, make_plan
from stagewright.settle import make_plan_for
from stagewright.simulate import StageCosts, balanced_costs, simulate, steady_bubble


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
    assert steady_bubble(plan, StageCosts([1.0, 1.0], [2.0, 2.0])) == pytest.approx(0.0)


def test_the_slowest_stage_sets_the_pace() -> None:
    plan = plan_of("0:0.0:1", Mode.STALE, 8)
    assert steady_bubble(plan, StageCosts([1.0, 0.5], [2.0, 1.0])) == pytest.approx(0.25)


def test_transfers_take_time_on_their_own_lane() -> None:
    plan = plan_of("0:0.0:1", Mode.SYNC, 1)
    timeline = simulate(plan, StageCosts([1.0, 1.0], [1.0, 1.0], transfer=0.5), range(1))
    assert timeline.end == 5.0
    assert [(span.name, span.start) for span in timeline.spans if span.lane == "transfer"] == [
        ("0SA0>1", 1.0),
        ("1SG0>0", 3.5),
    ]


def test_the_default_lag_is_the_least_that_keeps_the_pipeline_full() -> None:
    def versions(microbatches: int) -> list[int]:
        tables = {"plan": {"placement": "0:0.0:1.0:2.0:3", "batch": 64, "microbatches": microbatches}}
        return [stage.versions for stage in make_plan_for(make_config(tables), None).stages]

    assert versions(64) == [2, 2, 2, 1]  # many microbatches: one update of lag is enough
    assert max(versions(2)) > 2  # few: it takes more


def test_a_pipeline_that_can_not_be_filled_warns() -> None:
    warnings: list[str] = []
    tables = {"plan": {"placement": "0:0-2.0:3", "batch": 24, "microbatches": 1}}
    make_plan_for(make_config(tables), None, warnings.append)
    (idle,) = (warning for warning in warnings if "idles" in warning)
    filling = int(idle.partition("--microbatches ")[2].split()[0])
    plan = plan_of("0:0-2.0:3", Mode.STALE, filling)
    assert steady_bubble(plan, balanced_costs(plan)) < 0.05


def test_balanced_costs_give_every_rank_the_same_work() -> None:
    plan = plan_of("0:0-2.0:3", Mode.STALE, 12)
    timeline = simulate(plan, balanced_costs(plan), range(120))
    busy = [timeline.busy(rank, 0.0, timeline.end) for rank in range(4)]
    assert max(busy) == min(busy)
