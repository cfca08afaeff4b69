"""Laws that every answer of the planner obeys, over random clusters, models and batches.

Eighteen cases every day; `make nightly` runs 500.
"""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace

import pytest

from stagewright.cluster.topology import Cluster, Level, Machine
from stagewright.plan.estimate import Estimate, Setting
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode, Plan
from stagewright.planning.planner import choose
from stagewright.planning.predict import predict
from tests.unit.planning.laws import hand_plan, random_setting

CASES = 500 if os.environ.get("STAGEWRIGHT_NIGHTLY") else 18
HAND_PLANS = 30
CLOSE = 0.01
GROUPS = 6  # of cases, so that both processes of the test run take some


def best_rate(setting: Setting, batch: int) -> float:
    return choose(setting, batch).fastest.prediction.images_per_second


def faster_links(cluster: Cluster) -> Cluster:
    def faster(machine: Machine) -> Machine:
        levels = tuple(
            Level(replace(level.link, bandwidth=4 * level.link.bandwidth), level.groups) for level in machine.levels
        )
        return replace(machine, levels=levels, host=None if machine.host is None else 4 * machine.host)

    assert cluster.network is not None
    network = replace(cluster.network, bandwidth=4 * cluster.network.bandwidth)
    return replace(cluster, machines=tuple(map(faster, cluster.machines)), network=network)


def one_more(cluster: Cluster) -> Cluster:
    """The cluster with one more device in its first machine."""
    first = cluster.machines[0]
    count = (first.devices or 0) + 1
    levels = tuple(Level(level.link, (tuple(range(count)),)) for level in first.levels)
    return replace(cluster, machines=(replace(first, devices=count, levels=levels), *cluster.machines[1:]))


@pytest.mark.parametrize("group", range(GROUPS))
def test_laws_of_the_best_plan(group: int) -> None:
    for case in range(group, CASES, GROUPS):
        draw = random.Random(case)
        setting, batch = random_setting(draw)
        about = f"case {case}"
        choice = choose(setting, batch)
        best = choice.fastest.prediction
        rate = best.images_per_second

        # it is at least every plan by hand, and the best single card
        for _ in range(HAND_PLANS):
            plan = hand_plan(draw, setting, batch)
            by_hand = predict(plan, setting)
            assert rate >= by_hand.images_per_second * (1 - CLOSE), f"{about}: {plan.describe()}"
        for device in setting.cluster.devices:
            alone = make_plan(((device,),), batch=batch, microbatches=1, mode=Mode.DP)
            assert rate >= predict(alone, setting).images_per_second * (1 - CLOSE), about

        # time is at least what computes and links need
        estimate = Estimate(best.plan, setting)
        assert best.steady.batch_seconds >= estimate.floor * (1 - 1e-9), about

        law = case % 3
        if law == 0:  # more bandwidth never makes it slower
            faster = replace(setting, cluster=faster_links(setting.cluster))
            assert best_rate(faster, batch) >= rate * (1 - CLOSE), about
        elif law == 1:  # nor does one more device
            larger = replace(setting, cluster=one_more(setting.cluster))
            assert best_rate(larger, batch) >= rate * (1 - CLOSE), about
        else:  # the order of machines changes nothing
            machines = list(setting.cluster.machines)
            draw.shuffle(machines)
            shuffled = replace(setting, cluster=replace(setting.cluster, machines=tuple(machines)))
            assert best_rate(shuffled, batch) == pytest.approx(rate, rel=1e-9), about


def deeper(plan: Plan, by: int) -> Plan:
    return replace(plan, stages=tuple(replace(stage, depth=stage.depth + by) for stage in plan.stages))


@pytest.mark.parametrize("case", range(30))
def test_memory_grows_with_depth(case: int) -> None:
    draw = random.Random(1000 + case)
    setting, batch = random_setting(draw)
    plan = hand_plan(draw, setting, batch)
    totals = [[memory.total for memory in Estimate(deeper(plan, by), setting).memories] for by in range(3)]
    for shallow, deep in itertools.pairwise(totals):
        assert all(less <= more for less, more in zip(shallow, deep, strict=True))
