"""What a plan's stages cost and hold, worked out by hand on a model of three units."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagewright.cluster.placement import parse_placement
from stagewright.cluster.specs import DeviceSpec, Software
from stagewright.cluster.topology import Cluster, Level, Link, Machine
from stagewright.metrics import MIB
from stagewright.plan.estimate import Estimate, Setting, UnitSums
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode
from stagewright.plan.search_space import Segments
from stagewright.plan.stage_costs import make_memory_limits
from stagewright.profile.profile import Table, Unit

UNITS = (
    Unit("a", "made", 1.0, 2.0, 10 * MIB, 100 * MIB, 3 * MIB, 2 * MIB, 7 * MIB, 50 * MIB),
    Unit("b", "made", 3.0, 4.0, 20 * MIB, 30 * MIB, 5 * MIB, 4 * MIB, 11 * MIB),
    Unit("c", "made", 5.0, 6.0, 30 * MIB, 40 * MIB, 1 * MIB, 1 * MIB, 13 * MIB),
)


def setting(memory: int = 10_000 * MIB, units: tuple[Unit, ...] = UNITS, **software: object) -> Setting:
    link = Link("made", 1e9, 0.0)
    cluster = Cluster((Machine(4, "made", (Level(link, ((0, 1, 2, 3),)),)),))
    device = DeviceSpec("made", "made", memory, 1e9, {"fp32": 1e12}, {})
    used = Software("made", "made", 1.0, context=17 * MIB, workspace=40 * MIB, **software)  # type: ignore[arg-type]
    return Setting(cluster, lambda kind: device, used, "fp32", lambda kind, samples: Table("fp32", samples, units))


def plan(text: str, mode: Mode, cuts: tuple[str, ...], microbatches: int = 6):  # type: ignore[no-untyped-def]
    return make_plan(parse_placement(text), batch=12, microbatches=microbatches, mode=mode, cuts=cuts)


def test_a_stage_costs_the_sum_of_its_units() -> None:
    estimate = Estimate(plan("0:0-2.0:3", Mode.STALE, ("b",)), setting())
    assert (estimate.forward(0, 0), estimate.backward(0, 0)) == (1.0, 2.0)
    assert (estimate.forward(1, 3), estimate.backward(1, 3)) == (8.0, 10.0)
    assert estimate.parameters(1) == 50 * MIB
    assert estimate.boundary(0, backward=False) == 3 * MIB and estimate.boundary(0, backward=True) == 2 * MIB


def test_frozen_weights_are_held_once_whatever_the_lag() -> None:
    frozen = (replace(UNITS[0], parameters=0, frozen=10 * MIB), *UNITS[1:])
    lagging = plan("0:0-2.0:3", Mode.STALE, ("b",))
    found = Estimate(lagging, setting(units=frozen)).memories[0]
    assert (found.weights, found.gradients, found.optimizer) == (10 * MIB * 4, 0, 0)
    searched, plain = (Segments.of([UnitSums(Table("fp32", 2, u))], setting().software) for u in (frozen, UNITS))
    assert searched.other[0] - plain.other[0] == 10 * MIB * 4  # the search counts them too


def test_memory_parts_of_each_stage() -> None:
    estimate = Estimate(plan("0:0-2.0:3", Mode.STALE, ("b",)), setting())
    first = estimate.memories[0]
    weights = 10 * MIB * 4
    assert first.weights == 3 * weights  # master and two versions
    assert first.gradients == 2 * weights  # two buffers: it lags and is replicated
    assert first.optimizer == weights
    assert first.activations == 3 * 7 * MIB  # depth ceil(4 / 3) + 1
    assert first.buffers == 2 * 3 * MIB + 2 * 100 * MIB
    assert first.workspace == 40 * MIB and first.context == 17 * MIB  # the unit would borrow 50
    last = estimate.memories[3]
    assert last.weights == last.gradients == last.optimizer == 50 * MIB * 4
    assert last.activations == 24 * MIB and last.workspace == 0
    assert last.largest in ("weights", "gradients", "optimizer")


def test_several_stages_on_a_rank_share_workspace_and_context() -> None:
    estimate = Estimate(plan("0:0-1.0:0-1", Mode.STALE, ("b",)), setting())
    memory = estimate.memories[0]
    assert memory.context == 17 * MIB and memory.workspace == 40 * MIB
    assert memory.optimizer == 60 * MIB * 4


def test_error_names_the_rank_that_does_not_fit_and_a_remedy() -> None:
    tight = Estimate(plan("0:0-2.0:3", Mode.STALE, ("b",)), setting(memory=600 * MIB))
    with pytest.raises(ValueError) as caught:
        tight.require_fit()
    text = str(caught.value)
    over = tight.memories[3].total / MIB - 600
    assert "stage 1 replica 0 (rank 3, machine 0)" in text and "600" in text and f"{over:,.0f} too few" in text
    assert "fewer units" in text


def test_adamw_keeps_two_moments() -> None:
    estimate = Estimate(plan("0:0-1", Mode.DP, ()), replace(setting(), optimizer="adamw"))
    assert estimate.memories[0].optimizer == 2 * 60 * MIB * 4


def test_averaged_weights_are_one_more_copy_and_take_time() -> None:
    made = plan("0:0-2.0:3", Mode.STALE, ("b",))
    plain, averaged = (Estimate(made, replace(setting(), is_averaged=kept)) for kept in (False, True))
    for rank, parameters in ((0, 10 * MIB), (3, 50 * MIB)):
        assert averaged.memories[rank].total - plain.memories[rank].total == parameters * 4
    assert averaged.update(1, 3) - plain.update(1, 3) == pytest.approx(3 * 50 * MIB * 4 / 1e9)
    limits = [make_memory_limits(one.setting, Mode.STALE, 6, 1).moments for one in (plain, averaged)]
    assert limits[1] == limits[0] + 1  # what the search counts


def test_computes_of_blocking_software_include_copies() -> None:
    host = Link("host", 1 * MIB, 0.0)
    estimate = Estimate(plan("0:0-2.0:3", Mode.STALE, ("b",)), setting(blocking=True, handover=host))
    assert estimate.backward(0, 0) == 2.0 + 2.0  # two MiB of gradient come in at one a second
    assert estimate.forward(1, 3) == 8.0 + 3.0
