"""Dynamic loss scaling, decided by batch numbers: the scale of a batch follows from verdicts, never from timing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
