"""The gradient of a stage: summed over its replicas, bucket by bucket, and its norm, by which it is clipped.

A `Reducer` starts the all-reduce of each bucket as soon as backward has filled it. `Norms` exchanges the norms of all
stages, where a plan clips by the norm of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from stagewright.runtime.comm.transport import AllOf, Collective, Pending
from stagewright.runtime.stage.versions import Parameter, Slot


def make_buckets(parameters: Sequence[Parameter], itemsize: int, bucket_bytes: int) -> list[tuple[int, ...]]:
    """Indices of parameters in the order in which backward reaches them, in runs of about `bucket_bytes`."""
    buckets: list[list[int]] = [[]]
    size = 0
    for index in reversed(range(len(parameters))):
        if size >= bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(index)
        size += (parameters[index].end - parameters[index].offset) * itemsize
    return [tuple(bucket) for bucket in buckets if bucket]


class Reducer:
    """Starts the all-reduces of a stage's buckets in a fixed order: during a round's last backward, or together."""

    def __init__(
        self, collective: Collective, parameters: Sequence[Parameter], itemsize: int, bucket_bytes: int
    ) -> None:
        self._collective = collective
        self._buckets = make_buckets(parameters, itemsize, bucket_bytes)
        self._ranges = [
            (min(parameters[i].offset for i in bucket), max(parameters[i].end for i in bucket))
            for bucket in self._buckets
        ]
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket}
        self._started: dict[int, list[Pending]] = {}

    @contextmanager
    def watching(self, slot: Slot, update: int, gradient: Tensor) -> Iterator[None]:
        """Start each bucket while backward runs, once its gradients and those of all earlier buckets are complete."""
        missing = [len(bucket) for bucket in self._buckets]

        def arrived(index: int) -> None:
            missing[self._bucket_of[index]] -= 1
            number = len(self._started.setdefault(update, []))
            while number < len(missing) and missing[number] == 0:
                self._start_next(update, gradient)
                number += 1

        hooks = [
            leaf.register_post_accumulate_grad_hook(lambda _, index=index: arrived(index))  # type: ignore[no-untyped-call]
            for index, leaf in enumerate(slot.leaves)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def start(self, update: int, gradient: Tensor) -> None:
        """Start every bucket that has not started yet."""
        while len(self._started.setdefault(update, [])) < len(self._buckets):
            self._start_next(update, gradient)

    def pending(self, update: int) -> Pending:
        """The all-reduces of an update; once they are complete, the gradient is the sum."""
        return AllOf(self._started.get(update, ()))

    def forget(self, update: int) -> None:
        """Drop an update's all-reduces, once the update is done."""
        self._started.pop(update, None)

    def _start_next(self, update: int, gradient: Tensor) -> None:
        started = self._started[update]
        first, last = self._ranges[len(started)]
        started.append(self._collective.sum(gradient[first:last]))


class Norms:
    """The squared norms of all stages' gradients of one update, each computed by its stage's first replica."""

    def __init__(self, stages: int, world: Collective) -> None:
        self._stages = stages
        self._world = world
        self._update = -1
        self._pending: Pending | None = None
        self._squares: Tensor | None = None

    def exchange(self, gradients: Mapping[int, Tensor], update: int) -> None:
        """Join the exchange for an update, with the gradients, by stage, whose norms this rank computes."""
        squares = torch.zeros(self._stages, dtype=torch.float64)
        for stage, gradient in gradients.items():
            squares[stage] = norm_of(gradient) ** 2
        self._update, self._squares, self._pending = update, squares, self._world.sum(squares)

    def pending(self, update: int) -> Pending:
        assert self._pending is not None and self._update == update, f"norms of update {update} were not exchanged"
        return self._pending

    def squares(self, update: int) -> Tensor:
        """The squared norm of each stage; the exchange must be complete."""
        assert self._squares is not None and self._update == update, f"norms of update {update} were not exchanged"
        return self._squares


def norm_of(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """The factor that limits a gradient's norm to `limit`, as in torch's clip_grad_norm_."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)
