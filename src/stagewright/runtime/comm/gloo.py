"""Where transports and collectives come from: torch.distributed between processes, or memory within one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from stagewright.runtime.comm.channel import POSTED_AHEAD, ChannelName, Network
from stagewright.runtime.comm.device import Device, Gpu
from stagewright.runtime.comm.message import Courier, HostMessage, Layout, Message, StagedMessage
from stagewright.runtime.comm.transport import AllOf, Alone, Collective, Pending, Place, Transport
from stagewright.runtime.comm.unix_socket import StreamTransport, connect

_GPU_THREADS = 4  # that stage and sum pieces of a gradient, and as many that move them
_PIECE_BYTES = 8 * 2**20


class GlooNetwork:
    """Process groups over TCP: one a channel, one a collective, all on one interface.

    Tensors on a GPU are summed by gloo itself, which stages them; messages are staged by us, since gloo sends host
    memory alone.
    """

    posted_ahead = POSTED_AHEAD

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
