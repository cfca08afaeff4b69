"""Running statistics: each replica moves its own; evaluation and export see their weighted mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stagewright.runtime.comm.transport import Collective, Pending

AVERAGED = ("running_mean", "running_var")
SUMMED = ("num_batches_tracked",)


class Statistics:
    """The running statistics of one replica, and how many microbatches have moved them."""

    def __init__(self, module: nn.Module) -> None:
        named = [(name.rpartition(".")[2], buffer) for name, buffer in module.named_buffers()]
        self.buffers = [buffer for leaf, buffer in named if leaf in AVERAGED + SUMMED]
        self._is_summed = torch.tensor(
            [leaf in SUMMED for leaf, buffer in named if leaf in AVERAGED + SUMMED for _ in range(buffer.numel())],
            dtype=torch.bool,
        )
        self.count = 0

    def gather(self, collective: Collective, replica: int, replicas: int) -> tuple[Tensor, Pending]:
        """Begin to collect every replica's count and statistics: a row each, summed with zeros elsewhere."""
        rows = torch.zeros(replicas, 1 + len(self._is_summed), dtype=torch.float64)
        rows[replica, 0] = self.count
        if self.buffers:
            rows[replica, 1:] = torch.cat([buffer.flatten().double() for buffer in self.buffers])
        return rows, collective.sum(rows)

    @contextmanager
    def averaged(self, rows: Tensor) -> Iterator[None]:
        """Put the mean over all replicas, weighted by microbatches, into the module while the context is open."""
        own = [buffer.clone() for buffer in self.buffers]
        counts, values = rows[:, :1], rows[:, 1:]
        shares = counts / counts.sum() if counts.any() else torch.full_like(counts, 1 / len(counts))
        self._write(torch.where(self._is_summed, values.sum(0), (values * shares).sum(0)))
        try:
            yield
        finally:
            for buffer, kept in zip(self.buffers, own, strict=True):
                buffer.copy_(kept)

    def _write(self, flat: Tensor) -> None:
        for buffer, values in zip(self.buffers, torch.split(flat, [b.numel() for b in self.buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))
