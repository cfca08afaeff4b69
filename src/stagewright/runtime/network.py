"""Where transports and collectives come from: torch.distributed between processes, or memory within one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from stagewright.plan.plan import Plan
from stagewright.runtime.channels import Bulletin, MemoryTransport
from stagewright.runtime.device import Device, Gpu
from stagewright.runtime.messages import Courier, DirectMessage, HostMessage, Layout, Message, StagedMessage
from stagewright.runtime.pending import AllOf, Pending, Transport
from stagewright.runtime.place import Place
from stagewright.runtime.reduce import Alone, Collective, MemoryCollective
from stagewright.runtime.stream import StreamTransport, connect

_GPU_THREADS = 4  # that stage and sum pieces of a gradient, and as many that move them
_PIECE_BYTES = 8 * 2**20
_POSTED_AHEAD = 2  # one more than is needed to never be late


@dataclass(frozen=True, slots=True, order=True)
class ChannelName:
    """One direction of one boundary between one pair of ranks."""

    kind: str  # act or grad
    stage: int  # that sends
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.kind}/{self.stage}/{self.source}-{self.target}"


def channels_of(plan: Plan) -> Iterator[ChannelName]:
    """Every channel a plan uses, in the one order in which all ranks make them."""
    for before, behind in zip(plan.stages, plan.stages[1:], strict=False):
        pairs = {
            (a, b) for a in before.ranks for b in behind.ranks if a != b and _meet(before.ranks, behind.ranks, a, b)
        }
        for source, target in sorted(pairs):
            yield ChannelName("act", before.index, source, target)
            yield ChannelName("grad", behind.index, target, source)


def _meet(before: Sequence[int], behind: Sequence[int], source: int, target: int) -> bool:
    """Whether some microbatch runs on both ranks: i mod r and i mod r' can be any pair that agrees mod their gcd."""
    common = math.gcd(len(before), len(behind))
    return before.index(source) % common == behind.index(target) % common


class Network(Protocol):
    """What connects the ranks of a job."""

    @property
    def bulletin(self) -> Bulletin: ...

    @property
    def posted_ahead(self) -> int:
        """Receives that a channel has waiting."""
        ...

    def transport(self, name: ChannelName, window: int) -> Transport:
        """A channel's way, on which no more than `window` messages are under way in training."""
        ...

    def collective(self, name: str, ranks: Sequence[int]) -> Collective: ...

    def message(self, layout: Layout) -> Message:
        """Memory that the transports can move."""
        ...

    @property
    def host(self) -> Network:
        """What moves memory of the host."""
        ...


class GlooNetwork:
    """Process groups over TCP: one a channel, one a collective, all on one interface.

    Tensors on a GPU are summed by gloo itself, which stages them; messages are staged by us, since gloo sends host
    memory alone.
    """

    posted_ahead = _POSTED_AHEAD

    def __init__(self, store: Store, rank: int, place: Place, timeout: float, device: Device | None = None) -> None:
        self._store = store
        self._rank = rank
        self._place = place
        self._timeout = timedelta(seconds=timeout)
        self._gpu = device if isinstance(device, Gpu) else None
        self._device = ProcessGroupGloo.create_device(hostname=place.address)
        self._for_sums = [self._device]
        if self._gpu is not None:  # cores are free, and large sums must not hold up messages
            self._for_sums = [ProcessGroupGloo.create_device(hostname=place.address) for _ in range(_GPU_THREADS)]
        self._courier = Courier() if self._gpu else None
        self.bulletin = StoreBulletin(PrefixStore("layout", store))

    @property
    def host(self) -> Network:
        return self

    def message(self, layout: Layout) -> Message:
        if self._gpu is None or self._courier is None:
            return HostMessage(layout)
        return StagedMessage(layout, self._gpu, self._courier)

    def transport(self, name: ChannelName, window: int) -> Transport:
        gloo = PairTransport(self._group(str(name), (name.source, name.target), [self._device]))
        if not all(map(self._place.is_beside, (name.source, name.target))):
            return gloo
        store = PrefixStore(f"stream/{name}", self._store)
        return StreamTransport(connect(store, self._rank == name.source, self._timeout), gloo, window)

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        return _GlooCollective(self._group(name, ranks, self._for_sums)) if len(ranks) > 1 else Alone()

    def _group(self, name: str, ranks: Sequence[int], devices: Sequence[Any]) -> Any:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = list(devices)
        options._threads = 1 if self._gpu is None else _GPU_THREADS
        options._timeout = self._timeout
        store = PrefixStore(name, self._store)
        return ProcessGroupGloo(store, ranks.index(self._rank), len(ranks), options)


class StoreBulletin:
    """Texts in torch's store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def post(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def read(self, key: str) -> str:
        return self._store.get(key).decode()

    def has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def drop(self, key: str) -> None:
        self._store.delete_key(key)


class PairTransport:
    """A group of two, of gloo or NCCL: the sender is its first member."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, buffer: Tensor) -> Pending:
        sending: Pending = self._group.send([buffer], 1, 0)
        return sending

    def receive(self, buffer: Tensor) -> Pending:
        receiving: Pending = self._group.recv([buffer], 0, 0)
        return receiving


class _GlooCollective:
    """Sums by gloo; what lies on a GPU in pieces, so that one is summed while others are copied to and fro."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def sum(self, tensor: Tensor) -> Pending:
        if tensor.is_cuda and tensor.nbytes > _PIECE_BYTES:
            pieces = torch.split(tensor, _PIECE_BYTES // tensor.itemsize)
            return AllOf([self._group.allreduce([piece]) for piece in pieces])
        summing: Pending = self._group.allreduce([tensor])
        return summing


@dataclass
class Memory:
    """What the ranks of an emulated job share."""

    transports: dict[ChannelName, MemoryTransport] = field(default_factory=dict)
    boards: dict[str, dict[int, list[Tensor | None]]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


class MemoryNetwork:
    """One rank's view of the memory that all share."""

    posted_ahead = _POSTED_AHEAD

    def __init__(self, memory: Memory, rank: int, device: Device | None = None) -> None:
        self._memory = memory
        self._rank = rank
        self._gpu = device if isinstance(device, Gpu) else None
        self.bulletin = DictBulletin(memory.texts)

    @property
    def host(self) -> Network:
        return self

    def message(self, layout: Layout) -> Message:
        return HostMessage(layout) if self._gpu is None else DirectMessage(layout, self._gpu, own_streams=False)

    def transport(self, name: ChannelName, window: int) -> Transport:
        return self._memory.transports.setdefault(name, MemoryTransport())

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        if len(ranks) == 1:
            return Alone()
        return MemoryCollective(self._memory.boards.setdefault(name, {}), ranks.index(self._rank), len(ranks))


class DictBulletin:
    """Texts in a dictionary."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def post(self, key: str, text: str) -> None:
        self._texts[key] = text

    def read(self, key: str) -> str:
        return self._texts[key]

    def has(self, key: str) -> bool:
        return key in self._texts

    def drop(self, key: str) -> None:
        self._texts.pop(key, None)
