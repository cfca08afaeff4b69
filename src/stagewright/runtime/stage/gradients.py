"""Sums a stage's gradient over its replicas, in buckets, each under way as soon as backward has filled it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from stagewright.runtime.comm.transport import AllOf, Collective, Pending
from stagewright.runtime.stage.versions import Parameter, Slot


def make_buckets(parameters: Sequence[Parameter], itemsize: int, bucket_bytes: int) -> list[tuple[int, ...]]:
    """Indices of parameters in the order backward reaches them, in runs of about `bucket_bytes`."""
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
    """Issues one stage's buckets in a fixed order: during the last backward of a round, or all at once."""

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
        self._under_way: dict[int, list[Pending]] = {}

    @contextmanager
    def watching(self, slot: Slot, update: int, gradient: Tensor) -> Iterator[None]:
        """Issue each bucket while backward runs, once its gradients and those of all buckets before are there."""
        missing = [len(bucket) for bucket in self._buckets]

        def arrived(index: int) -> None:
            missing[self._bucket_of[index]] -= 1
            issued = len(self._under_way.setdefault(update, []))
            while issued < len(missing) and missing[issued] == 0:
                self._issue(update, gradient)
                issued += 1

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
        """Issue what is not under way yet."""
        while len(self._under_way.setdefault(update, [])) < len(self._buckets):
            self._issue(update, gradient)

    def pending(self, update: int) -> Pending:
        """What must be over before the gradient is the sum."""
        return AllOf(self._under_way.get(update, ()))

    def forget(self, update: int) -> None:
        """The update is made."""
        self._under_way.pop(update, None)

    def _issue(self, update: int, gradient: Tensor) -> None:
        under_way = self._under_way[update]
        first, last = self._ranges[len(under_way)]
        under_way.append(self._collective.sum(gradient[first:last]))
