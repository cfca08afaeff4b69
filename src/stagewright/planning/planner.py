"""The planner: the best plans, compared with each other and with plain data parallel, and why each is slower.

`choose` does that for `stagewright plan`. The search (`plan.search`) gives first plans by a simple cost model, for
several numbers of microbatches and stages, on all devices and on parts of them (`space`). What counts is the simulator:
the most promising are simulated, those of other shapes too, and the best are improved by small changes (`climb`): a
cut, the microbatches, a device that moves or is left out, two stages that swap devices or merge. Lag and depth are
chosen together, last. Machines are planned in an order of their own, so that theirs does not matter.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stagewright.cluster.placement import format_placement
from stagewright.cluster.topology import Device
from stagewright.errors import UserError, counted, did_you_mean
from stagewright.metrics import MIB
from stagewright.plan.cost import GRADIENT_BYTES
from stagewright.plan.estimate import Estimate, Setting
from stagewright.plan.plan import Mode, Plan
from stagewright.planning.climb import Climb, every_lag, fewest_stages
from stagewright.planning.predict import Prediction
from stagewright.planning.space import Space, microbatch_counts
from stagewright.voice import SILENT, Voice


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its prediction, and why it is not the best."""

    prediction: Prediction
    speedup: float  # over plain data parallel on all devices
    why: str

    @property
    def plan(self) -> Plan:
        return self.prediction.plan

    def __str__(self) -> str:
        return f"{self.plan.mode} {self.plan.shape}"


@dataclass(frozen=True, slots=True, repr=False)
class Choice:
    """The candidates, fastest first, and the plans that do not fit."""

    candidates: tuple[Candidate, ...]
    refused: tuple[str, ...]
    lags: tuple[Prediction, ...] = ()  # the best plan with no lag, with a lag of one update, and so on
    unprofiled: tuple[int, ...] = ()  # microbatch sizes that were not tried, because the profile does not cover them
    decided: bool = False  # the candidates were trained, and the first is the fastest

    def __repr__(self) -> str:
        best = self.best
        return (
            f"Choice({best.plan.mode} {format_placement(best.plan.placement)}: "
            f"{best.prediction.images_per_second:,.0f} images/s, {best.speedup:.2f} x data parallel; "
            f"{counted(len(self.candidates), 'candidate')})"
        )

    @property
    def fastest(self) -> Candidate:
        return self.candidates[0]

    @property
    def best(self) -> Candidate:
        """The fewest stages within three percent of the fastest: a smaller gain is not worth more lag and memory."""
        if self.decided:
            return self.candidates[0]
        best = fewest_stages([candidate.prediction for candidate in self.candidates])
        return next(candidate for candidate in self.candidates if candidate.prediction is best)

    @property
    def without_lag(self) -> Candidate | None:
        """The best of those whose weights do not lag, which `train` chooses from by itself."""
        own = tuple(candidate for candidate in self.candidates if candidate.plan.is_synchronous)
        return replace(self, candidates=own, decided=False).best if own else None

    def within(self, spread: float) -> list[Candidate]:
        """The candidates that are slower than the fastest by no more than a spread, in logarithms."""
        least = self.fastest.prediction.images_per_second * math.exp(-spread)
        return [candidate for candidate in self.candidates if candidate.prediction.images_per_second >= least]


def choose(
    setting: Setting,
    batch: int,
    *,
    modes: Sequence[Mode] = (Mode.STALE, Mode.SYNC),
    microbatches: int | None = None,
    staleness: int | None = None,
    whole: bool = False,
    synchronous: bool = False,
    voice: Voice = SILENT,
) -> Choice:
    """Search, simulate and improve the most promising plans, and compare them with plain data parallel.

    `whole`: only plans that use every device. `synchronous`: where the weights of the best plan lag, search plans
    without lag by themselves too, so that the best of these is among the candidates.
    """
    unprofiled = _unprofiled(setting, batch, microbatches)
    machines = setting.cluster.machines
    order = sorted(range(len(machines)), key=lambda number: repr(machines[number]))  # like machines side by side
    cluster = replace(setting.cluster, machines=tuple(machines[number] for number in order))
    space = Space(replace(setting, cluster=cluster), batch, tuple(modes), microbatches, staleness, whole)
    climb = Climb(space, voice)
    found = climb.finished()
    if synchronous and found and not fewest_stages(found).plan.is_synchronous:
        alone = replace(voice, progress=lambda text: voice.progress(f"without lag: {text}"))
        if own := Climb(replace(space, modes=(Mode.SYNC,), staleness=None), alone).finished():
            best = fewest_stages(own)
            shape = best.plan.mode, best.plan.shape
            found = [*(one for one in found if (one.plan.mode, one.plan.shape) != shape), best]
    refused = tuple(dict.fromkeys(_refusal(_renamed_plan(plan, order)[0], setting) for plan in climb.refused()))
    if not found:
        raise UserError(f"nothing fits: {refused[0]}")
    found.sort(key=lambda one: (-one.images_per_second, len(one.plan.stages)))
    lags = tuple(_renamed(climb.predict(plan), order) for plan in _lags(fewest_stages(found).plan))
    found = [_renamed(prediction, order) for prediction in found]
    parallel = [one for one in found if one.plan.mode is Mode.DP and one.plan.world == len(space.devices)]
    plain = parallel[0].images_per_second if parallel else math.nan
    candidates = (Candidate(one, one.images_per_second / plain, _why(one, found[0], setting)) for one in found)
    return Choice(tuple(candidates), refused, lags, unprofiled)


