"""The plan that a configuration describes, without building its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stagewright.cluster import Cluster, Device, Machine, Placement, parse_placement
from stagewright.config.sections import Config
from stagewright.layout import plan_at, stage_numbers
from stagewright.plan.plan import Mode, Plan

if TYPE_CHECKING:
    from stagewright.model.units import Chain

_MOST_MACHINES = 1024

ANYWHERE = Cluster((Machine(),) * _MOST_MACHINES, "anywhere")  # for placements whose machines are not looked at


def devices_of(placement: str) -> tuple[Device, ...]:
    """Every device that a placement names, once."""
    return tuple(dict.fromkeys(device for stage in parse_placement(placement, ANYWHERE) for device in stage))


def layout(config: Config, chain: Chain, placement: Placement, otherwise: Callable[[], tuple[str, ...]]) -> Plan:
    """The plan on a placement; `otherwise` says where to cut if the configuration does not."""
    options = config.plan
    mode = Mode(options.mode)
    cuts: tuple[str, ...] = ()
    if mode is Mode.DP:
        placement = (tuple(dict.fromkeys(device for stage in placement for device in stage)),)
    elif len(placement) > 1:
        weights = stage_numbers(options.weights, "weights", ":")
        if options.cut is not None:
            cuts = chain.by_names([name.strip() for name in options.cut.split(",")])
        else:
            cuts = otherwise() if weights is None else chain.by_weights(weights)
    return plan_at(options, placement, cuts)
