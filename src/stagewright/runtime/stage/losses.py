"""Losses: from those of microbatches to the events of a batch."""

from __future__ import annotations

import math
import time
from collections import deque

from torch import Tensor

from stagewright.errors import UserError
from stagewright.events import BatchLosses, Emit
from stagewright.plan.plan import Plan
from stagewright.runtime.comm.device import Reading


class NonFiniteLoss(UserError):
    """A loss is infinite or NaN; further training would only spread it."""


class Losses:
    """Collects the losses of each batch on this rank, and emits batches in order; only `flush` waits."""

    def __init__(self, plan: Plan, rank: int, emit: Emit) -> None:
        self._plan = plan
        self._rank = rank
        self._emit = emit
        self._batches: deque[tuple[list[tuple[int, Reading]], float | None]] = deque()

    def add(self, losses: list[tuple[int, Reading]], scale: float | None) -> None:
        """Add a batch's losses on this rank, each a mean or a total and its count; and its loss scale if it had one."""
        self._batches.append((losses, scale))
        self._emit_batches(wait=False)

    def flush(self) -> None:
        self._emit_batches(wait=True)

    def _emit_batches(self, *, wait: bool) -> None:
        while self._batches and (wait or all(reading.is_completed() for _, reading in self._batches[0][0])):
            losses, scale = self._batches.popleft()
            numbers = tuple((microbatch, *_total_and_count(reading.value())) for microbatch, reading in losses)
            for microbatch, loss, _ in numbers:
                if not math.isfinite(loss):
                    raise NonFiniteLoss(
                        f"the loss of batch {microbatch // self._plan.microbatches} is {loss} "
                        f"(stage {len(self._plan.stages) - 1}, microbatch {microbatch}); "
                        "try a lower --lr, a --warmup or --clip 1"
                    )
            self._emit(BatchLosses(self._rank, numbers, time.monotonic(), scale))


def _total_and_count(loss: Tensor) -> tuple[float, float]:
    """A loss of one number, a mean, counts once; one of two is a total and its count."""
    if loss.numel() == 1:
        return float(loss), 1.0
    total, count = loss.flatten().tolist()
    return total, count
