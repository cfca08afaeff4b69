"""From options to a plan: `build_plan` is the only way, for `train` and `schedule` alike.

In this order: the options and machines, the cuts, the plan itself, its lag, and the warnings about it. Every default
(cuts, microbatches, lag, depths) is chosen here; a plan file is turned into options first, by `with_plan_file`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from stagewright.cluster.placement import Placement, format_placement, parse_placement
from stagewright.cluster.topology import ANYWHERE, Cluster, Machine
from stagewright.config.sections import Config, PlanConfig
from stagewright.errors import counted
from stagewright.model.cut import Chain
from stagewright.plan.make import MOST_MICROBATCHES, default_microbatches, divisors, make_plan, read_plan
from stagewright.plan.plan import Mode, Plan
from stagewright.plan.search import best_cuts
from stagewright.plan.stability import Motion, stability_warning
from stagewright.planning.planner import bubble_in, every_lag, least_lag
from stagewright.planning.setting import Untraceable, planning_setting
from stagewright.planning.simulate import Costs, balanced_costs, steady
from stagewright.profile.profile import NotProfiled
from stagewright.runtime.multinode.nodes import read_nodes

BUBBLE_GOAL = 0.05
_MOST_TRIALS = 8
Warn = Callable[[str], None]
Bubble = Callable[[Plan], float]  # the share of time that a plan's ranks wait


def build_plan(
    config: Config,
    chain: Chain | None,
    warn: Warn = lambda warning: None,
    costs: Callable[[Plan], Costs] | None = None,
) -> Plan:
    """The plan that the options describe; without a model, one without cuts.

    The lag is chosen by `costs`, if given, and else by the profile or the catalog.
    """
    options = config.plan
    mode = Mode(options.mode)
    placement = parse_placement(options.placement, machines_of(config))
    _require_all_machines(config, placement)
    _refuse_unused(options)
    cuts = () if chain is None or mode is Mode.DP else _cuts(config, chain, placement)
    plan = plan_at(options, placement, cuts)
    if options.policy == "gpipe":
        stages = (replace(stage, depth=-(-plan.microbatches // stage.replicas)) for stage in plan.stages)
        plan = replace(plan, stages=tuple(stages))  # all forwards of a batch before its first backward
    if mode is Mode.STALE and options.staleness is None and options.versions is None and len(plan.stages) > 1:
        bubble_of = _bubble(config, chain, plan) if costs is None else _bubble_by(costs)
        plan = choose_staleness(config, plan, bubble_of, warn)
    if warning := idle_warning(plan):
        warn(warning)
    if config.optimizer.clip is not None and not plan.is_synchronous:
        warn("stages lag, so each stage clips by its own gradient norm, not by the whole model's")
    warn_about_lag(config, plan, warn)
    return with_agreement(config, plan)


# --- Options and machines ---------------------------------------------------------------------------------------------


def with_plan_file(config: Config) -> Config:
    """The configuration with the options that its plan file stands for, if it names one."""
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
    resolved = replace(
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
    return replace(config, plan=resolved)


def machines_of(config: Config) -> Cluster:
    """The machines that a placement may name: this one, those of --nodes, or any if nothing real is needed."""
    if config.nodes.list is not None:
        nodes = read_nodes(config.nodes.list)
        return Cluster(tuple(Machine() for _ in nodes), "the machines of --nodes")
    return ANYWHERE if config.run.emulate else Cluster()


def _require_all_machines(config: Config, placement: Placement) -> None:
    """Raise if a machine of --nodes has no stage: it would have nothing to do."""
    if config.nodes.list is None:
        return
    used = {device.machine for devices in placement for device in devices}
    idle = [machine for machine in range(len(machines_of(config).machines)) if machine not in used]
    if idle:
        raise ValueError(
            f"--nodes names machine {idle[0]} but placement {config.plan.placement} has no device of it; "
            f"place a stage on {idle[0]}:0, or leave the machine out"
        )


def _refuse_unused(options: PlanConfig) -> None:
    """Raise for options that the plan would ignore."""
    for flag, value in (("--cut", options.cut), ("--shares", options.shares)):
        if options.mode == "dp" and value is not None:
            raise ValueError(f"{flag} {value} cuts the model into stages but mode dp has one; leave it out")
    if options.policy == "gpipe" and options.depths is not None:
        raise ValueError(f"--depths {options.depths} was given with --policy gpipe, which sets them; give one")


def stage_numbers(text: str | None, name: str, separator: str) -> list[int] | None:
    """The integers of an option that has one per stage."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(separator)]
    except ValueError:
        kind = "comma-separated" if separator == "," else f"'{separator}'-separated"
        raise ValueError(f"--{name} must be {kind} integers such as 3{separator}1, got '{text}'") from None


