"""A stage's weights on their way to the first machine, where they are exported."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import load, save
from torch import Tensor

from stagewright.plan.plan import Plan, Stage
from stagewright.runtime.network import ChannelName, Network

_PIECE = 64 << 20  # bytes


def is_far(plan: Plan, stage: Stage) -> bool:
    """Whether a stage's first replica is on another machine than rank 0."""
    return plan.devices[stage.ranks[0]].machine != plan.devices[0].machine


def send_state(network: Network, stage: Stage, state: Mapping[str, Tensor]) -> None:
    """Send a stage's weights to rank 0, which must receive them."""
    content = torch.frombuffer(bytearray(save(dict(state))), dtype=torch.uint8)
    name = _channel(stage)
    network.bulletin.post(str(name), str(len(content)))
    transport = network.transport(name, 1)
    for piece in torch.split(content, _PIECE):
        transport.send(piece).wait()


def receive_state(network: Network, stage: Stage) -> dict[str, Tensor]:
    """The weights that a stage's first replica sends."""
    name = _channel(stage)
    transport = network.transport(name, 1)
    content = torch.empty(int(network.bulletin.read(str(name))), dtype=torch.uint8)
    for piece in torch.split(content, _PIECE):
        transport.receive(piece).wait()
    return load(content.numpy().tobytes())


def _channel(stage: Stage) -> ChannelName:
    return ChannelName("state", stage.index, stage.ranks[0], 0)
