"""Losses of microbatches on their way from the device to whoever listens, a batch at a time. How good logits are."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from stagewright.events import Score
from stagewright.plan.plan import Plan
from stagewright.runtime.comm.device import Reading
from stagewright.runtime.stage.replica import widened


class NonFiniteLoss(ValueError):
    """The loss is not a number; training on would only spread it."""


class Losses:
    """Keeps a batch's losses until all are there; tells of batches in order, and never waits before `flush`."""

    def __init__(self, plan: Plan, rank: int, emit: Callable[[dict[str, Any]], None]) -> None:
        self._plan = plan
        self._rank = rank
        self._emit = emit
        self._batches: deque[tuple[list[tuple[int, Reading]], float | None]] = deque()

    def add(self, losses: list[tuple[int, Reading]], scale: float | None) -> None:
        """A batch's losses on this rank, and the scale that its gradients had."""
        self._batches.append((losses, scale))
        self._tell(wait=False)

    def flush(self) -> None:
        self._tell(wait=True)

    def _tell(self, *, wait: bool) -> None:
        while self._batches and (wait or all(reading.is_completed() for _, reading in self._batches[0][0])):
            losses, scale = self._batches.popleft()
            numbers = [(microbatch, float(reading.value())) for microbatch, reading in losses]
            for microbatch, loss in numbers:
                self._require_finite(microbatch, loss)
            event = {"kind": "losses", "rank": self._rank, "losses": numbers, "time": time.monotonic()}
            self._emit(event if scale is None else {**event, "scale": scale})

    def _require_finite(self, microbatch: int, loss: float) -> None:
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                f"the loss of batch {microbatch // self._plan.microbatches} is {loss} "
                f"(stage {len(self._plan.stages) - 1}, microbatch {microbatch}); "
                "try a lower --lr, a --warmup or --clip 1"
            )


def score_of(logits: Tensor, labels: Tensor) -> Score:
    """Samples, their losses, and the hits among the best one and five; a sample of many labels counts as one."""
    logits = widened(logits)
    best = (logits.topk(min(5, logits.shape[1]), 1).indices == labels.unsqueeze(1)).double()
    hits = best.flatten(2).mean(2) if best.dim() > 2 else best
    loss = float(functional.cross_entropy(logits, labels)) * len(labels)
    return Score(len(labels), loss, float(hits[:, 0].sum()), float(hits.sum()))
