"""The climb: simulates the most promising plans of a space, and improves the best as long as a small change is faster.

Plans are simulated in the order of their lower bound (`Estimate.floor`); one that can't be faster than the best is not.
Lag and depth of a plan are chosen here too: the least lag that keeps ranks busy, and the least depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache

from stagewright.errors import UserError
from stagewright.plan.estimate import Estimate, Setting, with_own_ties, with_whole_batches
from stagewright.plan.make import with_ties
from stagewright.plan.plan import Mode, Plan
from stagewright.planning.predict import Prediction, predict
from stagewright.planning.simulate import ClusterCosts, steady
from stagewright.planning.space import MOST_STAGES, Effort, Part, Space
from stagewright.voice import SILENT, Voice

_BUBBLE_MARGIN = 0.02
_TIE = 0.005
MARGIN = 0.03  # a smaller gain is not worth more stages, lag and memory
_LEAST_GAIN = 1e-4
_MOST_SHOWN = 6  # plans of several stages
_FEWER = 0.1  # by how much a part of the devices may be slower to be shown
_FINISHED = 3  # plans whose lag and depth are chosen, where much is tried


class Climb:
    """Every plan of a space that was simulated, each once, and those that do not fit."""

    def __init__(self, space: Space, voice: Voice = SILENT) -> None:
        self._space = space
        self._setting = space.setting
        self._voice = voice
        self._found: dict[Plan, Prediction] = {}
        self._refused: dict[Plan, None] = {}
        self._predicted: dict[Plan, Prediction] = {}
        self._fastest = math.inf  # seconds of a batch
        voice.progress("data parallel on all devices and on parts of them")
        parts = self._parallel()
        voice.progress("searching stages")
        staged = dict.fromkeys(space.staged(parts[: space.effort.parts]))
        for number, estimate in enumerate(_varied(map(self._estimate, staged), space.effort)):
            voice.progress(f"simulating {estimate.plan.mode} {estimate.plan.shape} ({number + 1})")
            self._try(estimate)
        self._improve()

    def _parallel(self) -> list[Part]:
        """Try data parallel on every part; the parts, all devices first, then the fastest."""
        rates = []
        for part, plans in self._space.parallel():
            tried = (self._try(Estimate(plan, self._setting), always=True) for plan in plans)
            rates.append((max((found.images_per_second for found in tried if found), default=0.0), part))
        rates.sort(key=lambda rate: (rate[1] != self._space.devices, -rate[0], -len(rate[1])))
        return [part for _, part in rates]

    def _improve(self) -> None:
        """Change the best plans as long as a change is faster."""
        tried: set[Plan] = set()
        total = self._space.effort.moves
        starts = self._starts()
        for number, current in enumerate(starts):
            left = total // (len(starts) - number)  # what one start leaves the next ones have
            total -= left
            while left > 0:
                neighbours = [plan for plan in dict.fromkeys(self._space.neighbours(current.plan)) if plan not in tried]
                tried |= set(neighbours)
                better = current
                for estimate in sorted(map(self._estimate, neighbours), key=lambda estimate: estimate.floor):
                    if left <= 0 or estimate.floor >= better.steady.batch_seconds:
                        break
                    left -= 1
                    found = self._try(estimate, against=better.steady.batch_seconds)
                    if found and found.steady.batch_seconds < better.steady.batch_seconds * (1 - _LEAST_GAIN):
                        better = found
                if better is current:
                    break
                self._voice.progress(
                    f"improving {better.plan.mode} {better.plan.shape}: {better.images_per_second:,.0f}"
                )
                current = better
            total += left

    def _starts(self) -> list[Prediction]:
        """The fastest plans of different shapes, then those of other numbers of microbatches."""
        shapes: dict[object, Prediction] = {}
        others: dict[object, Prediction] = {}
        for prediction in self._ordered():
            plan = prediction.plan
            if len(plan.stages) > 1 and shapes.setdefault((plan.mode, plan.shape), prediction) is not prediction:
                others.setdefault((plan.mode, plan.shape, plan.microbatches), prediction)
        most = self._space.effort.starts
        return [*list(shapes.values())[:most], *list(others.values())[: most // 2]]

    def _ordered(self) -> list[Prediction]:
        return sorted(self._found.values(), key=lambda found: found.steady.batch_seconds)

    # --- One plan ---

    def _estimate(self, plan: Plan) -> Estimate:
        """A plan's estimate with its ties where its mode can have them: they raise versions, which lowers the bound."""
        plan = with_whole_batches(plan, self._setting.software)
        try:
            return Estimate(with_own_ties(plan, self._setting), self._setting)
        except UserError:
            return Estimate(plan, self._setting)

    def _try(self, estimate: Estimate, *, always: bool = False, against: float | None = None) -> Prediction | None:
        """Simulate a plan that fits, unless its lower bound is above what it has to beat."""
        plan = estimate.plan
        if plan in self._found:
            return self._found[plan]
        try:
            tied = with_own_ties(plan, self._setting)
        except UserError:  # a mode that can't have these ties
            return None
        if tied is not plan:
            estimate = Estimate(tied, self._setting)
        if not estimate.fits:
            self._refused[plan] = None
            return None
        limit = self._fastest if against is None else against
        if not always and estimate.floor > limit * (1 + MARGIN):
            return None
        found = self._found[plan] = self.predict(plan)
        self._fastest = min(self._fastest, found.steady.batch_seconds)
        return found

    def predict(self, plan: Plan) -> Prediction:
        """Simulate a plan, once."""
        if plan not in self._predicted:
            self._predicted[plan] = predict(plan, self._setting)
        return self._predicted[plan]

    # --- What was found ---

    def finished(self) -> list[Prediction]:
        """The fastest plan of every mode and shape, with the least lag and depth that it needs."""
        kept: dict[object, Prediction] = {}
        for prediction in self._ordered():
            kept.setdefault((prediction.plan.mode, prediction.plan.shape), prediction)
        parallel = [found for found in kept.values() if found.plan.mode is Mode.DP]
        shown = [found for found in kept.values() if found.plan.mode is not Mode.DP][:_MOST_SHOWN]
        whole = next((found for found in parallel if found.plan.devices == self._space.devices), None)
        part = next((found for found in parallel if found is not whole), None)
        least = 0.0 if whole is None else (1 - _FEWER) * whole.images_per_second
        if part is not None and part.images_per_second > least:  # all devices are hardly faster
            shown.append(part)
        shown += [] if whole is None else [whole]
        shown.sort(key=lambda found: found.steady.batch_seconds)
        few = _FINISHED if self._tries_much else 1
        done = [*map(self._with_least_lag, shown[:few]), *shown[few:]]
        return list({(p.plan.mode, p.plan.placement, p.plan.cuts, _versions(p.plan)): p for p in done}.values())

    def _with_least_lag(self, prediction: Prediction) -> Prediction:
        """The prediction with the least lag, at its best depth, that is within two points of the fullest lag's."""
        plan = prediction.plan
        if len(plan.stages) == 1 or not plan.mode.preset.is_per_batch:
            return prediction
        if not plan.mode.preset.has_staleness or self._space.staleness is not None:
            return self._deepest(plan)
        *lesser, fullest = map(self._deepest, every_lag(plan))
        wanted = fullest.steady.bubble + _BUBBLE_MARGIN
        found = next((lag for lag in lesser if lag.steady.bubble <= wanted and lag.fits), fullest)
        if found.plan.is_synchronous:
            found = self.predict(replace(found.plan, mode=Mode.SYNC))
        return found if found.fits else prediction

    @property
    def _tries_much(self) -> bool:
        return self._space.effort.stages == MOST_STAGES

    def _deepest(self, plan: Plan) -> Prediction:
        return choose_depth(plan, self.predict) if self._tries_much else self.predict(plan)

    def refused(self) -> list[Plan]:
        """Plans that do not fit: of data parallel on all devices the one that needs least, and of stages the first."""

        def everywhere(plans: Iterable[Plan]) -> list[Plan]:
            return [plan for plan in plans if plan.mode is Mode.DP and plan.devices == self._space.devices]

        found = [] if everywhere(self._found) else everywhere(self._refused)[-1:]
        return found if self._found else [*found, *[plan for plan in self._refused if plan not in found][:1]]


