"""From a configuration to a job: every default settled, the plan proven, the cuts probed. The plan that options describe, once its devices and cuts are known. What planning gives a run: the plan of a file, the cuts of the planner, the speed that a profile predicts. How far a run's stages lag: the least that fills the pipeline, and a word where that is too much to learn with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.cluster.placement import format_placement, parse_placement
from stagewright.cluster.topology import Cluster, Machine
from stagewright.config.sections import Config, PlanConfig
from stagewright.model.cut import Chain
from stagewright.plan.make import MOST_MICROBATCHES, default_microbatches, divisors, make_plan, read_plan
from stagewright.plan.plan import Mode
from stagewright.plan.search import best_cuts
from stagewright.plan.stability import Motion, stability_remark
from stagewright.planning.planner import at_every_lag, bubble_in, least_lag
from stagewright.planning.setting import (
    Untraceable,
    planning_setting,
)
from stagewright.planning.simulate import balanced_costs, steady
from stagewright.profile.profile import NotProfiled
from stagewright.runtime.multinode.nodes import read_nodes

if TYPE_CHECKING:
    from stagewright.cluster.placement import Placement
    from stagewright.plan.plan import Plan
    from stagewright.planning.simulate import Costs


Warn = Callable[[str], None]


def make_plan_for(
    config: Config,
    chain: Chain | None,
    warn: Warn = lambda warning: None,
    costs: Callable[[Plan], Costs] | None = None,
) -> Plan:
    """The plan that the options describe; without a model, one without cuts. `costs` say what its stages take."""
    options = config.plan
    mode = Mode(options.mode)
    placement = parse_placement(options.placement, machines_of(config))
    require_all_machines(config, placement)
    _refuse_unused(options)
    cuts = () if chain is None or mode is Mode.DP else _cuts(config, chain, placement)
    clip = config.optimizer.clip is not None
    plan = plan_at(options, placement, cuts)
    if options.policy == "gpipe":
        plan = _with_gpipe_depths(plan)
    if mode is Mode.STALE and options.staleness is None and options.versions is None and len(plan.stages) > 1:
        plan = least_stale(config, chain, plan, warn, costs)
    if remark := idle_remark(plan):
        warn(remark)
    if clip and not plan.is_synchronous:
        warn("stages lag, so each clips its own gradient norm, not the whole model's")
    warn_of_lag(config, plan, warn)
    return with_agreement(config, plan)


def _refuse_unused(options: PlanConfig) -> None:
    """An error for what a plan would ignore."""
    for flag, value in (("--cut", options.cut), ("--shares", options.shares)):
        if options.mode == "dp" and value is not None:
            raise ValueError(f"{flag} {value} cuts the model into stages but mode dp has one; leave it out")
    if options.policy == "gpipe" and options.depths is not None:
        raise ValueError(f"--depths {options.depths} was given with --policy gpipe, which sets them; give one")


def idle_remark(plan: Plan) -> str | None:
    """A warning where a batch has too few microbatches to give every replica one."""
    most = max(stage.replicas for stage in plan.stages)
    if plan.microbatches >= most:
        return None
    return (
        f"{plan.microbatches} microbatches for {most} replicas: some have nothing to do in each batch; "
        "raise --microbatches"
    )


def with_agreement(config: Config, plan: Plan) -> Plan:
    """Add what stages must tell each other before an update: norms to clip by, and overflows of fp16."""
    scaled = config.run.precision == "fp16"
    most = max(stage.replicas for stage in plan.stages)
    if scaled and plan.mode == "pipedream":
        raise ValueError("precision fp16 goes with sync, stale and dp, but the mode is pipedream; use bf16")
    if scaled and plan.microbatches < most:
        raise ValueError(
            f"precision fp16 needs a microbatch for each of the {most} replicas, but a batch has {plan.microbatches}; "
            "raise --microbatches"
        )
    if len(plan.stages) == 1:
        return plan
    clip = config.optimizer.clip is not None
    return replace(plan, agree=(clip or scaled) and plan.is_synchronous, flags=scaled and not plan.is_synchronous)


def _with_gpipe_depths(plan: Plan) -> Plan:
    """All forwards of a batch before its first backward."""
    stages = tuple(replace(stage, depth=-(-plan.microbatches // stage.replicas)) for stage in plan.stages)
    return replace(plan, stages=stages)


def _cuts(config: Config, chain: Chain, placement: Placement) -> tuple[str, ...]:
    """The first unit of each later stage: named, by shares, or where the planner puts it."""
    replicas = [len(devices) for devices in placement]
    if config.plan.cut is not None and config.plan.shares is not None:
        raise ValueError(f"both --cut {config.plan.cut} and --shares {config.plan.shares} were given; give one")
    if config.plan.cut is not None:
        names = [name.strip() for name in config.plan.cut.split(",")]
        if len(names) != len(replicas) - 1:
            raise ValueError(
                f"--cut {config.plan.cut} makes {len(names) + 1} stages but the placement has {len(replicas)}; "
                "name the first unit of each later stage"
            )
        return chain.by_names(names)
    shares = stage_numbers(config.plan.shares, "shares", ":")
    if shares is None:
        return () if len(replicas) == 1 else planned_cuts(config, chain, placement)
    if len(shares) != len(replicas):
        raise ValueError(
            f"shares {config.plan.shares} name {len(shares)} stages but the placement has {len(replicas)}; "
            "give one number a stage"
        )
    return chain.by_shares(shares)


def plan_at(options: PlanConfig, placement: Placement, cuts: tuple[str, ...]) -> Plan:
    """The plan of some options on a placement."""
    return make_plan(
        placement,
        batch=options.batch,
        microbatches=options.microbatches,
        mode=Mode(options.mode),
        staleness=options.staleness,
        versions=stage_numbers(options.versions, "versions", ","),
        depths=stage_numbers(options.depths, "depths", ","),
        cuts=cuts,
    )


def stage_numbers(text: str | None, name: str, separator: str) -> list[int] | None:
    """One whole number a stage."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(separator)]
    except ValueError:
        raise ValueError(f"{name} '{text}' are not numbers between '{separator}' (for example 3{separator}1)") from None


