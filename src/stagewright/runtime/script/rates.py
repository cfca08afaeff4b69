"""What a script's own optimizer object says of its groups, batch by batch.

The object is a panel: schedulers and the script set its rates, but it never steps. The optimizers of stages take what
changed on it, each for the batch that it updates, whenever its rank gets there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from stagewright.errors import UserError
from stagewright.plan.plan import Plan, Stage
from stagewright.runtime.process.session import last_begun
from stagewright.runtime.stage.optimizer import ParamGroup

_OWN_KEYS = ("params", "initial_lr", "param_names")


class Panel:
    """A script's optimizer, what it said for the batches that some stage may still update, and its scheduler if any.

    The engine steps the scheduler with each batch.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._plan: Plan | None = None
        self._changes: dict[int, list[dict[str, Any]]] = {}  # by the first batch that they act on
        self._made = [_numbers(group) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []  # it never steps, whoever calls it
        self.read(0)
        self._scheduler = None if scheduler is None else scheduler(optimizer)
        self._scheduled = 0  # batches whose rates are known

    def begin(self, plan: Plan) -> None:
        """The plan is known: over how many batches its stages may be spread."""
        self._plan = plan

    def advance(self, batch: int) -> None:
        """What the panel says now acts from this batch on; a scheduler tells the rates of batches ahead as well."""
        with suppress(Exception):
            self.optimizer.step()  # of no parameters: torch's schedulers want to see it
        self._forget(batch)
        if self._scheduler is None:
            self.read(batch)
            return
        ahead = batch + 1 if self._plan is None else last_begun(self._plan, batch) + 1
        while self._scheduled < ahead:
            self.read(self._scheduled)
            self._scheduler.step()
            self._scheduled += 1

    def read(self, batch: int) -> None:
        """What the panel says now acts from this batch on."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self._made):
            raise UserError(
                f"the script's optimizer had {len(self._made)} groups and has {len(groups)} now; give all groups in "
                "the function that makes it"
            )
        before = list(self._changes.values())[-1] if self._changes else [{} for _ in groups]
        found = []
        for group, made, known in zip(groups, self._made, before, strict=True):
            now = _numbers(group)
            found.append({key: value for key, value in now.items() if key in known or value != made.get(key)})
        if not self._changes or found != before:
            self._changes[batch] = found

    def _forget(self, batch: int) -> None:
        """Drop what acts on no batch that some stage may still update when a rank has come to this one."""
        kept = 1 if self._plan is None else last_begun(self._plan, 0) + 1
        old = [number for number in self._changes if number < batch - kept]
        for number in old[:-1]:  # the newest of them still acts
            del self._changes[number]

    def at(self, batch: int) -> list[dict[str, Any]]:
        """What changed, as far as it acts on a batch."""
        return self._changes[max(number for number in self._changes if number <= batch)]

    def rate(self, batch: int) -> float:
        """The rate of the first group for a batch."""
        return float(self.at(batch)[0].get("lr", self._made[0]["lr"]))

    def of(self, stage: Stage) -> PanelRates:
        assert self._plan is not None
        return PanelRates(self, stage.round, self._plan.microbatches)


@dataclass(frozen=True, slots=True)
class PanelRates:
    """The panel as the optimizer of one stage sees it."""

    panel: Panel
    round: int
    microbatches: int  # of a batch

    def apply(self, update: int, groups: Sequence[ParamGroup]) -> None:
        changes = self.panel.at(update * self.round // self.microbatches)
        if len(groups) != len(changes):
            raise UserError(
                f"the optimizer factory makes {len(changes)} groups of all parameters but {len(groups)} of a stage's; "
                "make the same groups each time, empty ones too"
            )
        for group, changed in zip(groups, changes, strict=True):
            group.update(changed)


def _numbers(group: ParamGroup) -> dict[str, Any]:
    """What a group says of its parameters, as plain values."""
    return {
        key: float(value) if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in _OWN_KEYS
    }