def _versions(plan: Plan) -> tuple[int, ...]:
    return tuple(stage.versions for stage in plan.stages)


def fewest_stages(predictions: Sequence[Prediction]) -> Prediction:
    """The prediction with the fewest stages, and then the least lag, that is within three percent of the fastest."""
    ordered = sorted(predictions, key=lambda one: -one.images_per_second)
    close = [one for one in ordered if one.images_per_second >= ordered[0].images_per_second / (1 + MARGIN)]
    return min(close, key=lambda one: (len(one.plan.stages), sum(_versions(one.plan))))


def _varied(seeds: Iterable[Estimate], effort: Effort) -> list[Estimate]:
    """The plans with the least lower bounds, and behind them the best of other modes and shapes.

    Orders of machines and numbers of microbatches give many plans of one shape with almost the same bound.
    """
    ordered = sorted(seeds, key=lambda estimate: estimate.floor)
    least = ordered[: effort.seeds]
    kinds = {(estimate.plan.mode, estimate.plan.shape) for estimate in least}
    others: dict[object, Estimate] = {}
    for estimate in ordered[effort.seeds :]:
        others.setdefault((estimate.plan.mode, estimate.plan.shape), estimate)
    return [*least, *[estimate for kind, estimate in others.items() if kind not in kinds][: effort.shapes]]