def with_plan_file(config: Config) -> Config:
    """The configuration with everything that its plan file says, where it names one."""
    options = config.plan
    if options.file is None:
        return config
    given = replace(options, file=None, profile=None)
    if given != PlanConfig():
        names = [name for name in vars(given) if getattr(given, name) != getattr(PlanConfig(), name)]
        raise ValueError(
            f"--plan {options.file} was given with plan.{names[0]}; the file decides that, so give one of them"
        )
    try:
        plan = read_plan(Path(options.file).read_text(), options.file, machines_of(config))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"plan {options.file}: {getattr(error, 'strerror', None) or error}") from error
    settled = replace(
        options,
        file=None,
        placement=format_placement(plan.placement),
        cut=",".join(plan.cuts) or None,
        mode=plan.mode.value,
        versions=",".join(str(stage.versions) for stage in plan.stages) if plan.mode is Mode.STALE else None,
        depths=",".join(str(stage.depth) for stage in plan.stages),
        batch=plan.batch,
        microbatches=plan.microbatches,
    )
    return replace(config, plan=settled)


def planned_cuts(config: Config, chain: Chain, placement: Placement) -> tuple[str, ...]:
    """The cuts that make the slowest stage fastest: by the profile where there is one, else by the catalogue.

    A model that the catalogue's arithmetic can't follow is shared out by operations, a stage's share its replicas.
    """
    replicas = [len(devices) for devices in placement]
    count = config.plan.microbatches or default_microbatches(config.plan.batch, replicas)
    if config.plan.batch % count:
        return chain.by_shares(replicas)  # the plan itself will say what is wrong
    try:
        setting = planning_setting(config, chain, placement)
        cuts = best_cuts(setting, placement, Mode(config.plan.mode), config.plan.batch, count)
    except Untraceable:
        return chain.by_shares(replicas)
    return cuts if set(cuts) <= set(chain.units) else chain.by_shares(replicas)


def machines_of(config: Config) -> Cluster:
    """The machines that a placement may name: this one, or those of --nodes."""
    if config.nodes.list is None:
        return Cluster()
    nodes = read_nodes(config.nodes.list)
    return Cluster(tuple(Machine() for _ in nodes), "the machines of --nodes")


def require_all_machines(config: Config, placement: Placement) -> None:
    """A machine without a stage would have nothing to do but to fail."""
    used = {device.machine for devices in placement for device in devices}
    idle = [machine for machine in range(len(machines_of(config).machines)) if machine not in used]
    if idle:
        raise ValueError(
            f"--nodes names machine {idle[0]} but placement {config.plan.placement} has no device of it; "
            f"place a stage on {idle[0]}:0, or leave the machine out"
        )


BUBBLE_GOAL = 0.05
_MOST_TRIALS = 8


def least_stale(
    config: Config, chain: Chain | None, plan: Plan, warn: Warn, costs: Callable[[Plan], Costs] | None = None
) -> Plan:
    """The least lag that fills the pipeline, by `costs` or else what its stages cost; a remark where no lag does.

    Ranks of one process take turns, so there none is made.
    """
    bubble_of = _bubble(config, chain, plan) if costs is None else _bubble_by(costs)
    chosen = least_lag(plan, bubble_of)
    if not config.run.emulate and (remark := waiting_remark(chosen, bubble_of)):
        warn(remark)
    return chosen


def waiting_remark(plan: Plan, bubble_of: Callable[[Plan], float]) -> str | None:
    """How long ranks wait, and what would fill the pipeline, where no lag does."""
    if min(bubble_of(candidate) for candidate in at_every_lag(plan)) <= BUBBLE_GOAL:
        return None
    return f"ranks would wait {bubble_of(plan):.0%} of the time; {_remedy(plan, bubble_of)}"


def _bubble_by(costs: Callable[[Plan], Costs]) -> Callable[[Plan], float]:
    return cache(lambda plan: steady(plan, costs(plan)).bubble)


def _bubble(config: Config, chain: Chain | None, plan: Plan) -> Callable[[Plan], float]:
    """The share of time that ranks wait, by the profile or the catalogue, or as if stages took equally long."""
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
