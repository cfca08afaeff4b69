"""The planner: searches plans, simulates the best of them, and explains why the others are slower.

`choose` does that for `stagewright plan`; `least_lag` chooses the lag of its plans and of those that `build` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from stagewright.cluster.placement import format_placement
from stagewright.errors import UserError, did_you_mean
from stagewright.metrics import MIB
from stagewright.plan.estimate import Estimate, Setting, with_whole_batches
from stagewright.plan.make import make_plan, stale_versions
from stagewright.plan.plan import Mode, Plan
from stagewright.plan.search import Partition, make_search
from stagewright.plan.search_space import make_blocks
from stagewright.planning.predict import Prediction, predict
from stagewright.planning.simulate import ClusterCosts, steady

BUBBLE_MARGIN = 0.02
_MARGIN = 0.03  # the accuracy of the predictions themselves (bench published)
_SMALL, _FEW, _SOME = 8, 32, 128  # devices up to which the planner tries much, less, and little
_SIMULATED = 8  # plans that are simulated
_MOST_STAGES = 6
_COUNTS = 6  # numbers of microbatches
_TIE = 0.005
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its prediction, and why it is not the best."""

    prediction: Prediction
    speedup: float  # over plain data parallel
    why: str

    @property
    def plan(self) -> Plan:
        return self.prediction.plan


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidates, fastest first, and the plans that do not fit."""

    candidates: tuple[Candidate, ...]
    refused: tuple[str, ...]
    lags: tuple[Prediction, ...] = ()  # the best plan with no lag, with a lag of one update, and so on
    unprofiled: tuple[int, ...] = ()  # microbatch sizes that were not tried, because the profile does not cover them

    @property
    def fastest(self) -> Candidate:
        return self.candidates[0]

    @property
    def best(self) -> Candidate:
        """The fewest stages within three percent of the fastest: a smaller gain is not worth more lag and memory."""
        close = [
            candidate
            for candidate in self.candidates
            if candidate.prediction.images_per_second >= self.fastest.prediction.images_per_second * (1 - _MARGIN)
        ]
        return min(
            close, key=lambda candidate: (len(candidate.plan.stages), sum(s.versions for s in candidate.plan.stages))
        )


def choose(
    setting: Setting,
    batch: int,
    *,
    modes: Sequence[Mode] = (Mode.STALE, Mode.SYNC),
    microbatches: int | None = None,
    staleness: int | None = None,
    progress: Progress = lambda text: None,
) -> Choice:
    """Search, simulate the most promising plans, and compare them; plain data parallel is always among them."""
    devices = len(setting.cluster.devices)
    usual = microbatch_counts(batch, devices) if microbatches is None else [microbatches]
    counts = microbatch_counts(batch, devices, setting.covers) if microbatches is None else usual
    _require_covered(setting, batch, usual, counts)
    progress(f"searching plans on {devices} devices")
    wanted = [plan for _, plan in sorted(_searched(setting, batch, modes, counts, staleness), key=lambda p: p[0])]
    most = _SIMULATED if devices <= _SMALL else _SIMULATED // 2 if devices <= _FEW else 2 if devices <= _SOME else 1
    wanted = _distinct(wanted)[:most]
    plain_count = _parallel_count(setting, batch, counts[-1])
    parallel = make_plan((setting.cluster.devices,), batch=batch, microbatches=plain_count, mode=Mode.DP)
    found: list[Prediction] = []
    refused: list[str] = []
    for plan in [parallel, *wanted]:
        progress(f"simulating {plan.mode} {plan.shape}")
        if plan.mode is Mode.STALE and staleness is None and len(plan.stages) > 1:
            plan = least_lag(plan, bubble_in(setting))
        prediction = choose_depth(plan, setting) if devices <= _SMALL else predict(plan, setting)
        found.append(prediction)
        if not prediction.fits:
            refused.append(_refusal(plan, setting))
    fitting = [prediction for prediction in found if prediction.fits]
    if not fitting:
        raise UserError(f"nothing fits: {refused[0]}")
    plain = max((p.images_per_second for p in found if p.plan.mode is Mode.DP), default=0.0)
    fitting.sort(key=lambda prediction: (-prediction.images_per_second, len(prediction.plan.stages)))
    best = fitting[0]  # of all; the one to run may be a simpler one close to it
    candidates = tuple(
        Candidate(
            prediction, prediction.images_per_second / plain if plain else float("nan"), _why(prediction, best, setting)
        )
        for prediction in fitting
    )
    unprofiled = tuple(size for size in _sizes(batch, usual) if not setting.covers(size))
    choice = Choice(candidates, tuple(dict.fromkeys(refused)), unprofiled=unprofiled)
    return replace(choice, lags=_lags(choice.best.plan, setting))


def _sizes(batch: int, counts: Sequence[int]) -> list[int]:
    return sorted({batch // count for count in counts})


def _require_covered(setting: Setting, batch: int, usual: Sequence[int], counts: Sequence[int]) -> None:
    """Raise if the profile covers no microbatch size that the search would try; names all of these."""
    if any(setting.covers(size) for size in _sizes(batch, counts)):
        return
    assert setting.covered is not None
    smallest, largest = setting.covered
    sizes = ",".join(map(str, _sizes(batch, usual)))
    raise UserError(
        f"the profile covers microbatches of {smallest} to {largest} samples but the search of batch {batch} on "
        f"{len(setting.cluster.devices)} devices needs one of {sizes}; profile again with --samples {sizes}"
    )


def _lags(plan: Plan, setting: Setting) -> tuple[Prediction, ...]:
    """The predictions of a plan at every lag; none for one stage."""
    if len(plan.stages) == 1 or plan.mode is Mode.PIPEDREAM:
        return ()
    return tuple(predict(candidate, setting) for candidate in every_lag(replace(plan, mode=Mode.STALE)))


def _refusal(plan: Plan, setting: Setting) -> str:
    try:
        Estimate(plan, setting).require_fit()
    except UserError as error:
        return f"{plan.mode} {format_placement(plan.placement)}: {error}"
    return ""


def _parallel_count(setting: Setting, batch: int, fallback: int) -> int:
    """Microbatches of plain data parallel: one per device, or the next number whose size the profile covers."""
    first = min(len(setting.cluster.devices), batch)
    covered = (count for count in range(first, batch + 1) if batch % count == 0 and setting.covers(batch // count))
    return next(covered, fallback)


def microbatch_counts(batch: int, devices: int, covers: Callable[[int], bool] = lambda samples: True) -> list[int]:
    """A few numbers of microbatches worth trying: divisors of the batch, from one to four per device.

    Only those whose microbatch size is covered.
    """
    fitting = [count for count in range(devices, min(4 * devices, batch) + 1) if batch % count == 0]
    if not fitting:
        fitting = [next((count for count in range(min(devices, batch), 0, -1) if batch % count == 0), 1)]
    fitting = [count for count in fitting if covers(batch // count)]
    few = min(_COUNTS if devices <= _SMALL else _COUNTS // 2, len(fitting))
    return sorted({fitting[round(index * (len(fitting) - 1) / max(few - 1, 1))] for index in range(few)})


def _searched(
    setting: Setting, batch: int, modes: Sequence[Mode], counts: Sequence[int], staleness: int | None
) -> Iterator[tuple[float, Plan]]:
    """The best plan of every mode, number of microbatches and, on few devices, number of stages, by its seconds."""
    devices = len(setting.cluster.devices)
    for mode in modes:
        for count in counts:
            search = make_search(setting, mode, batch, count, staleness=staleness)
            through = setting.tables(setting.cluster.machines[0].kind, batch // count).seconds
            most = _MOST_STAGES if devices <= _SMALL else _MOST_STAGES // 2
            numbers = range(2, min(most, devices) + 1) if devices <= _FEW else [None]
            for number in numbers:
                found = search.best(number)
                if found is not None and len(found.sizes) > 1:
                    fill = through if mode is Mode.SYNC else 0.0
                    yield (
                        (found.seconds + fill) / batch,
                        _plan_of(found, setting, mode, batch, count, staleness),
                    )


def _plan_of(
    found: Partition, setting: Setting, mode: Mode, batch: int, microbatches: int, staleness: int | None
) -> Plan:
    """The plan of a partition that the search found."""
    cluster = setting.cluster
    kinds = sorted({machine.kind for machine in cluster.machines})
    names = [unit.name for unit in setting.tables(kinds[0], batch // microbatches).units]
    placement = found.placement(make_blocks(cluster, kinds))
    cuts = tuple(names[bound] for bound in found.bounds[1:-1])
    lag = staleness if mode is Mode.STALE else None
    return make_plan(placement, batch=batch, microbatches=microbatches, mode=mode, staleness=lag, cuts=cuts)


def _distinct(plans: Sequence[Plan]) -> list[Plan]:
    """The plans without those that differ from an earlier one in their microbatches only."""
    kept: dict[object, Plan] = {}
    for plan in plans:
        kept.setdefault((plan.mode, plan.placement, plan.cuts), plan)
    return list(kept.values())


def bubble_in(setting: Setting) -> Callable[[Plan], float]:
    """The share of time that a plan's ranks wait in a setting; computed once per plan."""

    def bubble(plan: Plan) -> float:
        deep = with_whole_batches(plan, setting.software)
        return steady(deep, ClusterCosts(Estimate(deep, setting))).bubble

    return cache(bubble)


