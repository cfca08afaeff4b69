"""Loss scaling equals torch's GradScaler where no stage lags, and follows batch numbers where stages do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.cluster.placement import parse_placement
from stagewright.events import BatchLosses, Event, Skipped
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode
from stagewright.runtime.stage.loss_scaling import LossScale, ScalingOptions
from stagewright.schedule.check import check
from tests.marks import IS_NIGHTLY, pairs
from tests.parity import SCALED, SETTINGS, Case, assert_near, emulate, refer, refer_skipping


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_without_lag_the_scale_equals_gradscaler(overflows: list[bool], interval: int) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=interval)
    ours = LossScale(ScalingOptions(2.0**40, interval, 1))
    for batch, overflowed in enumerate(overflows):
        if batch:
            ours.record(batch - 1, overflows[batch - 1])
        scaler.scale(weight.sum())
        assert ours.of(batch) == scaler.get_scale()
        weight.grad = torch.full((1,), torch.inf if overflowed else 1.0)
        scaler.step(optimizer)
        scaler.update()


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=12, max_size=30), st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_scale_does_not_depend_on_later_decisions(
    overflows: list[bool], delay: int, interval: int, data: st.DataObject
) -> None:
    """The scale of batch p follows from the decisions up to p - delay; changing a later one changes nothing."""

    def scales(decisions: list[bool]) -> list[float]:
        scale = LossScale(ScalingOptions(2.0**30, interval, delay))
        found = []
        for batch in range(len(decisions)):
            for earlier in scale.due(batch):
                scale.record(earlier, decisions[earlier])
            found.append(scale.of(batch))
        return found

    changed = data.draw(st.integers(0, len(overflows) - 1))
    other = [overflowed != (batch == changed) for batch, overflowed in enumerate(overflows)]
    assert scales(overflows)[: changed + delay] == scales(other)[: changed + delay]


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=6, max_size=30), st.integers(1, 3), st.integers(1, 5))
def test_a_restored_state_continues_unchanged(overflows: list[bool], delay: int, stop: int) -> None:
    def run(scale: LossScale, batches: range) -> list[float]:
        found = []
        for batch in batches:
            for earlier in scale.due(batch):
                scale.record(earlier, overflows[earlier])
            found.append(scale.of(batch))
        return found

    whole = LossScale(ScalingOptions(2.0**20, 2, delay))
    first, second = (LossScale(ScalingOptions(2.0**20, 2, delay)) for _ in range(2))
    before = run(first, range(stop))
    for batch in first.missing(stop):
        first.record(batch, overflows[batch])  # the pipeline is empty at a pause, so every decision is known
    second.load(first.state())
    assert before + run(second, range(stop, len(overflows))) == run(whole, range(len(overflows)))


def test_gradients_that_overflow_at_any_scale_are_an_error() -> None:
    scale = LossScale(ScalingOptions(1.0, 2000, 1))
    with pytest.raises(ValueError, match=r"overflow fp16 at any loss scale \(batch 24, .*\); try --precision bf16"):
        for batch in range(40):
            for earlier in scale.due(batch):
                scale.record(earlier, True)
            scale.of(batch)


CASES = {
    "one process": Case("steep", "0:0"),
    "dp": Case("steep", "0:0-2", mode="dp", microbatches=6),
    "sync": Case("steep", "0:0-1.0:2", "third"),
    "one rank, two stages": Case("steep", "0:0.0:0", "third"),
    "stale": Case("steep", "0:0-1.0:2", "third", mode="stale", staleness=1),
    "stale by 2": Case("steep", "0:0-2.0:3-4.0:5", "second,third", mode="stale", staleness=2, microbatches=6),
    "four versions": Case("steep", "0:0-1.0:2", "third", mode="stale", versions=(4, 2)),
    "dynamic": Case("steep", "0:0-1.0:2", "third", mode="stale", staleness=1, dynamic=True),
}


OPTIMIZERS = [
    {"lr": 1e-5},
    {"name": "adamw", "lr": 1e-3},
    {"clip": 0.3, "lr": 1e-3},
    {**SETTINGS["rmsprop"], "lr": 1e-4},
    *(options for name, options in SETTINGS.items() if name not in ("sgd", "adamw", "rmsprop")),
]


@pytest.mark.parametrize(("name", "options"), pairs(CASES, OPTIMIZERS), ids=str)
@pytest.mark.usefixtures("scaled")
def test_scaled_runs_equal_the_reference(name: str, options: dict[str, object], tmp_path: Path) -> None:
    case = replace(CASES[name], optimizer=options, steps=14, **SCALED)
    expected = refer_skipping(case)
    run = emulate(case, tmp_path)
    assert_near(run.weights, expected.weights | expected.buffers, 1e-4)
    assert _scales(run.events, case.microbatches) == expected.scales
    assert len(set(expected.scales)) > 2
    for stage in range(len(case.replicas)):
        skipped = {event.batch for event in run.events if isinstance(event, Skipped) and event.stage == stage}
        assert skipped == {batch for batch, skips in enumerate(expected.skipped) if skips[stage]}


@pytest.mark.usefixtures("scaled")
def test_a_stage_may_skip_alone(tmp_path: Path) -> None:
    """The first stage has larger gradients here, so it skips updates that the last stage makes."""
    case = replace(CASES["stale"], optimizer={"lr": 1e-5}, steps=14, **SCALED)
    skipped = refer(case).skipped
    assert (True, False) in skipped
    assert (False, True) not in skipped  # all earlier stages skip what the last stage skips


def _scales(events: Sequence[Event], microbatches: int) -> list[float]:
    scales: dict[int, float] = {}
    for event in events:
        if isinstance(event, BatchLosses):
            assert event.scale is not None
            scales |= {number // microbatches: event.scale for number, *_ in event.losses}
    return [scales[batch] for batch in sorted(scales)]


@settings(deadline=None, max_examples=100 if IS_NIGHTLY else 25)
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.integers(1, 4), min_size=4, max_size=4),
)
def test_flags_never_hang(replicas: list[int], times: int, staleness: int, versions: list[int]) -> None:
    """The checker accepts programs with overflow flags for any replicas, lag and versions."""
    bounds = [sum(replicas[:index]) for index in range(len(replicas) + 1)]
    text = ".".join(f"0:{first}-{last - 1}" for first, last in pairwise(bounds))
    microbatches = times * max(replicas)
    for choice in ({"staleness": staleness}, {"versions": versions[: len(replicas)]}):
        plan = make_plan(
            parse_placement(text), batch=microbatches, microbatches=microbatches, mode=Mode.STALE, flags=True, **choice
        )
        if not plan.is_synchronous:
            check(plan)
