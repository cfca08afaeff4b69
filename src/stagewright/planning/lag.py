"""Lag and depth of a plan, chosen by simulation: the least lag that keeps ranks busy, and the least depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from stagewright.plan.estimate import Estimate, Setting, with_whole_batches
from stagewright.plan.make import with_ties
from stagewright.plan.plan import Plan
from stagewright.planning.predict import Prediction
from stagewright.planning.simulate import ClusterCosts, steady

BUBBLE_MARGIN = 0.02
_TIE = 0.005


def bubble_in(setting: Setting) -> Callable[[Plan], float]:
    """The share of time that a plan's ranks wait in a setting; computed once per plan."""

    def bubble(plan: Plan) -> float:
        deep = with_whole_batches(plan, setting.software)
        return steady(deep, ClusterCosts(Estimate(deep, setting))).bubble

    return cache(bubble)


def least_lag(plan: Plan, bubble: Callable[[Plan], float]) -> Plan:
    """The smallest lag whose bubble is within two points of the fullest lag's."""
    *lesser, fullest = every_lag(plan)
    most = bubble(fullest) + BUBBLE_MARGIN
    return next((candidate for candidate in lesser if bubble(candidate) <= most), fullest)


def every_lag(plan: Plan) -> list[Plan]:
    """The same plan with no lag, with a lag of one update, and so on."""
    count = len(plan.stages)
    tied = [parameter for tie in plan.ties for parameter in tie.parameters]
    found = []
    for most in range(1, count + 1):
        stages = tuple(replace(stage, versions=min(count - stage.index, most)) for stage in plan.stages)
        found.append(with_ties(replace(plan, stages=stages), tied))
    return found


def choose_depth(plan: Plan, predicted: Callable[[Plan], Prediction]) -> Prediction:
    """The prediction of a plan at the best of three depths: the default, one less and one more.

    That is the shallowest within half a percent of the fastest that fits: a shallower pipeline needs less memory.
    """
    usual = predicted(plan)
    if len(plan.stages) == 1 or not plan.mode.preset.is_per_batch:
        return usual

    def deeper(by: int) -> Plan:
        stages = (stage if stage.is_last else replace(stage, depth=max(1, stage.depth + by)) for stage in plan.stages)
        return replace(plan, stages=tuple(stages))

    tried = [predicted(deeper(-1)), usual, predicted(deeper(1))]
    fitting = [prediction for prediction in tried if prediction.fits] or [usual]
    fastest = max(prediction.images_per_second for prediction in fitting)
    return next(prediction for prediction in fitting if prediction.images_per_second >= fastest * (1 - _TIE))
