"""Gradient norms: of a stage, or of the whole model where its ranks exchange them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from stagewright.runtime.comm.transport import Collective, Pending
from stagewright.runtime.stage.replica import Replica


class Norms:
    """The squared norms of all stages' gradients of one update, each filled in by its stage's first replica."""

    def __init__(self, stages: int, rank: int, world: Collective) -> None:
        self._stages = stages
        self._rank = rank
        self._world = world
        self._update = -1
        self._pending: Pending | None = None
        self._squares: Tensor | None = None

    def exchange(self, replicas: Iterable[Replica], update: int) -> None:
        """Join the exchange for an update."""
        squares = torch.zeros(self._stages, dtype=torch.float64)
        for replica in replicas:
            if replica.stage.ranks[0] == self._rank:
                squares[replica.stage.index] = norm_of(replica.ring.gradient_of(update)) ** 2
        self._update, self._squares, self._pending = update, squares, self._world.sum(squares)

    def pending(self, update: int) -> Pending:
        assert self._pending is not None and self._update == update, f"norms of update {update} were not exchanged"
        return self._pending

    def squares(self, update: int) -> Tensor:
        """By stage; the exchange is over."""
        assert self._squares is not None and self._update == update, f"norms of update {update} were not exchanged"
        return self._squares


def norm_of(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm
