"""Plans from their few free choices, with every default resolved, or from a plan file that has them all."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from stagewright.cluster.placement import Placement, parse_placement
from stagewright.cluster.topology import Cluster
from stagewright.errors import UserError
from stagewright.events import DecodeError, build
from stagewright.plan.plan import Mode, Plan, Stage, Tie, TiedParameter

_MOST_SAMPLES = 2**31 - 1
_MOST_VERSIONS = 128  # the stability of more lag takes minutes to find
_MOST_DEPTH = 2**16
MOST_MICROBATCHES = 2**14
PLAN_FORMAT = "stagewright-plan-2"  # files of format 1 hold the plan alone, without a format


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The plan in a plan file, as `Plan.describe` writes it."""

    mode: str
    placement: str
    cuts: tuple[str, ...]
    batch: int
    microbatches: int
    versions: tuple[int, ...]
    depths: tuple[int, ...]
    ties: tuple[Tie, ...] = ()  # none where no stage shares a parameter with another


def read_plan(text: str, where: str, cluster: Cluster | None = None) -> Plan:
    """The plan of a plan file, which `Plan.describe` wrote."""
    saved = _read_file(text, where)
    if saved.mode not in list(Mode):
        raise UserError(f"plan {where}: unknown mode '{saved.mode}'; known: {', '.join(Mode)}")
    mode = Mode(saved.mode)
    plan = make_plan(
        parse_placement(saved.placement, cluster),
        batch=saved.batch,
        microbatches=saved.microbatches,
        mode=mode,
        versions=saved.versions if mode.preset.has_staleness else None,
        depths=saved.depths,
        cuts=saved.cuts,
        tied=[parameter for tie in saved.ties for parameter in tie.parameters],
    )
    own = tuple(stage.versions for stage in plan.stages)
    if saved.versions != own:
        raise UserError(
            f"plan {where}: versions {_join(saved.versions)} are not those of mode {mode}, {_join(own)}; use mode stale"
        )
    return plan


def _read_file(text: str, where: str) -> PlanFile:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"plan {where} is not JSON: {error}") from error
    if isinstance(content, dict):
        if content.get("format", PLAN_FORMAT) != PLAN_FORMAT:
            raise UserError(
                f"plan {where} has format {str(content['format'])[:40]!r} but this version reads {PLAN_FORMAT}; "
                "write one with stagewright plan MODEL -o FILE"
            )
        content = content["plan"] if isinstance(content.get("plan"), dict) else content
        content = {field.name: content[field.name] for field in fields(PlanFile) if field.name in content}
    try:
        return build(PlanFile, content)
    except DecodeError as error:
        raise UserError(f"plan {where}: {error}; write one with stagewright plan MODEL -o FILE") from error


def make_plan(
    placement: Placement,
    *,
    batch: int,
    microbatches: int | None = None,
    mode: Mode = Mode.SYNC,
    staleness: int | None = None,
    versions: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
    cuts: Sequence[str] = (),
    agree: bool = False,
    flags: bool = False,
    tied: Sequence[TiedParameter] = (),
) -> Plan:
    """A plan from its free choices, with every default of the design.

    `tied` are the parameters that several stages of this cut use. Versions of a mode are raised to those of the tie;
    versions that are given must be equal there.
    """
    if not mode.preset.has_stages:
        placement = as_one_stage(placement)
    replicas = [len(devices) for devices in placement]
    if microbatches is None:
        microbatches = default_microbatches(batch, replicas)
    require_divisible(batch, microbatches)
    rounds = [microbatches] * len(replicas) if mode.preset.is_per_batch else replicas
    given = versions is not None
    versions = _versions(mode, replicas, staleness, versions)
    depths = _one_per_stage("depths", depths or default_depths(replicas), len(replicas), _MOST_DEPTH)
    devices = tuple(sorted({device for devices in placement for device in devices}))
    rank_of = {device: rank for rank, device in enumerate(devices)}
    stages = tuple(
        Stage(
            index=index,
            count=len(placement),
            ranks=tuple(rank_of[device] for device in placement[index]),
            round=rounds[index],
            versions=versions[index],
            depth=depths[index],
        )
        for index in range(len(placement))
    )
    plan = Plan(mode, batch, microbatches, devices, stages, tuple(cuts), agree, flags)
    return with_ties(plan, tied, are_given=given)


