"""Plans from their few free choices, with every default resolved, or from a plan file that has them all."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from stagewright.cluster.placement import Placement, parse_placement
from stagewright.cluster.topology import Cluster
from stagewright.errors import UserError
from stagewright.plan.plan import Mode, Plan, Stage

_MOST_SAMPLES = 2**31 - 1
_MOST_VERSIONS = 128  # the stability of more lag takes minutes to find
_MOST_DEPTH = 2**16
MOST_MICROBATCHES = 2**14
PLAN_FORMAT = "stagewright-plan-2"  # files of format 1 hold the plan alone, without a format


def read_plan(text: str, where: str, cluster: Cluster | None = None) -> Plan:
    """The plan of a plan file, which `Plan.describe` wrote."""
    content = _read_choices(text, where)
    mode = Mode(content["mode"])
    plan = make_plan(
        parse_placement(str(content["placement"]), cluster),
        batch=content["batch"],
        microbatches=content["microbatches"],
        mode=mode,
        versions=content["versions"] if mode is Mode.STALE else None,
        depths=content["depths"],
        cuts=[str(cut) for cut in _as_list(content["cuts"])],
    )
    given, own = content["versions"], [stage.versions for stage in plan.stages]
    if given != own:
        raise UserError(
            f"plan {where}: versions {_join(given)} are not those of mode {mode}, {_join(own)}; use mode stale"
        )
    return plan


def _read_choices(text: str, where: str) -> dict[str, Any]:
    """A plan file's entries, with their types checked."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"plan {where} is not JSON: {error}") from error
    if isinstance(content, dict) and content.get("format", PLAN_FORMAT) != PLAN_FORMAT:
        raise UserError(
            f"plan {where} has format {str(content['format'])[:40]!r} but this version reads {PLAN_FORMAT}; "
            "write one with stagewright plan MODEL -o FILE"
        )
    if isinstance(content, dict) and isinstance(content.get("plan"), dict):
        content = content["plan"]
    known = {"mode", "placement", "cuts", "batch", "microbatches", "versions", "depths"}
    if not isinstance(content, dict) or not known <= content.keys():
        missing = sorted(known - (content.keys() if isinstance(content, dict) else set()))
        raise UserError(f"plan {where} lacks {', '.join(missing)}; write one with stagewright plan MODEL -o FILE")
    numbers = [content["batch"], content["microbatches"], *_as_list(content["versions"]), *_as_list(content["depths"])]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise UserError(f"plan {where}: batch, microbatches, versions and depths are whole numbers")
    if content["mode"] not in [str(mode) for mode in Mode]:
        raise UserError(f"plan {where}: unknown mode '{content['mode']}'; known: {', '.join(map(str, Mode))}")
    return content


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [None]


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
) -> Plan:
    """A plan from its free choices, with every default of the design."""
    if mode is Mode.DP:
        placement = as_one_stage(placement)
    replicas = [len(devices) for devices in placement]
    if microbatches is None:
        microbatches = default_microbatches(batch, replicas)
    require_divisible(batch, microbatches)
    rounds = replicas if mode is Mode.PIPEDREAM else [microbatches] * len(replicas)
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
    return Plan(mode, batch, microbatches, devices, stages, tuple(cuts), agree, flags)


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


def stale_versions(num_stages: int, staleness: int) -> list[int]:
    """K_s = min(S-s, n+1): a stage lags by the stages behind it, by at most n updates."""
    return [min(num_stages - index, staleness + 1) for index in range(num_stages)]


def _versions(
    mode: Mode, replicas: Sequence[int], staleness: int | None, versions: Sequence[int] | None
) -> Sequence[int]:
    num_stages = len(replicas)
    if staleness is not None and staleness < 0:
        raise UserError(f"staleness is {staleness}; it must be 0 (synchronous) or more")
    if versions is not None:
        return _one_per_stage("versions", versions, num_stages, _MOST_VERSIONS)
    if mode is Mode.PIPEDREAM:
        return [-(-sum(replicas[index:]) // replicas[index]) for index in range(num_stages)]
    if mode is Mode.STALE:
        return stale_versions(num_stages, num_stages - 1 if staleness is None else staleness)
    return [1] * num_stages


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
