"""What planning gives a run: the plan of a file, the cuts of the planner, the speed that a profile predicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.config.sections import Config

_ANY_GPU = "h200"  # whose memory does not matter here, and which has every precision

if TYPE_CHECKING:
    from stagewright.cluster import Cluster, Placement
    from stagewright.model.units import Chain
    from stagewright.plan.estimate import Setting
    from stagewright.plan.memory import Memory
    from stagewright.plan.plan import Plan
    from stagewright.predict import Prediction


def with_plan_file(config: Config) -> Config:
    """The configuration with everything that its plan file says, where it names one."""
    from stagewright.cluster import format_placement
    from stagewright.config.sections import PlanConfig
    from stagewright.plan.make import read_plan
    from stagewright.plan.plan import Mode

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


def predict_job(config: Config, plan: Plan) -> Prediction | None:
    """What the profile says the run will do; None without a profile."""
    from stagewright.catalog import shipped
    from stagewright.cluster import Cluster, Machine
    from stagewright.predict import measured_cluster, predict, profile_setting
    from stagewright.profile.profile import read_profile

    if config.plan.profile is None:
        return None
    profile = read_profile(config.plan.profile)
    cluster = None
    if plan.world == 1:
        cluster = Cluster((Machine(1, "cpu"),), "profiled")
    elif plan.world > profile.together:
        raise ValueError(
            f"the profile was taken with {profile.together} processes at once but the plan has {plan.world} ranks; "
            f"profile again with --together {plan.world}"
        )
    else:
        cluster = measured_cluster(profile)
    setting = profile_setting(profile, cluster, shipped(), config.run.precision, optimizer=config.optimizer.name)
    return predict(plan, setting)


def planned_cuts(config: Config, chain: Chain, placement: Placement) -> tuple[str, ...]:
    """The cuts that make the slowest stage fastest: by the profile where there is one, else by the catalogue.

    A model that the catalogue's arithmetic can't follow is shared out by operations, a stage's share its replicas.
    """
    from stagewright.plan.make import default_microbatches
    from stagewright.plan.partition import best_cuts
    from stagewright.plan.plan import Mode

    replicas = [len(devices) for devices in placement]
    count = config.plan.microbatches or default_microbatches(config.plan.batch, replicas)
    if config.plan.batch % count:
        return chain.by_weights(replicas)  # the plan itself will say what is wrong
    try:
        setting = planning_setting(config, chain, placement)
        cuts = best_cuts(setting, placement, Mode(config.plan.mode), config.plan.batch, count)
    except Untraceable:
        return chain.by_weights(replicas)
    return cuts if set(cuts) <= set(chain.units) else chain.by_weights(replicas)


def what_fits(config: Config, plan: Plan, rank: int, room: int) -> str:
    """Advice for a rank that ran out of memory: the largest microbatch that the memory model lets into `room` bytes."""
    from stagewright.plan.estimate import Estimate
    from stagewright.plan.make import make_plan

    try:
        setting = _memory_setting(config, plan)
    except ValueError:
        return "use more --microbatches, or a smaller --batch"
    for microbatches in range(plan.microbatches + 1, plan.batch + 1):
        if plan.batch % microbatches == 0:
            smaller = make_plan(
                plan.placement,
                batch=plan.batch,
                microbatches=microbatches,
                mode=plan.mode,
                versions=[stage.versions for stage in plan.stages] if plan.mode == "stale" else None,
                depths=[stage.depth for stage in plan.stages],
                cuts=plan.cuts,
            )
            if Estimate(smaller, setting).memory(rank).total <= room:
                return f"the largest microbatch that should fit is {smaller.samples}: use --microbatches {microbatches}"
    return "no microbatch should fit: give the stage fewer units, or use a device with more memory"


def modelled_memory(config: Config, plan: Plan) -> tuple[Memory, ...]:
    """What each rank should hold, by part; nothing for a model that is not of the zoo, and would have to be built."""
    from stagewright.plan.estimate import Estimate

    if ":" in config.model.name:
        return ()
    try:
        estimate = Estimate(plan, _memory_setting(config, plan))
        return tuple(estimate.memory(rank) for rank in range(plan.world))
    except ValueError:
        return ()


def _memory_setting(config: Config, plan: Plan) -> Setting:
    """The model on devices of the run's kind, as far as memory goes; an error where its shapes can't be found."""
    from stagewright.catalog import shipped
    from stagewright.cluster import Cluster, Machine
    from stagewright.predict import analytic_setting, study

    kind, software = _ANY_GPU, shipped().system("stagewright")
    if config.run.device == "cpu":  # has no context and no workspaces
        kind, software = "cpu", replace(software, context=0, workspace=0)
    count = 1 + max(device.index for device in plan.devices)
    machines = 1 + max(device.machine for device in plan.devices)
    cluster = Cluster((Machine(count, kind),) * machines, "this machine")
    shapes = study(config.model.name, config.model.classes, config.data.image).shapes
    return analytic_setting(shipped(), cluster, shapes, software, config.run.precision, optimizer=config.optimizer.name)


class Untraceable(Exception):
    """The model's units have no shapes that arithmetic can follow."""


def planning_setting(config: Config, chain: Chain, placement: Placement) -> Setting:
    """Where the run will be, as the planner sees it."""
    from stagewright.catalog import shipped
    from stagewright.predict import analytic_setting, profile_setting, study
    from stagewright.profile.profile import read_profile

    cluster = _local_cluster(placement)
    if config.plan.profile is not None:
        profile = read_profile(config.plan.profile)
        profile.require(config.model.name, chain.units)
        return profile_setting(profile, None, shipped(), config.run.precision, optimizer=config.optimizer.name)
    try:
        shapes = study(config.model.name, config.model.classes, config.data.image).shapes
    except ValueError as error:
        raise Untraceable from error
    software = shipped().system("stagewright")
    return analytic_setting(shipped(), cluster, shapes, software, config.run.precision, optimizer=config.optimizer.name)


def machines_of(config: Config) -> Cluster:
    """The machines that a placement may name: this one, or those of --nodes."""
    from stagewright.cluster import Cluster, Machine
    from stagewright.runtime.nodes import read_nodes

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


def _local_cluster(placement: Placement) -> Cluster:
    """Processes of CPU machines, as many as the placement's highest index, on an ordinary network."""
    from stagewright.catalog import shipped
    from stagewright.cluster import Cluster, Level, Machine

    devices = [device for stage in placement for device in stage]
    count = 1 + max(device.index for device in devices)
    level = Level(shipped().links["memory"], (tuple(range(count)),))
    machines = (Machine(count, "cpu", (level,)),) * (1 + max(device.machine for device in devices))
    return Cluster(machines, "these machines", shipped().links["net-10g"] if len(machines) > 1 else None)
