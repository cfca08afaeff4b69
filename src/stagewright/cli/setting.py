"""The options that say where and how a model would run, shared by `plan`, `simulate` and `value`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from stagewright.cluster.catalog import open_cluster, shipped
from stagewright.cluster.specs import calibration_note
from stagewright.config.sections import require_options, require_within
from stagewright.plan.estimate import Setting
from stagewright.planning.setting import TracedModel, analytic_setting, profile_setting, trace_model
from stagewright.profile.profile import Profile, read_profile


def read_setting(parsed: argparse.Namespace, cluster: str | None) -> tuple[TracedModel, Setting]:
    """The traced model, and the setting that the options describe."""
    require_options(image=parsed.image, classes=parsed.classes)
    if parsed.devices is not None:
        require_within("--devices", parsed.devices, least=1)
    model = trace_model(parsed.model, parsed.classes, parsed.image)
    if cluster is None and parsed.profile is None:
        raise ValueError(f"no cluster: give --cluster NAME ({', '.join(sorted(shipped().clusters))}) or --profile FILE")
    catalog, where = open_cluster(cluster) if cluster is not None else (shipped(), None)
    if where is not None and parsed.devices is not None:
        where = where.first(parsed.devices)
    if parsed.profile is not None:
        _require_profile_decides(parsed, cluster)
        profile = read_profile(parsed.profile)
        if profile.is_imported:
            _require_own_names(parsed, profile)
        else:
            profile.require(parsed.model, model.chain.units)
        return model, profile_setting(profile, where, catalog, parsed.precision, optimizer=parsed.optimizer)
    assert where is not None
    software = catalog.system(parsed.software)
    loads = parsed.data != "synthetic"
    return model, analytic_setting(
        catalog, where, model.shapes, software, parsed.precision, optimizer=parsed.optimizer, loads=loads
    )


def _require_profile_decides(parsed: argparse.Namespace, cluster: str | None) -> None:
    """Raise for options that a profile replaces."""
    for name, default in (("software", "stagewright"), ("data", "synthetic")):
        if (value := getattr(parsed, name)) != default:
            raise ValueError(
                f"--{name} {value} is for the catalog's times, not for --profile {parsed.profile}; leave one out"
            )
    if parsed.devices is not None and cluster is None:
        raise ValueError(
            f"--devices {parsed.devices} was given without --cluster, but the profile decides the devices; "
            f"profile again with --together {parsed.devices}"
        )


def _require_own_names(parsed: argparse.Namespace, profile: Profile) -> None:
    """Raise for options with units of the model: an imported profile has its own names for units."""
    if profile.model != parsed.model:
        raise ValueError(
            f"the profile was imported as {profile.model} but the model is {parsed.model}; "
            f"import one with stagewright profile {parsed.model} --pipedream FILE"
        )
    for name in ("shares", "cut", "plan", "output"):
        if (value := getattr(parsed, name, None)) is not None:
            raise ValueError(
                f"--{name} {value} needs the units of {parsed.model} but the imported profile has PipeDream's nodes; "
                "leave it out"
            )


def device_note(parsed: argparse.Namespace, settings: Sequence[Setting]) -> str | None:
    """A line that names the devices whose speed is calibrated by no measurement or one; None with a profile."""
    if parsed.profile is not None:
        return None
    kinds = [setting.devices(machine.kind) for setting in settings for machine in setting.cluster.machines]
    return calibration_note(kinds, parsed.precision)
