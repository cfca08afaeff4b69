"""Ranks with a GPU each: messages and sums by NCCL, device memory to device memory.

NCCL has no tags, runs what it is given in order, and a receive occupies the GPU until its message comes. So there is a
communicator for each channel: a message never waits behind one of the other direction, and both ends issue a channel's
messages in the one order that the checker has proven. A channel has one receive posted at a time."""

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
from stagewright.runtime.comm.message import DirectMessage, Layout, Message
from stagewright.runtime.comm.transport import LOOPBACK, Alone, Collective, Pending, Place, Transport


def uses_nccl(config: Config) -> bool:
    """Whether ranks talk by NCCL: where each has a GPU of its own."""
    run = config.run
    return run.device == "cuda" and not run.share_gpu and run.backend != "gloo"


def open_network(config: Config, store: Store, rank: int, place: Place, timeout: float, device: Device) -> Network:
    """What connects a rank to the others."""
    if uses_nccl(config) and isinstance(device, Gpu):
        return NcclNetwork(store, rank, place, timeout, device)
    return GlooNetwork(store, rank, place, timeout, device)


class NcclNetwork:
    """A communicator a channel and a collective, made in one order by all; small things on the host go by gloo."""

    posted_ahead = 1

    def __init__(self, store: Store, rank: int, place: Place, timeout: float, gpu: Gpu) -> None:
        self._store = PrefixStore("nccl", store)
        self._rank = rank
        self._gpu = gpu
        self._timeout = timedelta(seconds=timeout)
        self.host = GlooNetwork(store, rank, place, timeout)
        self.bulletin = self.host.bulletin
        if place.address == LOOPBACK:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # else it listens on the first interface it finds

    def message(self, layout: Layout) -> Message:
        return DirectMessage(layout, self._gpu, own_streams=True)

    def transport(self, name: ChannelName, window: int) -> Transport:
        return PairTransport(self.group(str(name), (name.source, name.target)))

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        if len(ranks) == 1:
            return Alone()
        return NcclCollective(self.group(name, ranks), self.host.collective(name, ranks))

    def group(self, name: str, ranks: Sequence[int]) -> Any:
        """A communicator, connected at once: every rank makes its own in the same order, so none waits for ever."""
        options = torch.distributed.ProcessGroupNCCL.Options()  # absent from CPU builds of torch
        options._timeout = self._timeout
        store = PrefixStore(name, self._store)
        group = torch.distributed.ProcessGroupNCCL(store, ranks.index(self._rank), len(ranks), options)
        group.eager_connect_single_device(self._gpu.device)
        return group


class NcclCollective:
    """Sums on the GPU by NCCL, and what lies on the host by gloo."""

    def __init__(self, group: Any, host: Collective) -> None:
        self._group = group
        self._host = host

    def sum(self, tensor: Tensor) -> Pending:
        if not tensor.is_cuda:
            return self._host.sum(tensor)
        summing: Pending = self._group.allreduce([tensor])
        return summing
