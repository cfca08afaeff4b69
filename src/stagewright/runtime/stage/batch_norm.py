"""Running statistics of BatchNorm: each replica updates its own; evaluation and export use their weighted mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stagewright.runtime.comm.transport import Collective, Pending

_AVERAGED = ("running_mean", "running_var")
_SUMMED = ("num_batches_tracked",)


class Statistics:
    """The running statistics of one replica, and the number of microbatches that have updated them."""

    def __init__(self, module: nn.Module, collective: Collective, replica: int, replicas: int) -> None:
        named = [(name, buffer) for name, buffer in module.named_buffers() if is_averaged(name) or is_summed(name)]
        self.buffers = [buffer for _, buffer in named]
        self._is_summed = torch.tensor(
            [is_summed(name) for name, buffer in named for _ in range(buffer.numel())], dtype=torch.bool
        )
        self.count = 0
        self._collective = collective
        self._replica = replica
        self._replicas = replicas

    def gather(self) -> tuple[Tensor, Pending]:
        """Start to collect every replica's count and statistics: one row per replica, summed with zeros elsewhere."""
        rows = torch.zeros(self._replicas, 1 + len(self._is_summed), dtype=torch.float64)
        rows[self._replica, 0] = self.count
        if self.buffers:
            rows[self._replica, 1:] = torch.cat([buffer.flatten().double() for buffer in self.buffers])
        return rows, self._collective.sum(rows)

    @contextmanager
    def averaged(self, rows: Tensor) -> Iterator[None]:
        """Put the mean over all replicas, weighted by microbatches, into the module while the context is open."""
        own = [buffer.clone() for buffer in self.buffers]
        values = rows[:, 1:]
        self._write(torch.where(self._is_summed, values.sum(0), _weighted_mean(values, rows[:, 0])))
        try:
            yield
        finally:
            for buffer, saved in zip(self.buffers, own, strict=True):
                buffer.copy_(saved)

    def _write(self, flat: Tensor) -> None:
        for buffer, values in zip(self.buffers, torch.split(flat, [b.numel() for b in self.buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))


def mean_buffers(replicas: Sequence[Mapping[str, Tensor]], counts: Sequence[int]) -> dict[str, Tensor]:
    """One set of buffers for all replicas: statistics averaged by their counts, batches summed, others the first's."""
    weights = torch.tensor(counts, dtype=torch.float64)
    mean: dict[str, Tensor] = {}
    for name, first in replicas[0].items():
        rows = torch.stack([buffers[name].double() for buffers in replicas])
        if is_averaged(name):
            mean[name] = _weighted_mean(rows, weights).to(first.dtype)
        else:
            mean[name] = rows.sum(0).to(first.dtype) if is_summed(name) else first
    return mean


def is_averaged(name: str) -> bool:
    """Whether a buffer is a running statistic, whose mean over the replicas counts."""
    return name.rpartition(".")[2] in _AVERAGED


def is_summed(name: str) -> bool:
    """Whether a buffer counts batches, so that the sum over the replicas counts."""
    return name.rpartition(".")[2] in _SUMMED


def _weighted_mean(rows: Tensor, counts: Tensor) -> Tensor:
    """The mean of one row per replica, weighted by counts; unweighted where all counts are 0."""
    shares = counts / counts.sum() if counts.any() else torch.full_like(counts, 1 / len(counts))
    return (rows * shares.view(-1, *[1] * (rows.dim() - 1))).sum(0)