# --- Cuts -------------------------------------------------------------------------------------------------------------


def _cuts(config: Config, chain: Chain, placement: Placement) -> tuple[str, ...]:
    """The first unit of each later stage: by --cut, by --shares, or chosen by the planner."""
    given = given_cuts(chain, len(placement), config.plan.cut, config.plan.shares)
    if given is not None:
        return given
    return () if len(placement) == 1 else _planned_cuts(config, chain, placement)


def given_cuts(chain: Chain, stages: int, cut: str | None, shares: str | None) -> tuple[str, ...] | None:
    """The first unit of each later stage, by --cut or --shares; None where neither is given."""
    if cut is not None and shares is not None:
        raise ValueError(f"both --cut {cut} and --shares {shares} were given; give one")
    if cut is not None:
        names = [name.strip() for name in cut.split(",")]
        if len(names) != stages - 1:
            raise ValueError(
                f"--cut {cut} makes {len(names) + 1} stages but the placement has {stages}; "
                "name the first unit of each later stage"
            )
        return chain.by_names(names)
    numbers = stage_numbers(shares, "shares", ":")
    if numbers is not None and len(numbers) != stages:
        raise ValueError(
            f"--shares {shares} names {len(numbers)} stages but the placement has {stages}; give one number per stage"
        )
    return None if numbers is None else chain.by_shares(numbers)


def _planned_cuts(config: Config, chain: Chain, placement: Placement) -> tuple[str, ...]:
    """The cuts that make the slowest stage fastest, by the profile if there is one and else by the catalog.

    A model whose shapes can't be traced is divided by operations, in proportion to the stages' replicas.
    """
    replicas = [len(devices) for devices in placement]
    microbatches = config.plan.microbatches or default_microbatches(config.plan.batch, replicas)
    if config.plan.batch % microbatches:
        return chain.by_shares(replicas)  # an error that `make_plan` reports
    try:
        setting = planning_setting(config, chain, placement)
        cuts = best_cuts(setting, placement, Mode(config.plan.mode), config.plan.batch, microbatches)
    except Untraceable:
        return chain.by_shares(replicas)
    return cuts if set(cuts) <= set(chain.units) else chain.by_shares(replicas)


# --- The plan ---------------------------------------------------------------------------------------------------------


def plan_at(options: PlanConfig, placement: Placement, cuts: tuple[str, ...]) -> Plan:
    """The plan of some options on a placement, with given cuts."""
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


def with_agreement(config: Config, plan: Plan) -> Plan:
    """The plan with what stages exchange before an update: norms to clip by, and overflow flags of fp16."""
    scaled = config.run.precision == "fp16"
    most = max(stage.replicas for stage in plan.stages)
    if scaled and plan.mode == "pipedream":
        raise ValueError("precision fp16 supports modes sync, stale and dp, but the mode is pipedream; use bf16")
    if scaled and plan.microbatches < most:
        raise ValueError(
            f"precision fp16 needs a microbatch for each of the {most} replicas, but a batch has {plan.microbatches}; "
            "raise --microbatches"
        )
    if len(plan.stages) == 1:
        return plan
    clip = config.optimizer.clip is not None
    return replace(plan, agree=(clip or scaled) and plan.is_synchronous, flags=scaled and not plan.is_synchronous)


