"""Running statistics of BatchNorm: each replica updates its own; evaluation and export use their weighted mean."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stagewright.runtime.comm.transport import Collective, Pending

_AVERAGED, _SUMMED, _FIRST = range(3)  # what counts for all replicas: the mean, the sum, or the first replica's
_KINDS = {"running_mean": _AVERAGED, "running_var": _AVERAGED, "num_batches_tracked": _SUMMED}


class Statistics:
    """The buffers that one replica's forwards change, and the number of microbatches that have updated them.

    Evaluation and export see one value for all replicas: running statistics averaged, counts of batches summed, and any
    other buffer as the first replica has it.
    """

    def __init__(
        self, module: nn.Module, changed: Collection[str], collective: Collective, replica: int, replicas: int
    ) -> None:
        self._module = module
        named = [(name, buffer) for name, buffer in module.named_buffers() if name in changed or _kind(name) != _FIRST]
        self._names = [name for name, _ in named]
        widths = [_numbers(buffer).numel() for _, buffer in named]
        kinds = [_kind(name) for name in self._names]
        self._kinds = torch.tensor([kind for kind, width in zip(kinds, widths, strict=True) for _ in range(width)])
        self._widths = widths
        self.count = 0
        self.collective = collective
        self.replica = replica
        self._replicas = replicas

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers as they are now: a forward may replace them."""
        return [self._module.get_buffer(name) for name in self._names]

    def share_counts(self) -> None:
        """Divide counts of batches that a model starts with among the replicas, so that their sum is right."""
        for name, buffer in zip(self._names, self.buffers, strict=True):
            if is_summed(name):
                buffer.copy_(share_of(buffer, self.replica, self._replicas))

    def gather(self) -> tuple[Tensor, Pending]:
        """Start to collect every replica's count and buffers: one row per replica, summed with zeros elsewhere."""
        rows = torch.zeros(self._replicas, 1 + len(self._kinds), dtype=torch.float64)
        rows[self.replica, 0] = self.count
        if self._names:
            rows[self.replica, 1:] = torch.cat([_numbers(buffer).flatten().double() for buffer in self.buffers])
        return rows, self.collective.sum(rows)

    @contextmanager
    def averaged(self, rows: Tensor) -> Iterator[None]:
        """Put what counts for all replicas into the module while the context is open."""
        own = [buffer.clone() for buffer in self.buffers]
        values = rows[:, 1:]
        mean = _weighted_mean(values, rows[:, 0])
        choices = torch.stack([mean, values.sum(0), values[0]])
        self._write(choices.gather(0, self._kinds.long().unsqueeze(0)).squeeze(0))
        try:
            yield
        finally:
            for buffer, saved in zip(self.buffers, own, strict=True):
                buffer.copy_(saved)

    @torch.no_grad()
    def _write(self, flat: Tensor) -> None:
        for buffer, values in zip(self.buffers, torch.split(flat, self._widths), strict=True):
            numbers = _numbers(buffer)
            numbers.copy_(values.view_as(numbers))


def _numbers(buffer: Tensor) -> Tensor:
    """A buffer as real numbers, in its own memory."""
    buffer = buffer.detach()
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _kind(name: str) -> int:
    """What of a buffer counts for all replicas."""
    return _KINDS.get(name.rpartition(".")[2], _FIRST)


def mean_buffers(replicas: Sequence[Mapping[str, Tensor]], counts: Sequence[int]) -> dict[str, Tensor]:
    """One set of buffers for all replicas: statistics averaged by their counts, batches summed, others the first's."""
    weights = torch.tensor(counts, dtype=torch.float64)
    mean: dict[str, Tensor] = {}
    for name, first in replicas[0].items():
        if _kind(name) == _FIRST:
            mean[name] = first
            continue
        rows = torch.stack([buffers[name].double() for buffers in replicas])
        mean[name] = (_weighted_mean(rows, weights) if _kind(name) == _AVERAGED else rows.sum(0)).to(first.dtype)
    return mean


def is_summed(name: str) -> bool:
    """Whether a buffer counts batches, so that the sum over the replicas counts."""
    return _kind(name) == _SUMMED


def share_of(total: Tensor, replica: int, replicas: int) -> Tensor:
    """A replica's share of a count; the shares add up to it."""
    return (total + replicas - 1 - replica) // replicas


def _weighted_mean(rows: Tensor, counts: Tensor) -> Tensor:
    """The mean of one row per replica, weighted by counts; unweighted where all counts are 0.

    Where all rows have one number it is that, without rounding: the statistics of a frozen norm keep their bits.
    """
    shares = counts / counts.sum() if counts.any() else torch.full_like(counts, 1 / len(counts))
    mean = (rows * shares.view(-1, *[1] * (rows.dim() - 1))).sum(0)
    return torch.where((rows == rows[0]).all(0), rows[0], mean)
