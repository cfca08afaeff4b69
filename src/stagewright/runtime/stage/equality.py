"""Replicas of a stage, and homes of a tied parameter, hold the same weights.

They are made so before the first step, and compared then and at every checkpoint.

A factory that draws numbers of its own, or reads a clock, builds another model in every process.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from stagewright.runtime.comm.transport import Collective, Pending
from stagewright.runtime.stage.replica import Replica
from stagewright.runtime.stage.ties import TiedHere

_CHUNK = 2**22  # elements hashed at once
_PRIME = 8191


class UnequalReplicas(RuntimeError):
    """Two replicas of a stage hold different weights."""


def begin_equal(replica: Replica) -> Iterator[Pending]:
    """Give the first replica's parameters and buffers to the others, where they differ."""
    if replica.stage.replicas == 1:
        return
    hashes = yield from _exchange(replica, _everything(replica))
    if _different(hashes):
        for tensor in _everything(replica):
            yield from _give(replica.statistics.collective, replica.statistics.replica == 0, tensor, [tensor])
        replica.restart_versions()
        hashes = yield from _exchange(replica, _everything(replica))
    _require(replica, hashes, "before the first step")


def require_equal(replica: Replica, batch: int) -> Iterator[Pending]:
    """Compare the weights of a stage's replicas; a difference is a fault that names the ranks."""
    if replica.stage.replicas > 1:
        held = (replica.ring.master, replica.average.flat)
        hashes = yield from _exchange(replica, (flat for flat in held if flat is not None))
        _require(replica, hashes, f"at batch {batch}")


def compare_homes(
    parameter: TiedHere, replicas: Mapping[int, Replica], rank: int, batch: int | None
) -> Iterator[Pending]:
    """Compare a tied parameter on all ranks of its homes; a difference is a fault that names the ranks.

    Before the first step, without a batch, the first rank of the first home gives its values to the others.
    """
    own = [(replicas[stage], replicas[stage].ring.parameters[index]) for stage, index in parameter.places.items()]
    values = [replica.ring.master[held.offset : held.end] for replica, held in own]
    hashes = yield from _exchange_homes(parameter, rank, values)
    if batch is None and _different(hashes):
        yield from _give(parameter.collective, rank == parameter.ranks[0], values[0], values)
        for replica, _ in own:
            replica.restart_versions()
        hashes = yield from _exchange_homes(parameter, rank, values)
    if different := _different(hashes):
        others = ", ".join(str(parameter.ranks[index]) for index in different)
        when = "before the first step" if batch is None else f"at batch {batch}"
        raise UnequalReplicas(
            f"tied parameter '{parameter.name}' of stages {', '.join(map(str, parameter.homes))} has other values "
            f"on rank {others} than on rank {parameter.ranks[0]} {when}"
        )


@torch.no_grad()
def _give(collective: Collective, is_first: bool, tensor: Tensor, targets: Sequence[Tensor]) -> Iterator[Pending]:
    """Give the bits of the first rank's tensor to the targets of all."""
    content = tensor.contiguous().flatten().view(torch.uint8).clone()
    yield collective.sum(content if is_first else content.zero_())
    for target in targets:
        target.copy_(content.view(tensor.dtype).view(tensor.shape))


def _exchange_homes(parameter: TiedHere, rank: int, values: Sequence[Tensor]) -> Generator[Pending, None, Tensor]:
    """The hashes of all ranks: a row each; homes on one rank are compared there."""
    hashes = [hash_of([value]) for value in values]
    is_equal = all(torch.equal(found, hashes[0]) for found in hashes)
    own = hashes[0] if is_equal else torch.full((4,), -1.0 - rank, dtype=torch.float64)
    return (yield from _rows(parameter.collective, len(parameter.ranks), parameter.ranks.index(rank), own))


def _exchange(replica: Replica, tensors: Iterable[Tensor]) -> Generator[Pending, None, Tensor]:
    """The hashes of all replicas: a row each."""
    statistics = replica.statistics
    rows = _rows(statistics.collective, replica.stage.replicas, statistics.replica, hash_of(tensors))
    return (yield from rows)


def _rows(collective: Collective, count: int, index: int, own: Tensor) -> Generator[Pending, None, Tensor]:
    rows = torch.zeros(count, 4, dtype=torch.float64)
    rows[index] = own
    yield collective.sum(rows)
    return rows


def _everything(replica: Replica) -> list[Tensor]:
    """The weights of a stage, and what is not trained."""
    held = replica.piece.training
    trained = {id(leaf) for slot in replica.ring.slots for leaf in slot.leaves}
    trained |= {id(leaf) for leaf in replica.ring.use_master().leaves}
    frozen = [parameter.detach() for parameter in held.parameters() if id(parameter) not in trained]
    return [replica.ring.master, *frozen, *(buffer.detach() for buffer in held.buffers())]


def hash_of(tensors: Iterable[Tensor]) -> Tensor:
    """Four numbers that differ where the bits of tensors differ: a sum of their words, and one weighted by position."""
    total = torch.zeros(2, dtype=torch.int64)
    for tensor in tensors:
        content = tensor.detach().contiguous().flatten().view(torch.uint8)
        content = torch.nn.functional.pad(content, (0, -len(content) % 4)).view(torch.int32)
        for chunk in torch.split(content, _CHUNK):
            words = chunk.to(torch.int64)
            places = torch.arange(1, len(words) + 1, device=words.device) % _PRIME + 1
            total = total * 31 + torch.stack([words.sum(), (words * places).sum()]).cpu()
    halves = torch.stack([total >> 32, total & 0xFFFFFFFF])
    return halves.flatten().double()  # exact: each fits into 53 bits


def _different(hashes: Tensor) -> list[int]:
    """The replicas whose hash is not the first's."""
    return [index for index, row in enumerate(hashes) if not torch.equal(row, hashes[0])]


def _require(replica: Replica, hashes: Tensor, when: str) -> None:
    different = _different(hashes)
    if different:
        ranks = replica.stage.ranks
        others = ", ".join(str(ranks[index]) for index in different)
        raise UnequalReplicas(
            f"stage {replica.stage.index} has other weights on rank {others} than on rank {ranks[0]} {when}"
        )
