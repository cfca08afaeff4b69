"""Dynamic loss scaling, decided by batch numbers: the scale of a batch follows from verdicts, never from timing. What a rank does about gradients that are not finite: by what kind of plan, one small object each.

one stage    all ranks hold the same sum, so each looks at its own; the device decides, the host learns later
all K = 1    every stage learns of every other's overflow before its update, as one process would
lagging      a stage hears from the stage behind it, and the last stage from the first, both by batch number"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stagewright.plan.plan import Plan
from stagewright.runtime.comm.channel import Bulletin
from stagewright.runtime.comm.device import Reading
from stagewright.runtime.comm.transport import AllOf, Pending
from stagewright.runtime.stage.replica import Replica

LARGEST = 2.0**127  # that fp32 holds
_GROWTH, _BACKOFF = 2.0, 0.5
SMALLEST = 2.0**-24  # below it a scale only helps gradients to vanish


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the scale moves: where it begins, and after how many clean batches it doubles."""

    initial: float
    interval: int
    delay: int  # the scale of batch p uses exactly the verdicts on batches up to p - delay


class LossScale:
    """The scale of each batch in turn."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling
        self._current = scaling.initial
        self._clean = 0
        self._heard = 0  # verdicts taken into account
        self._verdicts: dict[int, bool] = {}  # told, and not yet taken into account
        self._used: dict[int, float] = {}  # scales of batches without a verdict

    def due(self, batch: int) -> range:
        """The batches whose verdicts must still be told before the scale of this one is known."""
        return self.missing(batch - self._scaling.delay + 1)

    def missing(self, stop: int) -> range:
        """The batches below `stop` without a verdict; verdicts are told in order."""
        return range(self._heard + len(self._verdicts), stop)

    def tell(self, batch: int, overflowed: bool) -> None:
        """A verdict: whether some stage skipped that batch's update for want of finite gradients."""
        self._verdicts[batch] = overflowed

    def of(self, batch: int) -> float:
        """The scale of a batch; the verdicts it depends on have been told, and batches come in order."""
        if batch not in self._used:
            while self._heard <= batch - self._scaling.delay:
                self._take(self._heard, self._verdicts.pop(self._heard))
            self._used[batch] = self._current
        return self._used[batch]

    def _take(self, batch: int, overflowed: bool) -> None:
        """A batch that ran at another scale says nothing about this one."""
        self._heard = batch + 1
        if self._used.pop(batch, self._current) != self._current:
            return
        if overflowed:
            self._current *= _BACKOFF
            self._clean = 0
            if self._current < SMALLEST:
                raise ValueError(
                    f"gradients overflow fp16 at any loss scale (batch {batch}, scale {self._current:g}); "
                    "try --precision bf16, a lower --lr or --clip 1"
                )
            return
        self._clean += 1
        if self._clean == self._scaling.interval:
            self._current = min(LARGEST, self._current * _GROWTH)
            self._clean = 0

    def state(self) -> dict[str, Any]:
        """All that decides the scales to come, as JSON holds it."""
        return {
            "current": self._current,
            "clean": self._clean,
            "heard": self._heard,
            "verdicts": {str(batch): told for batch, told in self._verdicts.items()},
            "used": {str(batch): scale for batch, scale in self._used.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._current, self._clean, self._heard = state["current"], state["clean"], state["heard"]
        self._verdicts = {int(batch): bool(told) for batch, told in state["verdicts"].items()}
        self._used = {int(batch): float(scale) for batch, scale in state["used"].items()}

    def begin_at(self, batch: int) -> None:
        """Go on under another plan: what came before has had its say."""
        self._heard = batch
        self._verdicts.clear()
        self._used.clear()


Skipped = Callable[[int, int], None]  # told of a stage and an update
_KEPT = 64  # updates whose flags stay; no rank is further behind another


class Overflow:
    """Of precisions that need no scale."""

    def scale_of(self, batch: int) -> float | None:
        """What the last stage multiplies a batch's loss with."""
        return None

    def awaits_scale(self, batch: int) -> Pending | None:
        """What must be over before the scale of a batch is known."""
        return None

    def awaits_flag(self, stage: int, update: int) -> Pending | None:
        """What must be over before a stage can agree on an update."""
        return None

    def unscale(self, replica: Replica, update: int) -> None:
        """The gradient is whole: divide it by its scale, and note whether it is finite."""

    def outcome(self, replica: Replica, update: int, norms: Tensor | None) -> Tensor | bool:
        """Whether to skip an update: known here, or by the device alone (1 to skip); `norms` are all stages'."""
        return False

    def awaits_verdicts(self, stop: int) -> Pending | None:
        """What must be over before every batch below `stop` has its verdict."""
        return None

    def settle(self, stop: int) -> None:
        """The pipeline is empty: take in every verdict on batches below `stop`."""

    def state(self) -> dict[str, Any]:
        """What decides the scales to come."""
        return {}

    def go_on(self, state: Mapping[str, Any], batch: int, *, is_same: bool) -> None:
        """Go on after `batch` batches from such a state, which may be another plan's or of a run without scales."""


class _Scaled(Overflow, ABC):
    """Keeps the scale, on ranks of the last stage; subclasses know how verdicts come."""

    def __init__(self, scaling: Scaling, skipped: Skipped, *, is_last: bool = True) -> None:
        self._scale = LossScale(scaling)
        self._skipped = skipped
        self._is_last = is_last

    def scale_of(self, batch: int) -> float | None:
        for earlier in self._scale.due(batch):
            self._scale.tell(earlier, self._verdict(earlier))
        return self._scale.of(batch)

    def settle(self, stop: int) -> None:
        for batch in self._scale.missing(stop) if self._is_last else ():
            self._scale.tell(batch, self._verdict(batch))

    def state(self) -> dict[str, Any]:
        return self._scale.state()

    def go_on(self, state: Mapping[str, Any], batch: int, *, is_same: bool) -> None:
        if state:
            self._scale.load(state)
        if not (state and is_same):
            self._scale.begin_at(batch)

    @abstractmethod
    def _verdict(self, batch: int) -> bool:
        """Whether the first stage skipped that batch; verdicts are asked for in order."""


class OneStage(_Scaled):
    """The device skips by itself; its verdict is read when the next batch's backward begins."""

    def __init__(self, scaling: Scaling, skipped: Skipped) -> None:
        super().__init__(scaling, skipped)
        self._found: dict[int, Tensor] = {}
        self._readings: deque[tuple[int, Reading]] = deque()

    def unscale(self, replica: Replica, update: int) -> None:
        self._found[update] = found = replica.unscale(update)
        self._readings.append((update, replica.device.read(found)))

    def outcome(self, replica: Replica, update: int, norms: Tensor | None) -> Tensor | bool:
        return self._found.pop(update)

    def _verdict(self, batch: int) -> bool:
        update, reading = self._readings.popleft()
        assert update == batch, f"the verdict on batch {batch} is due but that on {update} came"
        overflowed = bool(reading.value())
        if overflowed:
            self._skipped(0, batch)
        return overflowed


class Synchronous(_Scaled):
    """The squared norms that ranks exchange tell: one that is no number is an overflow."""

    def __init__(self, scaling: Scaling, skipped: Skipped, *, is_last: bool) -> None:
        super().__init__(scaling, skipped, is_last=is_last)
        self._overflowed: dict[int, bool] = {}

    def unscale(self, replica: Replica, update: int) -> None:
        replica.unscale(update)

    def outcome(self, replica: Replica, update: int, norms: Tensor | None) -> Tensor | bool:
        assert norms is not None
        overflowed = not bool(norms.isfinite().all())
        if self._is_last:
            self._overflowed[update] = overflowed
        if overflowed:
            self._skipped(replica.stage.index, update)
        return overflowed

    def _verdict(self, batch: int) -> bool:
        return self._overflowed.pop(batch)


class Lagging(_Scaled):
    """Flags travel from stage to stage through the bulletin."""

    def __init__(self, scaling: Scaling, skipped: Skipped, rank: int, bulletin: Bulletin, *, is_last: bool) -> None:
        super().__init__(scaling, skipped, is_last=is_last)
        self._rank = rank
        self._bulletin = bulletin
        self._flags: dict[tuple[int, int], bool] = {}

    def awaits_scale(self, batch: int) -> Pending | None:
        return AllOf([_Coming(self._bulletin, _key(0, earlier)) for earlier in self._scale.due(batch)])

    def awaits_verdicts(self, stop: int) -> Pending | None:
        batches = self._scale.missing(stop) if self._is_last else ()
        return AllOf([_Coming(self._bulletin, _key(0, batch)) for batch in batches])

    def awaits_flag(self, stage: int, update: int) -> Pending | None:
        return _Coming(self._bulletin, _key(stage + 1, update))

    def unscale(self, replica: Replica, update: int) -> None:
        stage = replica.stage
        overflowed = bool(replica.device.read(replica.unscale(update)).value())
        if not stage.is_last:
            overflowed |= self._read(stage.index + 1, update)
        self._flags[stage.index, update] = overflowed
        if stage.ranks[0] == self._rank:
            self._bulletin.post(_key(stage.index, update), str(int(overflowed)))
            if update >= _KEPT:
                self._bulletin.drop(_key(stage.index, update - _KEPT))

    def outcome(self, replica: Replica, update: int, norms: Tensor | None) -> Tensor | bool:
        overflowed = self._flags.pop((replica.stage.index, update))
        if overflowed:
            self._skipped(replica.stage.index, update)
        return overflowed

    def _verdict(self, batch: int) -> bool:
        return self._read(0, batch)

    def _read(self, stage: int, update: int) -> bool:
        return self._bulletin.read(_key(stage, update)) == "1"


def make_overflow(plan: Plan, rank: int, bulletin: Bulletin, scaling: Scaling | None, skipped: Skipped) -> Overflow:
    """What goes with a plan."""
    if scaling is None:
        return Overflow()
    if len(plan.stages) == 1:
        return OneStage(scaling, skipped)
    is_last = rank in plan.stages[-1].ranks
    if plan.agree:
        return Synchronous(scaling, skipped, is_last=is_last)
    return Lagging(scaling, skipped, rank, bulletin, is_last=is_last)


def _key(stage: int, update: int) -> str:
    return f"overflow/{stage}/{update}"


class _Coming:
    """A text that somebody will leave."""

    def __init__(self, bulletin: Bulletin, key: str) -> None:
        self._bulletin = bulletin
        self._key = key

    def is_completed(self) -> bool:
        return self._bulletin.has(self._key)

    def wait(self) -> None:
        self._bulletin.read(self._key)
