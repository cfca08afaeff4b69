"""The network between GPUs, one per rank: messages and sums over NCCL, from device memory to device memory.

NCCL has no tags, runs operations in launch order, and a receive occupies the GPU until its message arrives. So each
channel has its own communicator: a message never waits behind one of the other direction, and both ends launch a
channel's messages in the one order that the checker has proven. A channel keeps one receive posted.

All operations but that receive are launched in the order of the program, so a launch queue of one place more than a
rank has streams never hangs; `tests/nccl_like.py` replays runs by these rules.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from stagewright.config.sections import Config
from stagewright.runtime.comm.channel import ChannelName, Network
from stagewright.runtime.comm.device import Device, Gpu
from stagewright.runtime.comm.gloo import GlooNetwork, PairTransport
from stagewright.runtime.comm.message import DirectMessage, Message, MessageFormat
from stagewright.runtime.comm.transport import LOOPBACK, Collective, Pending, Place, Transport


def uses_nccl(config: Config) -> bool:
    """Whether ranks communicate over NCCL, which needs a separate GPU for each."""
    run = config.run
    return run.device == "cuda" and not run.share_gpu and run.backend != "gloo"


def open_network(config: Config, store: Store, rank: int, place: Place, timeout: float, device: Device) -> Network:
    """The network that connects a rank to the others."""
    if uses_nccl(config) and isinstance(device, Gpu):
        return NcclNetwork(store, rank, place, timeout, device)
    return GlooNetwork(store, rank, place, timeout, device)


class NcclNetwork(Network):
    """A communicator per channel and collective, opened in one order by all ranks; host memory travels as in `gloo`."""

    posted_ahead = 1

    def __init__(self, store: Store, rank: int, place: Place, timeout: float, gpu: Gpu) -> None:
        self._torch_store = PrefixStore("nccl", store)
        self._rank = rank
        self._gpu = gpu
        self._timeout = timedelta(seconds=timeout)
        self._host = GlooNetwork(store, rank, place, timeout)
        self.store = self._host.store
        if place.address == LOOPBACK:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # otherwise it listens on the first interface it finds

    def message(self, message_format: MessageFormat) -> Message:
        return DirectMessage(message_format, self._gpu, own_streams=True)

    def transport(self, name: ChannelName, window: int) -> Transport:
        return PairTransport(self.group(str(name), (name.source, name.target)))

    @property
    def host(self) -> Network:
        return self._host

    def connect(self, name: str, ranks: Sequence[int]) -> Collective:
        return NcclCollective(self.group(name, ranks), self.host.collective(name, ranks))

    def group(self, name: str, ranks: Sequence[int]) -> Any:
        """A connected communicator; every rank opens them in the same order, so that none waits for ever."""
        options = torch.distributed.ProcessGroupNCCL.Options()  # absent from CPU builds of torch
        options._timeout = self._timeout
        store = PrefixStore(name, self._torch_store)
        group = torch.distributed.ProcessGroupNCCL(store, ranks.index(self._rank), len(ranks), options)
        group.eager_connect_single_device(self._gpu.device)
        return group


class NcclCollective:
    """Sums tensors on the GPU over NCCL, and those on the host as `gloo` does."""

    def __init__(self, group: Any, host: Collective) -> None:
        self._group = group
        self._host = host

    def sum(self, tensor: Tensor) -> Pending:
        if not tensor.is_cuda:
            return self._host.sum(tensor)
        summing: Pending = self._group.allreduce([tensor])
        return summing
