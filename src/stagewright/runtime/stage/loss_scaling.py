"""Dynamic loss scaling by batch numbers: a batch's scale follows from earlier skip decisions, never from timing.

A stage skips an update whose gradient is not finite. How ranks learn of each other's decisions depends on the plan:

    one stage    all ranks hold the same sum and check it themselves; the device decides, and the host reads it later
    all K = 1    every stage knows every other's overflow before its update, as one process would
    lagged       a stage reads the flag of the next stage, and the last stage that of the first, both by batch number

The scale of batch p follows from the skip decisions on batches up to p-L: L = 1 where all K = 1, else max(S, K of stage
0). It travels back with the gradients, as a number beside them. A skipped update leaves weights, optimizer and its
count of steps unchanged, and makes a version all the same. `pipedream`, and batches with fewer microbatches than
replicas, refuse fp16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import Store

from stagewright.errors import UserError
from stagewright.plan.plan import Plan
from stagewright.runtime.comm.device import Reading
from stagewright.runtime.comm.transport import AllOf, Pending
from stagewright.runtime.stage.replica import Replica

LARGEST = 2.0**127  # the largest power of two in fp32
SMALLEST = 2.0**-24  # below this, a scale only makes gradients vanish
_GROWTH, _BACKOFF = 2.0, 0.5
_KEPT_FLAGS = 64  # updates per stage; no rank falls further behind another

Skipped = Callable[[int, int], None]  # called with the stage and the update that was skipped


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """The initial scale, and when it changes."""

    initial: float
    interval: int  # batches without overflow after which the scale doubles
    delay: int  # the scale of batch p depends on exactly the skip decisions up to batch p - delay


class LossScale:
    """The loss scale of each batch in turn, which follows from the skip decisions on earlier batches."""

    def __init__(self, options: ScalingOptions) -> None:
        self._options = options
        self._current = options.initial
        self._clean = 0  # batches since the last change
        self._applied = 0  # batches whose skip decisions are in the current scale
        self._decisions: dict[int, bool] = {}  # recorded but not yet applied
        self._used: dict[int, float] = {}  # scales of the batches whose decision is not applied

    def due(self, batch: int) -> range:
        """The batches whose skip decisions must be recorded before the scale of this one is known."""
        return self.missing(batch - self._options.delay + 1)

    def missing(self, stop: int) -> range:
        """The batches below `stop` without a recorded skip decision."""
        return range(self._applied + len(self._decisions), stop)

    def record(self, batch: int, overflowed: bool) -> None:
        """Record whether any stage skipped a batch's update because of overflow; batches come in order."""
        self._decisions[batch] = overflowed

    def of(self, batch: int) -> float:
        """The scale of a batch, whose due decisions are recorded; batches come in order."""
        if batch not in self._used:
            while self._applied <= batch - self._options.delay:
                self._apply(self._applied, self._decisions.pop(self._applied))
            self._used[batch] = self._current
        return self._used[batch]

    def _apply(self, batch: int, overflowed: bool) -> None:
        """Change the scale after a decision, unless the batch ran at another scale than the current one."""
        self._applied = batch + 1
        if self._used.pop(batch, self._current) != self._current:
            return
        if overflowed:
            self._current *= _BACKOFF
            self._clean = 0
            if self._current < SMALLEST:
                raise UserError(
                    f"gradients overflow fp16 at any loss scale (batch {batch}, scale {self._current:g}); "
                    "try --precision bf16, a lower --lr or --clip 1"
                )
            return
        self._clean += 1
        if self._clean == self._options.interval:
            self._current = min(LARGEST, self._current * _GROWTH)
            self._clean = 0

    def state(self) -> dict[str, Any]:
        """All that decides later scales, for JSON; the keys are part of the checkpoint format."""
        return {
            "current": self._current,
            "clean": self._clean,
            "heard": self._applied,
            "verdicts": {str(batch): overflowed for batch, overflowed in self._decisions.items()},
            "used": {str(batch): scale for batch, scale in self._used.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._current, self._clean, self._applied = state["current"], state["clean"], state["heard"]
        self._decisions = {int(batch): bool(overflowed) for batch, overflowed in state["verdicts"].items()}
        self._used = {int(batch): float(scale) for batch, scale in state["used"].items()}

    def start_at(self, batch: int) -> None:
        """Start from the current scale at a batch, whatever was decided before it."""
        self._applied = batch
        self._decisions.clear()
        self._used.clear()


class LossScaling:
    """Loss scaling of one rank; this default is for precisions that need none."""

    def scale_of(self, batch: int) -> float | None:
        """The factor by which the last stage multiplies a batch's loss."""
        return None

    def awaits_scale(self, batch: int) -> Pending | None:
        """What must be complete before the scale of a batch is known."""
        return None

    def awaits_flag(self, stage: int, update: int) -> Pending | None:
        """What must be complete before a stage can agree on an update."""
        return None

    def unscale(self, replica: Replica, update: int) -> None:
        """Divide the whole gradient by its scale, and note whether it is finite."""

    def skip_decision(self, replica: Replica, update: int, norms: Tensor | None) -> Tensor | bool:
        """Whether to skip an update: a bool, or a tensor (1 to skip) where only the device knows.

        `norms` are the squared norms of all stages, where ranks exchange them.
        """
        return False

    def awaits_decisions(self, stop: int) -> Pending | None:
        """What must be complete before the skip decisions on all batches below `stop` are known."""
        return None

    def record_decisions(self, stop: int) -> None:
        """Record the skip decisions on all batches below `stop`; the pipeline is empty."""

    def state(self) -> dict[str, Any]:
        """All that decides later scales."""
        return {}

    def resume(self, state: Mapping[str, Any], batch: int, *, is_same: bool) -> None:
        """Resume after `batch` batches from a state of this plan or another; empty if it had no scale."""


class _DynamicScaling(LossScaling, ABC):
    """Keeps the scale, on ranks of the last stage; subclasses know how skip decisions get there."""

    def __init__(self, options: ScalingOptions, skipped: Skipped, *, is_last: bool = True) -> None:
        self._scale = LossScale(options)
        self._skipped = skipped
        self._is_last = is_last

    def scale_of(self, batch: int) -> float | None:
        for earlier in self._scale.due(batch):
            self._scale.record(earlier, self._decision(earlier))
        return self._scale.of(batch)

    def record_decisions(self, stop: int) -> None:
        for batch in self._scale.missing(stop) if self._is_last else ():
            self._scale.record(batch, self._decision(batch))

    def state(self) -> dict[str, Any]:
        return self._scale.state()

    def resume(self, state: Mapping[str, Any], batch: int, *, is_same: bool) -> None:
        if state:
            self._scale.load(state)
        if not (state and is_same):
            self._scale.start_at(batch)

    @abstractmethod
    def _decision(self, batch: int) -> bool:
        """Whether the first stage skipped that batch; called once per batch, in order."""


class OneStageScaling(_DynamicScaling):
    """The device skips on its own; the host reads the decision when the next batch's backward begins."""

    def __init__(self, options: ScalingOptions, skipped: Skipped) -> None:
        super().__init__(options, skipped)
        self._found: dict[int, Tensor] = {}
        self._readings: deque[tuple[int, Reading]] = deque()

    def unscale(self, replica: Replica, update: int) -> None:
        self._found[update] = found = replica.gradients.unscale(update)
        self._readings.append((update, replica.device.read(found)))

    def skip_decision(self, replica: Replica, update: int, norms: Tensor | None) -> Tensor | bool:
        return self._found.pop(update)

    def _decision(self, batch: int) -> bool:
        update, reading = self._readings.popleft()
        assert update == batch, f"expected the skip decision on batch {batch} but found that on {update}"
        overflowed = bool(reading.value())
        if overflowed:
            self._skipped(0, batch)
        return overflowed


class SynchronousScaling(_DynamicScaling):
    """Every rank decides from the squared norms that all exchange: an overflow makes one infinite or NaN."""

    def __init__(self, options: ScalingOptions, skipped: Skipped, *, is_last: bool) -> None:
        super().__init__(options, skipped, is_last=is_last)
        self._overflowed: dict[int, bool] = {}

    def unscale(self, replica: Replica, update: int) -> None:
        replica.gradients.unscale(update)

    def skip_decision(self, replica: Replica, update: int, norms: Tensor | None) -> Tensor | bool:
        assert norms is not None
        overflowed = not bool(norms.isfinite().all())
        if self._is_last:
            self._overflowed[update] = overflowed
        if overflowed:
            self._skipped(replica.stage.index, update)
        return overflowed

    def _decision(self, batch: int) -> bool:
        return self._overflowed.pop(batch)


class LaggedScaling(_DynamicScaling):
    """Overflow flags pass from stage to stage through the key-value store."""

    def __init__(self, options: ScalingOptions, skipped: Skipped, rank: int, store: Store, *, is_last: bool) -> None:
        super().__init__(options, skipped, is_last=is_last)
        self._rank = rank
        self._store = store
        self._flags: dict[tuple[int, int], bool] = {}

    def awaits_scale(self, batch: int) -> Pending | None:
        return AllOf([_Flag(self._store, 0, earlier) for earlier in self._scale.due(batch)])

    def awaits_decisions(self, stop: int) -> Pending | None:
        batches = self._scale.missing(stop) if self._is_last else ()
        return AllOf([_Flag(self._store, 0, batch) for batch in batches])

    def awaits_flag(self, stage: int, update: int) -> Pending | None:
        return _Flag(self._store, stage + 1, update)

    def unscale(self, replica: Replica, update: int) -> None:
        stage = replica.stage
        overflowed = bool(replica.device.read(replica.gradients.unscale(update)).value())
        if not stage.is_last:
            overflowed |= _Flag(self._store, stage.index + 1, update).read()
        self._flags[stage.index, update] = overflowed
        if stage.ranks[0] == self._rank:
            _Flag(self._store, stage.index, update).write(overflowed)
            if update >= _KEPT_FLAGS:
                _Flag(self._store, stage.index, update - _KEPT_FLAGS).delete()

    def skip_decision(self, replica: Replica, update: int, norms: Tensor | None) -> Tensor | bool:
        overflowed = self._flags.pop((replica.stage.index, update))
        if overflowed:
            self._skipped(replica.stage.index, update)
        return overflowed

    def _decision(self, batch: int) -> bool:
        return _Flag(self._store, 0, batch).read()


class _Flag:
    """A stage's overflow flag of one update in the store; as a `Pending`, it is complete once it is set."""

    def __init__(self, store: Store, stage: int, update: int) -> None:
        self._store = store
        self._key = f"overflow/{stage}/{update}"

    def write(self, overflowed: bool) -> None:
        self._store.set(self._key, str(int(overflowed)))

    def read(self) -> bool:
        return self._store.get(self._key) == b"1"

    def delete(self) -> None:
        self._store.delete_key(self._key)

    def is_completed(self) -> bool:
        return bool(self._store.check([self._key]))

    def wait(self) -> None:
        self._store.get(self._key)


def make_loss_scaling(
    plan: Plan, rank: int, store: Store, options: ScalingOptions | None, skipped: Skipped
) -> LossScaling:
    """The loss scaling of one rank of a plan."""
    if options is None:
        return LossScaling()
    if len(plan.stages) == 1:
        return OneStageScaling(options, skipped)
    is_last = rank in plan.stages[-1].ranks
    if plan.agree:
        return SynchronousScaling(options, skipped, is_last=is_last)
    return LaggedScaling(options, skipped, rank, store, is_last=is_last)