# --- Its lag ----------------------------------------------------------------------------------------------------------


def choose_staleness(config: Config, plan: Plan, bubble_of: Bubble, warn: Warn) -> Plan:
    """The plan at the least lag that fills the pipeline, with a warning if no lag does.

    Emulated ranks take turns in one process and never wait, so for them there is no warning.
    """
    chosen = least_lag(plan, bubble_of)
    if not config.run.emulate and (warning := waiting_warning(chosen, bubble_of)):
        warn(warning)
    return chosen


def _bubble(config: Config, chain: Chain | None, plan: Plan) -> Bubble:
    """The bubble by the profile or the catalog, or as if all stages took equally long."""
    try:
        setting = None if chain is None else planning_setting(config, chain, plan.placement)
    except Untraceable:
        setting = None
    if setting is not None:
        kind = setting.cluster.kind_of(plan.devices[0])
        if not set(plan.cuts) <= {unit.name for unit in setting.tables(kind, plan.samples).units}:
            setting = None  # the user's own list of units
    return _bubble_by(balanced_costs) if setting is None else bubble_in(setting)


def _bubble_by(costs: Callable[[Plan], Costs]) -> Bubble:
    return cache(lambda plan: steady(plan, costs(plan)).bubble)


# --- Warnings ---------------------------------------------------------------------------------------------------------


def idle_warning(plan: Plan) -> str | None:
    """A warning if a batch has too few microbatches to give every replica one."""
    most = max(stage.replicas for stage in plan.stages)
    if plan.microbatches >= most:
        return None
    microbatches = counted(plan.microbatches, "microbatch", "es")
    return f"{microbatches} for {most} replicas: some have nothing to do in each batch; raise --microbatches"


def waiting_warning(plan: Plan, bubble_of: Bubble) -> str | None:
    """A warning if ranks wait at every lag: for how long, and what would fill the pipeline."""
    if min(bubble_of(candidate) for candidate in every_lag(plan)) <= BUBBLE_GOAL:
        return None
    return f"ranks would wait {bubble_of(plan):.0%} of the time; {_remedy(plan, bubble_of)}"


def _remedy(plan: Plan, bubble_of: Bubble) -> str:
    """The fewest microbatches that fill the pipeline at the fullest lag, as far as the profile covers them."""

    def with_default_depths(microbatches: int) -> Plan:
        return make_plan(plan.placement, batch=plan.batch, microbatches=microbatches, mode=plan.mode, cuts=plan.cuts)

    defaults = with_default_depths(plan.microbatches)
    if any(stage.depth < default.depth for stage, default in zip(plan.stages, defaults.stages, strict=True)):
        return f"depths {','.join(str(stage.depth) for stage in plan.stages)} hold stages back: leave --depths out"
    more = [number for number in divisors(plan.batch) if plan.microbatches < number <= MOST_MICROBATCHES]
    for microbatches in more[:_MOST_TRIALS]:
        candidate = with_default_depths(microbatches)
        try:
            if bubble_of(candidate) <= BUBBLE_GOAL:
                return f"--microbatches {microbatches} would fill the pipeline"
        except NotProfiled:
            return f"more --microbatches may fill the pipeline: profile with --samples {candidate.samples} to know"
    return "stages take unequally long: stagewright plan finds better cuts"


def warn_about_lag(config: Config, plan: Plan, warn: Warn) -> None:
    """Warn if the learning rate is unstable at the plan's lag, and if --predict has nothing to extrapolate."""
    options = config.optimizer
    lag = max(stage.versions for stage in plan.stages) - 1
    if options.predict and lag == 0:
        warn("--predict changes nothing: no stage lags")
    if options.predict and options.name == "sgd" and not options.momentum:
        warn("--predict changes nothing: --momentum is 0")
    if options.name == "sgd":
        motion = Motion(options.momentum, lag, options.predict, options.nesterov)
        takes_staleness = plan.mode is Mode.STALE and config.plan.versions is None
        if warning := stability_warning(motion, options.lr, takes_staleness=takes_staleness):
            warn(warning)
