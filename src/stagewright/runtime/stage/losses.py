"""Losses and scores: from the logits of a microbatch to the events of a batch."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stagewright.errors import UserError
from stagewright.events import BatchLosses, Emit, Score
from stagewright.model.loss import Loss, logits_of, target_of
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
        """Add a batch's losses on this rank, and its loss scale if it had one."""
        self._batches.append((losses, scale))
        self._emit_batches(wait=False)

    def flush(self) -> None:
        self._emit_batches(wait=True)

    def _emit_batches(self, *, wait: bool) -> None:
        while self._batches and (wait or all(reading.is_completed() for _, reading in self._batches[0][0])):
            losses, scale = self._batches.popleft()
            numbers = tuple((microbatch, float(reading.value())) for microbatch, reading in losses)
            for microbatch, loss in numbers:
                if not math.isfinite(loss):
                    raise NonFiniteLoss(
                        f"the loss of batch {microbatch // self._plan.microbatches} is {loss} "
                        f"(stage {len(self._plan.stages) - 1}, microbatch {microbatch}); "
                        "try a lower --lr, a --warmup or --clip 1"
                    )
            self._emit(BatchLosses(self._rank, numbers, time.monotonic(), scale))


def score_of(outputs: Any, fields: Mapping[str, Tensor], loss: Loss) -> Score:
    """Samples, their summed loss, and top-1 and top-5 hits; a sample with many labels counts as one."""
    logits, labels = logits_of(outputs), target_of(fields)
    best = (logits.topk(min(5, logits.shape[1]), 1).indices == labels.unsqueeze(1)).double()
    hits = best.flatten(2).mean(2) if best.dim() > 2 else best
    measured = float(loss(outputs, fields).total) * len(labels)
    return Score(len(labels), measured, float(hits[:, 0].sum()), float(hits.sum()))
