"""The plan that options describe, once its devices and cuts are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagewright.config.sections import PlanConfig

if TYPE_CHECKING:
    from stagewright.cluster import Placement
    from stagewright.plan.plan import Plan


def plan_at(options: PlanConfig, placement: Placement, cuts: tuple[str, ...]) -> Plan:
    """The plan of some options on a placement."""
    from stagewright.plan.make import make_plan
    from stagewright.plan.plan import Mode

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
