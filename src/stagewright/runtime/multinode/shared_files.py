"""Checkpoints of several machines lie in the run folder of the first, which the others must see too.

machine 0: runs/A/checkpoints/        machine 1: runs/B/checkpoints ─► runs/A/checkpoints A stage's weights on their way to the first machine, where they are exported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed import Store

from stagewright.plan.plan import Plan, Stage
from stagewright.runtime.checkpoint.folder import checkpoints_folder
from stagewright.runtime.comm.channel import ChannelName, Network

_KEY = "folder"
_MARK = ".session"


def announce_folder(store: Store, folder: Path, session: str) -> None:
    """Tell where the run folder is, and leave a mark in it by which it is known."""
    checkpoints_folder(folder).mkdir(exist_ok=True)
    (checkpoints_folder(folder) / _MARK).write_text(session)
    store.set(_KEY, json.dumps(str(folder)))


def link_checkpoints(store: Store, folder: Path, session: str) -> bool:
    """Have this machine's checkpoints in the run folder of the first; whether it is the same folder from here."""
    there, here = checkpoints_folder(Path(json.loads(store.get(_KEY)))), checkpoints_folder(folder)
    try:
        if (there / _MARK).read_text() != session:
            return False
        if not here.is_symlink():
            here.symlink_to(there, target_is_directory=True)
    except OSError:
        return False
    return True


_PIECE = 64 << 20  # bytes


def is_remote(plan: Plan, stage: Stage) -> bool:
    """Whether a stage's first replica is on another machine than rank 0."""
    return plan.devices[stage.ranks[0]].machine != plan.devices[0].machine


def send_weights(network: Network, stage: Stage, state: Mapping[str, Tensor]) -> None:
    """Send a stage's weights to rank 0, which must receive them."""
    content = torch.frombuffer(bytearray(save(dict(state))), dtype=torch.uint8)
    name = _channel(stage)
    network.store.set(str(name), str(len(content)))
    transport = network.transport(name, 1)
    for piece in torch.split(content, _PIECE):
        transport.send(piece).wait()


def receive_weights(network: Network, stage: Stage) -> dict[str, Tensor]:
    """The weights that a stage's first replica sends."""
    name = _channel(stage)
    transport = network.transport(name, 1)
    content = torch.empty(int(network.store.get(str(name))), dtype=torch.uint8)
    for piece in torch.split(content, _PIECE):
        transport.receive(piece).wait()
    return load(content.numpy().tobytes())


def _channel(stage: Stage) -> ChannelName:
    return ChannelName("state", stage.index, stage.ranks[0], 0)
