"""Settings of a run that is to be trained: to choose its cuts and lag, to predict its speed, and its memory."""

from __future__ import annotations

from dataclasses import replace

from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import Placement
from stagewright.cluster.specs import Catalog
from stagewright.cluster.topology import Cluster, Level, Machine
from stagewright.config.sections import Config
from stagewright.errors import UserError, counted
from stagewright.model.call import Form
from stagewright.model.chain import Chain
from stagewright.plan.estimate import Setting
from stagewright.plan.plan import Plan
from stagewright.planning.setting import PROFILED, setting_of
from stagewright.planning.traced import tied_by, trace_config
from stagewright.profile.profile import Profile, read_profile

_ANY_GPU = "h200"  # supports every precision; its memory does not matter here


def config_setting(
    config: Config,
    cluster: Cluster | None,
    profile: Profile | None = None,
    *,
    catalog: Catalog | None = None,
    loads: bool = False,
    form: Form | None = None,
) -> Setting:
    """A configuration on a cluster, by a profile or by the catalog; UserError if the model can't be traced.

    `form` is what the model takes, where that is no image.
    """
    model = None if profile is not None else trace_config(config, form)
    return setting_of(config, model, cluster, profile, catalog=catalog, loads=loads)


def planning_setting(config: Config, chain: Chain, placement: Placement) -> Setting | None:
    """The setting to plan a run in: by its profile if it has one, else by the catalog's generic core.

    None if there is no profile and the model can't be traced.
    """
    if config.plan.profile is not None:
        profile = read_profile(config.plan.profile)
        profile.require(config.model.name, chain.units)
        return replace(config_setting(config, None, profile), tied=tied_by(chain))
    try:
        setting = config_setting(config, _local_cluster(placement), form=in_single(chain.example.form))
    except UserError:
        return None
    names = [unit.name for unit in setting.tables("cpu", 1).units]
    if not set(names) <= set(chain.units):  # traced without storage it has other units
        return None
    return replace(setting, tied=tied_by(chain))


def in_single(form: Form) -> Form:
    """The form with real numbers in single precision, in which models are traced."""
    return replace(form, dtypes=tuple("float32" if "float" in kind else kind for kind in form.dtypes))


def _local_cluster(placement: Placement) -> Cluster:
    """CPU machines with as many processes as the placement's highest index, on an ordinary network."""
    devices = [device for stage in placement for device in stage]
    count = 1 + max(device.index for device in devices)
    level = Level(shipped().links["memory"], (tuple(range(count)),))
    machines = (Machine(count, "cpu", (level,)),) * (1 + max(device.machine for device in devices))
    return Cluster(machines, "these machines", shipped().links["net-10g"] if len(machines) > 1 else None)


def prediction_setting(config: Config, plan: Plan) -> Setting | None:
    """The setting to predict a run's speed in: by its profile; None if it has none."""
    if config.plan.profile is None:
        return None
    profile = read_profile(config.plan.profile)
    if plan.world > max(1, profile.together):
        raise UserError(
            f"the profile was taken with {counted(profile.together, 'process', 'es')} at once but the "
            f"plan has {counted(plan.world, 'rank')}; "
            f"profile again with --together {plan.world}"
        )
    alone = Cluster((Machine(1, "cpu"),), PROFILED) if plan.world == 1 else None
    return config_setting(config, alone, profile)


def memory_setting(config: Config, plan: Plan, form: Form | None = None) -> Setting:
    """The setting of a run for its memory only, on devices without links; UserError if the model can't be traced.

    `form` is what the model takes, where that is no image.
    """
    on_cpu = config.run.device == "cpu"
    machine = Machine(1 + max(device.index for device in plan.devices), "cpu" if on_cpu else _ANY_GPU)
    cluster = Cluster((machine,) * (1 + max(device.machine for device in plan.devices)))
    setting = config_setting(config, cluster, form=None if form is None else in_single(form))
    software = replace(setting.software, context=0, workspace=0) if on_cpu else setting.software  # those are of CUDA
    return replace(setting, software=software)
