"""Measuring on this machine: a profile has every unit, its bytes and its share of the time."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from stagewright.model.chain import Chain
from stagewright.profile.measure import Clock, Workload, build_workload, measure, sample_sizes, time_units
from stagewright.run.profile import Subject, measure_profile


def workload(model: str, samples: tuple[int, ...] = (2, 4)) -> Workload:
    return Workload(model, None, (3, 8, 8), "fp32", "cpu", 1, samples)


def test_a_profile_has_every_unit_and_the_models_parameters() -> None:
    profile = measure(workload("tests.models:residual"), nullcontext)
    model = build_workload(workload("tests.models:residual"))
    assert [table.samples for table in profile.tables] == [2, 4]
    for table in profile.tables:
        assert [unit.name for unit in table.units] == list(Chain(model, torch.randn(2, 3, 8, 8)).units)
        assert sum(unit.parameters for unit in table.units) == sum(p.numel() for p in model.parameters())
        assert all(unit.forward > 0 for unit in table.units)
        assert sum(unit.backward for unit in table.units) > 0
    small, large = profile.tables
    assert [2 * unit.live for unit in small.units] == [unit.live for unit in large.units]
    assert profile.ceilings is not None and profile.ceilings.copy > 0 and profile.ceilings.update > 0


class Slow(torch.autograd.Function):
    """Sleeps for a known time in forward and in backward."""

    @staticmethod
    def forward(context, value):  # type: ignore[no-untyped-def,override]
        time.sleep(0.02)
        return value.clone()

    @staticmethod
    def backward(context, gradient):  # type: ignore[no-untyped-def,override]
        time.sleep(0.05)
        return gradient


class Sleeper(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        slow: torch.Tensor = Slow.apply(value)
        return slow if slow.sum() > -1e9 else value  # reads values, so that it can't be traced and stays one unit


def sleepy() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(inplace=True), Sleeper(), nn.Linear(8, 4))


def test_the_slow_unit_gets_its_time_and_no_other() -> None:
    chain = Chain(sleepy(), torch.randn(2, 3, 8, 8))
    assert "3" in chain.units[3]
    passes = [time_units(chain, torch.randn(2, 3, 8, 8), nullcontext, Clock("cpu")) for _ in range(4)]
    seconds = {name: [min(each) for each in zip(*(one[name] for one in passes), strict=True)] for name in chain.units}
    slow = chain.units[3]
    assert seconds[slow][0] >= 0.02 and seconds[slow][1] >= 0.05
    others = [name for name in chain.units if name != slow]
    assert max(seconds, key=lambda name: seconds[name][1]) == slow
    assert sum(seconds[name][1] for name in others) < seconds[slow][1]


def test_profiles_of_several_precisions_are_merged() -> None:
    profile = measure_profile(Subject("tests.models:plain", (2,), ("fp32", "bf16"), "cpu", image=8))
    assert [table.precision for table in profile.tables] == ["fp32", "bf16"]
    assert profile.at("bf16", 2).units[0].output * 2 == profile.at("fp32", 2).units[0].output
    assert profile.ceilings is not None and set(profile.ceilings.matrix) == {"fp32", "bf16"}


def test_sample_sizes_are_sorted_unique_and_positive() -> None:
    assert sample_sizes([16, 8, 8]) == (8, 16)
    with pytest.raises(ValueError, match="at least 1"):
        sample_sizes([0, 8])