def least_lag(plan: Plan, bubble: Callable[[Plan], float]) -> Plan:
    """The smallest lag whose bubble is within two points of the fullest lag's."""
    *lesser, fullest = every_lag(plan)
    most = bubble(fullest) + BUBBLE_MARGIN
    return next((candidate for candidate in lesser if bubble(candidate) <= most), fullest)


def every_lag(plan: Plan) -> list[Plan]:
    """The same plan with no lag, with a lag of one update, and so on."""
    count = len(plan.stages)
    versions = [stale_versions(count, lag) for lag in range(count)]
    return [
        replace(plan, stages=tuple(replace(stage, versions=numbers[stage.index]) for stage in plan.stages))
        for numbers in versions
    ]


def choose_depth(plan: Plan, setting: Setting) -> Prediction:
    """The prediction of a plan at the best of three depths: the default, one less and one more.

    That is the shallowest within half a percent of the fastest that fits: a shallower pipeline needs less memory.
    """
    usual = predict(plan, setting)
    if len(plan.stages) == 1 or plan.mode is Mode.PIPEDREAM:
        return usual

    def deeper(by: int) -> Plan:
        stages = (stage if stage.is_last else replace(stage, depth=max(1, stage.depth + by)) for stage in plan.stages)
        return replace(plan, stages=tuple(stages))

    tried = [predict(deeper(-1), setting), usual, predict(deeper(1), setting)]
    fitting = [prediction for prediction in tried if prediction.fits] or [usual]
    fastest = max(prediction.images_per_second for prediction in fitting)
    return next(prediction for prediction in fitting if prediction.images_per_second >= fastest * (1 - _TIE))


