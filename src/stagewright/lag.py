"""How far a run's stages lag: the least that fills the pipeline, and a word where that is too much to learn with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from stagewright.config.sections import Config

if TYPE_CHECKING:
    from stagewright.model.units import Chain
    from stagewright.plan.plan import Plan
    from stagewright.simulate import Costs

Warn = Callable[[str], None]
BUBBLE_GOAL = 0.05
_MOST_TRIALS = 8


def least_stale(
    config: Config, chain: Chain | None, plan: Plan, warn: Warn, costs: Callable[[Plan], Costs] | None = None
) -> Plan:
    """The least lag that fills the pipeline, by `costs` or else what its stages cost; a remark where no lag does.

    Ranks of one process take turns, so there none is made.
    """
    from stagewright.planner import least_lag

    bubble_of = _bubble(config, chain, plan) if costs is None else _bubble_by(costs)
    chosen = least_lag(plan, bubble_of)
    if not config.run.emulate and (remark := waiting_remark(chosen, bubble_of)):
        warn(remark)
    return chosen


def waiting_remark(plan: Plan, bubble_of: Callable[[Plan], float]) -> str | None:
    """How long ranks wait, and what would fill the pipeline, where no lag does."""
    from stagewright.planner import at_every_lag

    if min(bubble_of(candidate) for candidate in at_every_lag(plan)) <= BUBBLE_GOAL:
        return None
    return f"ranks would wait {bubble_of(plan):.0%} of the time; {_remedy(plan, bubble_of)}"


def _bubble_by(costs: Callable[[Plan], Costs]) -> Callable[[Plan], float]:
    from stagewright.simulate import steady

    return cache(lambda plan: steady(plan, costs(plan)).bubble)


def _bubble(config: Config, chain: Chain | None, plan: Plan) -> Callable[[Plan], float]:
    """The share of time that ranks wait, by the profile or the catalogue, or as if stages took equally long."""
    from stagewright.foresee import Untraceable, planning_setting
    from stagewright.planner import bubble_in
    from stagewright.simulate import balanced_costs

    try:
        setting = None if chain is None else planning_setting(config, chain, plan.placement)
    except Untraceable:
        setting = None

    if setting is not None:
        kind = setting.cluster.kind_of(plan.devices[0])
        if not set(plan.cuts) <= {unit.name for unit in setting.tables(kind, plan.samples).units}:
            setting = None  # the user's own list of units
    return _bubble_by(balanced_costs) if setting is None else bubble_in(setting)


def _remedy(plan: Plan, bubble_of: Callable[[Plan], float]) -> str:
    """The fewest microbatches with which the fullest lag idles less than the goal, as far as the profile can tell."""
    from stagewright.plan.make import MOST_MICROBATCHES, divisors, make_plan
    from stagewright.profile.profile import NotProfiled

    def usual(microbatches: int) -> Plan:
        return make_plan(plan.placement, batch=plan.batch, microbatches=microbatches, mode=plan.mode, cuts=plan.cuts)

    if any(
        stage.depth < other.depth for stage, other in zip(plan.stages, usual(plan.microbatches).stages, strict=True)
    ):
        return f"depths {','.join(str(stage.depth) for stage in plan.stages)} hold stages back: leave --depths out"
    more = [number for number in divisors(plan.batch) if plan.microbatches < number <= MOST_MICROBATCHES]
    for microbatches in more[:_MOST_TRIALS]:
        candidate = usual(microbatches)
        try:
            if bubble_of(candidate) <= BUBBLE_GOAL:
                return f"--microbatches {microbatches} would fill it"
        except NotProfiled:
            return f"more --microbatches may fill it: profile with --samples {candidate.samples} to know"
    return "stages take unequally long: stagewright plan finds a better layout"


def warn_of_lag(config: Config, plan: Plan, warn: Warn) -> None:
    """Say where the learning rate is more than the lag bears, and where there is nothing to predict."""
    from stagewright.plan.plan import Mode
    from stagewright.plan.stability import Motion, stability_remark

    options = config.optimizer
    lag = max(stage.versions for stage in plan.stages) - 1
    if options.predict and lag == 0:
        warn("--predict changes nothing: no stage lags")
    if options.predict and options.name == "sgd" and not options.momentum:
        warn("--predict changes nothing: --momentum is 0")
    if options.name == "sgd":
        motion = Motion(options.momentum, lag, options.predict, options.nesterov)
        takes_staleness = plan.mode is Mode.STALE and config.plan.versions is None
        if remark := stability_remark(motion, options.lr, takes_staleness=takes_staleness):
            warn(remark)
