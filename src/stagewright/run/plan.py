"""Plan a model for a cluster or for this machine: the setting that options describe, a search in it, and a simulation.

The options are those of `stagewright plan`, `value` and `simulate`, as their commands and `stagewright.plan` and
`simulate` have them. `form` is what a model takes, where that is neither the zoo's input nor an image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stagewright.cluster.catalog import open_cluster, shipped
from stagewright.cluster.placement import format_placement
from stagewright.cluster.specs import Catalog
from stagewright.config.sections import PlanConfig
from stagewright.config.toml import make_config
from stagewright.errors import UserError, counted
from stagewright.model.call import Form
from stagewright.model.cut import Chain
from stagewright.plan.estimate import Setting
from stagewright.plan.make import require_divisible
from stagewright.plan.plan import Mode, Plan
from stagewright.planning.build import Warn, build_plan
from stagewright.planning.planner import Choice, choose
from stagewright.planning.predict import Prediction, predict
from stagewright.planning.setting import make_setting
from stagewright.planning.traced import TracedModel, trace_model
from stagewright.profile.profile import Profile, read_profile
from stagewright.profile.shapes import Shape
from stagewright.run.profile import profile_here

Progress = Callable[[str], None]
_USUAL_SAMPLES = 32  # of a batch, a device


@dataclass(frozen=True)
class Asked:
    """What is asked about, with everything that the options leave out filled in."""

    setting: Setting
    catalog: Catalog
    batch: int
    device: str  # to train on
    is_measured: bool  # by a profile of the machine itself
    profile: str | None  # file
    note: str = ""  # how what was left out was filled in


def ask(options: Any, progress: Progress, form: Form | None = None) -> Asked:
    """The setting and the batch to search plans for: of a cluster, of a profile, or of this machine, profiled once."""
    if options.microbatches is not None and options.batch is not None:
        require_divisible(options.batch, options.microbatches)
    if options.cluster is None and options.profile is None:
        # What is wrong with a model is said before it is profiled.
        model = trace_model(options.model, options.classes, options.image, form, options.freeze)
        here = profile_here(options.model, options, progress, form)
        setting = make_setting(
            here.profile,
            here.cluster,
            options.precision,
            optimizer=options.optimizer,
            is_averaged=options.ema is not None,
            catalog=here.catalog,
            tied=model.tied,
        )
        catalog = here.catalog or shipped()
        batch = options.batch or here.profile.covered(options.precision)[1] * len(setting.cluster.devices)
        note = (
            f"this machine: {counted(len(setting.cluster.devices), here.device.upper() + ' rank')}, profile {here.file}"
        )
        return Asked(setting, catalog, batch, here.device, True, str(here.file), note)
    catalog, setting = read_setting(options, options.cluster, form)[1:]
    batch = options.batch or _suitable_batch(setting)
    kinds = {machine.kind for machine in setting.cluster.machines}
    is_measured = options.profile is not None and options.cluster is None
    return Asked(setting, catalog, batch, "cpu" if kinds == {"cpu"} else "cuda", is_measured, options.profile)


def search(options: Any, asked: Asked, progress: Progress) -> Choice:
    """The best plans in the setting that is asked about."""
    return choose(
        asked.setting,
        asked.batch,
        modes=tuple(Mode(mode) for mode in options.mode or ("stale", "sync")),
        microbatches=options.microbatches,
        staleness=options.staleness,
        progress=progress,
    )


def simulate(
    options: Any, warn: Warn, form: Form | None = None, *, draws: bool = False
) -> tuple[Prediction, Catalog, Setting]:
    """What the plan of the options would do in their setting."""
    model, catalog, setting = read_setting(options, options.cluster, form)
    plan = _asked_plan(options, None if model is None else model.chain, setting, warn)
    return predict(plan, setting, draws=draws), catalog, setting


def _asked_plan(options: Any, chain: Chain | None, setting: Setting, warn: Warn) -> Plan:
    """The plan of a plan file or of the options: on all devices by default; mode stale if there are several stages."""
    if options.plan:
        return build_plan(PlanConfig(file=options.plan), setting.cluster, chain, warn=warn)
    everywhere = format_placement((setting.cluster.devices,))
    placement = everywhere if options.placement is None else options.placement
    mode = options.mode or ("stale" if "." in placement else "dp")
    if options.batch is None and options.microbatch is None:
        raise UserError("give either --batch (samples per update) or --microbatch (samples per microbatch)")
    given = {name: getattr(options, name) for name in ("cut", "shares", "batch", "microbatches", "staleness")}
    given = {name: value for name, value in given.items() if value is not None}
    return build_plan(
        make_config({"plan": given | {"placement": placement, "mode": mode}}).plan,
        setting.cluster,
        chain,
        lambda placement: setting,
        microbatch=options.microbatch,
        one_each=setting.software.whole_batches,
        warn=warn,
    )


def _suitable_batch(setting: Setting) -> int:
    """Thirty-two samples a device, or as many as a profile covers."""
    devices = len(setting.cluster.devices)
    most = _USUAL_SAMPLES if setting.covered is None else min(_USUAL_SAMPLES, setting.covered[1])
    return most * devices


def read_setting(
    options: Any, cluster: str | None, form: Form | None = None
) -> tuple[TracedModel | None, Catalog, Setting]:
    """The model, the catalog, and the setting that the options describe.

    There is no model where the profile has its own names for its units.
    """
    model = trace_model(options.model, options.classes, options.image, form, options.freeze)
    if cluster is None and options.profile is None:
        raise UserError(f"no cluster: give --cluster NAME ({', '.join(sorted(shipped().clusters))}) or --profile FILE")
    catalog, where = open_cluster(cluster) if cluster is not None else (shipped(), None)
    if where is not None and options.devices is not None:
        where = where.first(options.devices)
    traced: TracedModel | None = model
    units: Sequence[Shape] | Profile = model.shapes
    if options.profile is not None:
        units = read_profile(options.profile)
        if units.is_imported:
            _require_own_names(options, units)
            traced = None
        else:
            units.require(options.model, model.chain.units)
    return (
        traced,
        catalog,
        make_setting(
            units,
            where,
            options.precision,
            optimizer=options.optimizer,
            is_averaged=options.ema is not None,
            catalog=catalog,
            software=options.software,
            loads=options.data != "synthetic",
            tied=None if traced is None else traced.tied,
        ),
    )


def _require_own_names(options: Any, profile: Profile) -> None:
    """Raise for options with units of the model: an imported profile has its own names for units."""
    if profile.model != options.model:
        raise UserError(
            f"the profile was imported as {profile.model} but the model is {options.model}; "
            f"import one with stagewright profile {options.model} --pipedream FILE"
        )
    for name in ("shares", "cut", "plan", "output"):
        if (value := getattr(options, name, None)) is not None:
            raise UserError(
                f"--{name} {value} needs the units of {options.model} but the imported profile has PipeDream's nodes; "
                "leave it out"
            )