def _why(prediction: Prediction, best: Prediction, setting: Setting) -> str:
    """One line: what makes a plan slower than the best, or what limits the best."""
    estimate = Estimate(prediction.plan, setting)
    plan = prediction.plan
    if prediction is best:
        return f"fastest; bound by {prediction.bound}"
    busiest = max(range(plan.world), key=lambda rank: prediction.steady.busy[rank])
    seconds = prediction.steady.batch_seconds
    reduces = {stage.index: estimate.exposed(stage.index) * plan.microbatches / stage.round for stage in plan.stages}
    worst = max(reduces, key=lambda index: reduces[index])
    size = estimate.parameters(worst) * 4 / MIB
    if plan.mode is Mode.DP or (plan.is_synchronous and reduces[worst] / seconds > 0.1):
        if reduces[worst] / seconds > 0.05:
            return f"sums {size:,.0f} MiB of gradient, {reduces[worst] / seconds:.0%} of the batch"
        if plan.mode is Mode.DP:
            return f"every device computes all of it; bound by {prediction.bound}"
    if prediction.steady.bubble > best.steady.bubble + 0.03:
        return f"devices wait {prediction.steady.bubble:.0%} of the time, {best.steady.bubble:.0%} in the best"
    stage = plan.stages_of(busiest)[-1].index
    return f"stage {stage} is the slowest, busy {prediction.steady.busy[busiest]:.0%}; {prediction.bound}"


def explain(setting: Setting, plan: Plan, unit: str) -> dict[str, object]:
    """The cost of a unit, its stage in a plan, and the bytes that a cut before or behind it would carry."""
    estimate = Estimate(plan, setting)
    table = setting.tables(setting.cluster.kind_of(plan.devices[0]), plan.samples)
    names = [entry.name for entry in table.units]
    if unit not in names:
        raise UserError(f"--explain names '{unit}' but the model has no such unit; {did_you_mean(unit, names)}")
    position = names.index(unit)
    entry = table.units[position]
    stage = max(index for index, bound in enumerate(estimate.bounds[:-1]) if bound <= position)
    total = table.seconds
    return {
        "unit": unit,
        "kind": entry.kind,
        "stage": stage,
        "samples": plan.samples,
        "forward": entry.forward,
        "backward": entry.backward,
        "share": (entry.forward + entry.backward) / total if total else 0.0,
        "parameters": entry.parameters,
        "saved": entry.saved,
        "cut_before": table.units[position - 1].live if position else 0,
        "cut_behind": entry.live,
    }
