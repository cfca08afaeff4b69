"""The network between processes: messages and sums over gloo; on one machine sums go through shared memory.

Small messages of one machine go through Unix sockets: with near-empty stages, messages over gloo take about half of a
microbatch's time; a socket needs one system call at each end. Large messages stay with gloo, whose thread copies while
this one computes.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from stagewright.runtime.comm.channel import ChannelName, Network
from stagewright.runtime.comm.device import Device, Gpu
from stagewright.runtime.comm.message import HostMessage, Message, MessageFormat, StagedMessage
from stagewright.runtime.comm.shared_memory import connect_sums
from stagewright.runtime.comm.transport import AllOf, Collective, Done, LostPeer, Pending, Place, Transport
from stagewright.runtime.comm.unix_socket import connect_two

_GPU_THREADS = 4  # that stage and sum pieces of a gradient, and as many that move them
_PIECE_BYTES = 8 * 2**20
_SOCKET_BYTES = 128 * 2**10  # that a socket holds for certain; Linux gives it 208 KiB
_KERNEL_BYTES = 1024  # the kernel's overhead per message; it also rounds sizes up, at most to twice
_DONE = Done()


class GlooNetwork(Network):
    """Process groups over TCP, one per channel and one per collective of several machines, all on one interface.

    Gloo sums tensors on a GPU by staging them; messages are staged here, since gloo sends only host memory.
    """

    def __init__(self, store: Store, rank: int, place: Place, timeout: float, device: Device | None = None) -> None:
        self._torch_store = store
        self._rank = rank
        self._place = place
        self._timeout = timedelta(seconds=timeout)
        self._gpu = device if isinstance(device, Gpu) else None
        self._device = ProcessGroupGloo.create_device(hostname=place.address)
        self._copies = ThreadPoolExecutor(1, "copies") if self._gpu else None
        self.store = PrefixStore("format", store)

    def message(self, message_format: MessageFormat) -> Message:
        if self._gpu is None or self._copies is None:
            return HostMessage(message_format)
        return StagedMessage(message_format, self._gpu, self._copies)

    def transport(self, name: ChannelName, window: int) -> Transport:
        gloo = PairTransport(self._group(str(name), (name.source, name.target), [self._device]))
        if not all(map(self._place.is_local, (name.source, name.target))):
            return gloo
        store = PrefixStore(f"socket/{name}", self._torch_store)
        try:
            stream = connect_two(store, self._rank == name.source, self._timeout)
        except (OSError, RuntimeError, ValueError) as error:  # a message without content: the other one ended
            raise LostPeer(f"no connection for channel {name}: {error}") from error
        return SocketTransport(stream, gloo, window)

    def connect(self, name: str, ranks: Sequence[int]) -> Collective:
        if all(map(self._place.is_local, ranks)):
            store = PrefixStore(f"memory/{name}", self._torch_store)
            return connect_sums(store, ranks, self._rank, self._timeout, self._gpu)
        return _GlooCollective(self._group(name, ranks, self._for_sums))

    @cached_property
    def _for_sums(self) -> list[Any]:
        if self._gpu is None:
            return [self._device]
        # Cores are free, and large sums must not hold up messages.
        return [ProcessGroupGloo.create_device(hostname=self._place.address) for _ in range(_GPU_THREADS)]

    def _group(self, name: str, ranks: Sequence[int], devices: Sequence[Any]) -> Any:
        # Private in torch, but the public constructor takes only a timeout, and would listen on an interface of its own
        # choice (GLOO_SOCKET_IFNAME or the host's name) with its own number of threads.
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = list(devices)
        options._threads = 1 if self._gpu is None else _GPU_THREADS
        options._timeout = self._timeout
        store = PrefixStore(name, self._torch_store)
        try:
            return ProcessGroupGloo(store, ranks.index(self._rank), len(ranks), options)
        except RuntimeError as error:  # another rank has ended or was stopped while they were connecting
            raise LostPeer.because(error) from error


class PairTransport:
    """A process group of two, of gloo or NCCL, whose first member is the sender."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, buffer: Tensor) -> Pending:
        sending: Pending = self._group.send([buffer], 1, 0)
        return sending

    def receive(self, buffer: Tensor) -> Pending:
        receiving: Pending = self._group.recv([buffer], 0, 0)
        return receiving


class _GlooCollective:
    """Sums over gloo; a large tensor on a GPU in pieces, so that one is summed while others are copied."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def sum(self, tensor: Tensor) -> Pending:
        if tensor.is_cuda and tensor.nbytes > _PIECE_BYTES:
            pieces = torch.split(tensor, _PIECE_BYTES // tensor.itemsize)
            return AllOf([self._group.allreduce([piece]) for piece in pieces])
        summing: Pending = self._group.allreduce([tensor])
        return summing


class SocketTransport:
    """Sends over a socket what fits into its buffer `window` times, so that a send never waits; the rest over gloo.

    Both ends know a message's size before they send or receive it, so they choose the same way.
    """

    def __init__(self, stream: socket.socket, large: Transport, window: int) -> None:
        self._stream = stream
        self._large = large
        self.largest = (_SOCKET_BYTES // window - _KERNEL_BYTES) // 2  # bytes of a message over the socket

    def send(self, buffer: Tensor) -> Pending:
        if buffer.nbytes > self.largest:
            return self._large.send(buffer)
        try:
            self._stream.sendall(buffer.numpy().data)
        except OSError as error:
            raise RuntimeError(f"the other rank is gone ({error.strerror})") from error
        return _DONE

    def receive(self, buffer: Tensor) -> Pending:
        if buffer.nbytes > self.largest:
            return self._large.receive(buffer)
        return _SocketReceive(self._stream, buffer.numpy().data)


class _SocketReceive:
    """A receive that reads when it is polled or waited for; until then the kernel keeps the message."""

    def __init__(self, stream: socket.socket, rest: memoryview) -> None:
        self._stream = stream
        self._rest = rest

    def is_completed(self) -> bool:
        if self._rest:
            try:
                self._read(socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
        return not self._rest

    def wait(self) -> None:
        while self._rest:
            try:
                self._read(socket.MSG_WAITALL)
            except BlockingIOError:
                raise RuntimeError("no message from the other rank within the timeout") from None

    def _read(self, flags: int) -> None:
        try:
            size = self._stream.recv_into(self._rest, len(self._rest), flags)
        except ConnectionError as error:
            raise RuntimeError(f"the other rank is gone ({error.strerror})") from error
        if not size:
            raise RuntimeError("the other rank is gone (its socket is closed)")
        self._rest = self._rest[size:]
