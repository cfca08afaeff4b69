"""Dynamic scheduling: a rank runs whichever of its next tasks is ready, backward first, within its depth.

The tasks of a stream keep their order, so channels, sums and reduces keep theirs; only the choice between streams is
made at run time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from stagewright.plan.plan import Plan
from stagewright.runtime.comm.transport import Pending
from stagewright.runtime.gate import Gate
from stagewright.schedule.action import PASSES, Action, Op
from stagewright.schedule.lower import Task, last_of, streams
from stagewright.schedule.requires import requires

_POLL_SECONDS = 2e-5
_PREFERENCE = {Op.UPDATE: 0, Op.REDUCE: 1, Op.TIE: 1, Op.AGREE: 2, Op.BACKWARD: 3, Op.FORWARD: 4}


def _main(task: Task) -> Action:
    """The action of a task that is not a transfer."""
    return next(action for action in task.actions if action.op in _PREFERENCE)


def _number(action: Action) -> int:
    """The place of an action in its stream: its microbatch, or its update."""
    number = action.microbatch if action.op in PASSES else action.version
    assert number is not None
    return number


class DynamicScheduler:
    """Takes the tasks of a rank in a span as they become ready; waiting for it waits until one is."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        span: range,
        awaits: Callable[[Action], Pending | None],
        timeout: float,
        gate: Gate,
    ) -> None:
        self._gate = gate
        self._plan = plan
        self._rank = rank
        self._start = span.start
        self._awaits = awaits
        self._timeout = timeout
        self._streams = streams(plan, rank, span, lambda: self._gate.limit)
        self._heads = [next(stream, None) for stream in self._streams]
        self._progress: dict[tuple[Op, int], int] = {}
        self._held = dict.fromkeys(range(len(plan.stages)), 0)

    @property
    def is_finished(self) -> bool:
        return not any(task and self._last_of(task) < self._gate.limit for task in self._heads)

    def is_completed(self) -> bool:
        """Whether a task is ready, or none is left."""
        return self._choice() is not None or self.is_finished

    def wait(self) -> None:
        """Wait until a task is ready."""
        limit = time.monotonic() + self._timeout
        while not self.is_completed():
            if time.monotonic() > limit:
                raise RuntimeError(f"no task became ready within {self._timeout:g} s")
            time.sleep(_POLL_SECONDS)

    def take(self) -> tuple[Action, ...]:
        """The actions of the task to run now, which counts as done from here on; empty if none is left."""
        index = self._choice()
        if index is None:
            return ()
        task = self._heads[index]
        assert task is not None
        main = _main(task)
        self._progress[main.op, main.stage] = _number(main)
        self._held[main.stage] += (main.op is Op.FORWARD) - (main.op is Op.BACKWARD)
        self._heads[index] = next(self._streams[index], None)
        return task.actions

    def _choice(self) -> int | None:
        """The stream whose next task is ready; backward before forward, later stages before earlier ones."""
        candidates = [(_main(task), index, task) for index, task in enumerate(self._heads) if task is not None]
        candidates.sort(key=lambda candidate: (_PREFERENCE[candidate[0].op], -candidate[0].stage))
        return next((index for main, index, task in candidates if self._is_ready(main, task)), None)

    def _is_ready(self, main: Action, task: Task) -> bool:
        if main.op is Op.FORWARD and self._held[main.stage] >= self._plan.stages[main.stage].depth:
            return False
        if self._last_of(task) >= self._gate.limit:
            return False
        if not all(self._can_run(action, task) for action in task.actions):
            return False
        return self._gate.enter(self._last_of(task))  # last, since it begins the batch

    def _last_of(self, task: Task) -> int:
        return last_of(self._plan, task.actions[0])

    def _can_run(self, action: Action, task: Task) -> bool:
        for needed in requires(self._plan, action, self._start):
            if needed.rank == self._rank and needed not in task.actions and not self._is_done(needed):
                return False
        pending = self._awaits(action)
        return pending is None or pending.is_completed()

    def _is_done(self, action: Action) -> bool:
        """Whether an action is done; streams keep their order, so every smaller number is done too."""
        return self._progress.get((action.op, action.stage), -1) >= _number(action)