def _unprofiled(setting: Setting, batch: int, microbatches: int | None) -> tuple[int, ...]:
    """The microbatch sizes that the profile does not cover; an error that names them all if it covers none."""
    given, devices = [microbatches or 0], len(setting.cluster.devices)
    usual, counts = (
        {batch // count for count in (given if microbatches else microbatch_counts(batch, devices, covers))}
        for covers in (lambda size: True, setting.covers)
    )
    if not any(setting.covers(size) for size in counts):
        assert setting.covered is not None
        smallest, largest = setting.covered
        sizes = ",".join(map(str, sorted(usual)))
        raise UserError(
            f"the profile covers microbatches of {smallest} to {largest} samples but the search of batch {batch} on "
            f"{devices} devices needs one of {sizes}; profile again with --samples {sizes}"
        )
    return tuple(size for size in sorted(usual) if not setting.covers(size))


def _lags(plan: Plan) -> list[Plan]:
    """A plan at every lag; none for one stage, or where the mode has a lag of its own."""
    preset = plan.mode.preset
    if len(plan.stages) == 1 or preset.has_lag != preset.has_staleness:
        return []
    return every_lag(replace(plan, mode=Mode.STALE))


# --- The order of machines --------------------------------------------------------------------------------------------


def _renamed_plan(plan: Plan, order: Sequence[int]) -> tuple[Plan, list[int]]:
    """A plan for reordered machines as one for the machines as they are numbered, and the old number of each rank."""
    devices = [Device(order[device.machine], device.index) for device in plan.devices]
    old = sorted(range(plan.world), key=devices.__getitem__)
    new = {rank: number for number, rank in enumerate(old)}
    stages = tuple(replace(stage, ranks=tuple(new[rank] for rank in stage.ranks)) for stage in plan.stages)
    return replace(plan, devices=tuple(devices[rank] for rank in old), stages=stages), old


def _renamed(prediction: Prediction, order: Sequence[int]) -> Prediction:
    plan, old = _renamed_plan(prediction.plan, order)
    return replace(
        prediction,
        plan=plan,
        steady=replace(prediction.steady, busy=tuple(prediction.steady.busy[rank] for rank in old)),
        memory=tuple(prediction.memory[rank] for rank in old),
        limits=tuple(prediction.limits[rank] for rank in old),
    )


# --- Why --------------------------------------------------------------------------------------------------------------


def _refusal(plan: Plan, setting: Setting) -> str:
    try:
        Estimate(plan, setting).require_fit()
    except UserError as error:
        return f"{plan.mode} {format_placement(plan.placement)}: {error}"
    return ""


def _why(prediction: Prediction, best: Prediction, setting: Setting) -> str:
    """One line: what makes a plan slower than the best, or what limits the best."""
    plan, steady = prediction.plan, prediction.steady
    devices = len(setting.cluster.devices)
    fewer = f"; leaves {devices - plan.world} of {devices} devices out" if plan.world < devices else ""
    if prediction is best:
        return f"fastest; bound by {prediction.bound}{fewer}"
    estimate = Estimate(plan, setting)
    sums, worst = max(
        (estimate.exposed(stage.index) * plan.microbatches / stage.round, -stage.index) for stage in plan.stages
    )
    share = sums / steady.batch_seconds
    if plan.mode is Mode.DP or (plan.is_synchronous and share > 0.1):
        if share > 0.05:
            size = estimate.parameters(-worst) * GRADIENT_BYTES / MIB
            return f"sums {size:,.0f} MiB of gradient, {share:.0%} of the batch{fewer}"
        if plan.mode is Mode.DP:
            return f"every device computes all of it; bound by {prediction.bound}{fewer}"
    if steady.bubble > best.steady.bubble + 0.03:
        return f"devices wait {steady.bubble:.0%} of the time, {best.steady.bubble:.0%} in the best{fewer}"
    busiest = max(range(plan.world), key=lambda rank: steady.busy[rank])
    stage = plan.stages_of(busiest)[-1].index
    bound = "" if prediction.bound == f"compute of stage {stage}" else f"; bound by {prediction.bound}"
    return f"stage {stage} is the slowest, busy {steady.busy[busiest]:.0%}{bound}{fewer}"


def explain(setting: Setting, plan: Plan, unit: str) -> dict[str, object]:
    """The cost of a unit, its stage in a plan, and the bytes that a cut before or behind it would carry."""
    table = setting.tables(setting.cluster.kind_of(plan.devices[0]), plan.samples)
    names = [entry.name for entry in table.units]
    if unit not in names:
        raise UserError(f"--explain names '{unit}' but the model has no such unit; {did_you_mean(unit, names)}")
    position = names.index(unit)
    entry, total = table.units[position], table.seconds
    return {
        "unit": unit,
        "kind": entry.kind,
        "stage": bisect_right([names.index(cut) for cut in plan.cuts], position),
        "samples": plan.samples,
        "forward": entry.forward,
        "backward": entry.backward,
        "share": (entry.forward + entry.backward) / total if total else 0.0,
        "parameters": entry.parameters,
        "saved": entry.saved,
        "cut_before": table.units[position - 1].live if position else 0,
        "cut_behind": entry.live,
    }