# --- Lag and depth ----------------------------------------------------------------------------------------------------


def bubble_in(setting: Setting) -> Callable[[Plan], float]:
    """The share of time that a plan's ranks wait in a setting; computed once per plan."""

    def bubble(plan: Plan) -> float:
        deep = with_whole_batches(plan, setting.software)
        return steady(deep, ClusterCosts(Estimate(deep, setting))).bubble

    return cache(bubble)


def least_lag(plan: Plan, bubble: Callable[[Plan], float]) -> Plan:
    """The smallest lag whose bubble is within two points of the fullest lag's."""
    *lesser, fullest = every_lag(plan)
    most = bubble(fullest) + _BUBBLE_MARGIN
    return next((candidate for candidate in lesser if bubble(candidate) <= most), fullest)


def every_lag(plan: Plan) -> list[Plan]:
    """The same plan with no lag, with a lag of one update, and so on."""
    count = len(plan.stages)
    found = []
    for most in range(1, count + 1):
        stages = tuple(replace(stage, versions=min(count - stage.index, most)) for stage in plan.stages)
        found.append(with_ties(replace(plan, stages=stages), plan.tied))
    return found


def choose_depth(plan: Plan, predicted: Callable[[Plan], Prediction]) -> Prediction:
    """The prediction of a plan at the best of three depths: the default, one less and one more.

    That is the shallowest within half a percent of the fastest that fits: a shallower pipeline needs less memory.
    """
    usual = predicted(plan)
    if len(plan.stages) == 1 or not plan.mode.preset.is_per_batch:
        return usual

    def deeper(by: int) -> Plan:
        stages = (stage if stage.is_last else replace(stage, depth=max(1, stage.depth + by)) for stage in plan.stages)
        return replace(plan, stages=tuple(stages))

    tried = [predicted(deeper(-1)), usual, predicted(deeper(1))]
    fitting = [prediction for prediction in tried if prediction.fits] or [usual]
    fastest = max(prediction.images_per_second for prediction in fitting)
    return next(prediction for prediction in fitting if prediction.images_per_second >= fastest * (1 - _TIE))