def with_ties(plan: Plan, tied: Sequence[TiedParameter], *, are_given: bool = False) -> Plan:
    """The plan whose stages share parameters: the homes of each have the largest of their versions.

    `are_given`: its versions were given, and are not raised.
    """
    ties = group_ties(tied)
    stages = {stage.index: replace(stage, is_tied=False) for stage in plan.stages}
    for tie in ties:
        if not set(tie.stages) <= stages.keys():
            raise UserError(f"{tie}, but the plan has {len(stages)} stages; make the plan of this model again")
        own = [stages[index] for index in tie.stages]
        most = max(stage.versions for stage in own)
        if are_given and min(stage.versions for stage in own) < most:
            wanted = [most if index in tie.stages else stage.versions for index, stage in stages.items()]
            versions = _join([stage.versions for stage in plan.stages])
            raise UserError(f"versions {versions}: {tie}, so they need the same number; give {_join(wanted)}")
        if len({stage.round for stage in own}) > 1:
            replicas = _join([stage.replicas for stage in own])
            raise UserError(
                f"{tie}, and in mode pipedream they need equally many replicas, not {replicas}; "
                "change --placement, or use mode stale"
            )
        stages |= {stage.index: replace(stage, versions=most, is_tied=True) for stage in own}
    return replace(plan, stages=tuple(stages.values()), ties=ties)


def group_ties(tied: Sequence[TiedParameter]) -> tuple[Tie, ...]:
    """Parameters with overlapping homes together, in the order of their first stage."""
    groups: list[tuple[set[int], list[TiedParameter]]] = []
    for parameter in tied:
        if len(set(parameter.homes)) < 2 or not parameter.names or min(parameter.homes) < 0:
            raise UserError(
                f"parameter {'/'.join(parameter.names)!r} of a tie has homes {parameter.homes}; it needs two"
            )
        touching = [group for group in groups if group[0] & set(parameter.homes)]
        merged = ({*parameter.homes}, [parameter])
        for group in reversed(touching):
            merged = (merged[0] | group[0], group[1] + merged[1])
        groups = [group for group in groups if group not in touching] + [merged]
    ties = (Tie(tuple(sorted(stages)), tuple(parameters)) for stages, parameters in groups)
    return tuple(sorted(ties, key=lambda tie: tie.stages))


def as_one_stage(placement: Placement) -> Placement:
    """One stage on every device of a placement, as mode dp has it."""
    return (tuple(dict.fromkeys(device for devices in placement for device in devices)),)


def default_microbatches(batch: int, replicas: Sequence[int]) -> int:
    """The smallest divisor of the batch that keeps every replica busy: 2*max(r), or r for one stage."""
    wanted = replicas[0] if len(replicas) == 1 else 2 * max(replicas)
    return next((divisor for divisor in divisors(batch) if divisor >= wanted), batch)


def divisors(batch: int) -> list[int]:
    """Every number that divides a batch, the smallest first."""
    if not 1 <= batch <= _MOST_SAMPLES:
        raise UserError(f"batch is {batch} samples; it must be 1 to {_MOST_SAMPLES}")
    small = [divisor for divisor in range(1, math.isqrt(batch) + 1) if batch % divisor == 0]
    return sorted({*small, *(batch // divisor for divisor in small)})


def require_divisible(batch: int, microbatches: int) -> None:
    """Raise unless a batch can be divided into so many microbatches."""
    possible = [divisor for divisor in divisors(batch) if divisor <= MOST_MICROBATCHES]
    if microbatches > MOST_MICROBATCHES:
        raise UserError(
            f"batch {batch} in {microbatches} microbatches is more than {MOST_MICROBATCHES}; "
            f"give --microbatches {possible[-1]}"
        )
    if microbatches not in possible:
        near = sorted(sorted(possible, key=lambda divisor: abs(divisor - microbatches))[:3])
        raise UserError(
            f"batch {batch} is not divisible by {microbatches} microbatches; "
            f"{'nearest that divide it: ' if len(near) > 1 else 'try '}{', '.join(map(str, near))}"
        )


def _versions(
    mode: Mode, replicas: Sequence[int], staleness: int | None, versions: Sequence[int] | None
) -> Sequence[int]:
    num_stages = len(replicas)
    if staleness is not None and staleness < 0:
        raise UserError(f"staleness is {staleness}; it must be 0 (synchronous) or more")
    if versions is not None:
        return _one_per_stage("versions", versions, num_stages, _MOST_VERSIONS)
    own = mode.preset.versions
    return [own(num_stages - index, sum(replicas[index + 1 :]), size, staleness) for index, size in enumerate(replicas)]


def _join(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def default_depths(replicas: Sequence[int]) -> list[int]:
    """ceil(sum of r_t for t >= s, / r_s) + (S-1-s): enough in flight to keep the stages behind busy."""
    last = len(replicas) - 1
    return [-(-sum(replicas[index:]) // replicas[index]) + (last - index) for index in range(len(replicas))]


def _one_per_stage(name: str, numbers: Sequence[int], num_stages: int, most: int) -> Sequence[int]:
    """The numbers, if there is one per stage and each is from 1 to `most`."""
    if len(numbers) != num_stages:
        raise UserError(
            f"{name} {_join(numbers)} name {len(numbers)} stages but the placement has {num_stages}; "
            "give one number per stage"
        )
    if min(numbers) < 1:
        raise UserError(f"{name} {_join(numbers)}: a stage needs at least 1")
    if max(numbers) > most:
        raise UserError(f"{name} {_join(numbers)}: a stage has at most {most}; give {most} or less")
    return numbers
