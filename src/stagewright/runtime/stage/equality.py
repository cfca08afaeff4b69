"""Replicas of a stage, and homes of a tied parameter, hold the same weights.

They are made so before the first step, and compared then and at every checkpoint.

A factory that draws numbers of its own, or reads a clock, builds another model in every process.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from stagewright.runtime.comm.transport import Pending
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
        is_first = replica.statistics.replica == 0
        for tensor in _everything(replica):
            bytes_held = tensor.contiguous().flatten().view(torch.uint8).clone()
            yield replica.statistics.collective.sum(bytes_held if is_first else bytes_held.zero_())
            with torch.no_grad():
                tensor.copy_(bytes_held.view(tensor.dtype).view(tensor.shape))
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
    own = [(replicas[stage], index) for stage, index in parameter.places.items()]

    def values() -> list[Tensor]:
        masters = [(replica.ring.master, replica.ring.parameters[index]) for replica, index in own]
        return [master[held.offset : held.end] for master, held in masters]

    hashes = yield from _exchange_homes(parameter, rank, values())
    if batch is None and _different(hashes):
        is_first = rank == parameter.ranks[0]
        given = values()[0].view(torch.uint8).clone()
        yield parameter.collective.sum(given if is_first else given.zero_())
        with torch.no_grad():
            for tensor in values():
                tensor.copy_(given.view(tensor.dtype))
        for replica, _ in own:
            replica.restart_versions()
        hashes = yield from _exchange_homes(parameter, rank, values())
    if different := _different(hashes):
        others = ", ".join(str(parameter.ranks[index]) for index in different)
        when = "before the first step" if batch is None else f"at batch {batch}"
        raise UnequalReplicas(
            f"tied parameter '{parameter.name}' of stages {', '.join(map(str, parameter.homes))} has other values "
            f"on rank {others} than on rank {parameter.ranks[0]} {when}"
        )


def _exchange_homes(parameter: TiedHere, rank: int, values: Sequence[Tensor]) -> Generator[Pending, None, Tensor]:
    """The hashes of all ranks: a row each; homes on one rank are compared there."""
    rows = torch.zeros(len(parameter.ranks), 4, dtype=torch.float64)
    hashes = [hash_of([value]) for value in values]
    unequal = not all(torch.equal(found, hashes[0]) for found in hashes)
    rows[parameter.ranks.index(rank)] = torch.full((4,), -1.0 - rank, dtype=torch.float64) if unequal else hashes[0]
    yield parameter.collective.sum(rows)
    return rows


def _everything(replica: Replica) -> list[Tensor]:
    """The weights of a stage, and what is not trained."""
    held = replica.piece.training
    trained = {id(leaf) for slot in replica.ring.slots for leaf in slot.leaves}
    trained |= {id(leaf) for leaf in replica.ring.use_master().leaves}
    frozen = [parameter.detach() for parameter in held.parameters() if id(parameter) not in trained]
    return [replica.ring.master, *frozen, *(buffer.detach() for buffer in held.buffers())]


def _exchange(replica: Replica, tensors: Iterable[Tensor]) -> Generator[Pending, None, Tensor]:
    """The hashes of all replicas: a row each."""
    statistics = replica.statistics
    rows = torch.zeros(replica.stage.replicas, 4, dtype=torch.float64)
    rows[statistics.replica] = hash_of(tensors)
    yield statistics.collective.sum(rows)
    return rows


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
