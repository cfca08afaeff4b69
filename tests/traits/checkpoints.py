"""Traits of activation checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.traits.trait import CLASSES, OR_REFUSED, WIDTH, Block, Stack, forward, step, trait

step("non-reentrant checkpoints")(lambda self, block, x: checkpoint(block, x, use_reentrant=False))
step("reentrant checkpoints", notes="no block trains: nothing that enters one needs a gradient")(
    lambda self, block, x: checkpoint(block, x, use_reentrant=True)
)


@trait("reentrant checkpoints behind a layer")
class ReentrantBehind(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


@trait("checkpoint_sequential", expected=OR_REFUSED)
class CheckpointSequential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint_sequential(self.layers, 2, self.stem(x), use_reentrant=False))


@trait("checkpoints with dropout", draws=True)
class CheckpointedDropout(Stack):
    class Dropped(Block):
        def forward(self, x: Tensor) -> Tensor:
            return dropout(super().forward(x), 0.2, self.training)

    def block(self, index: int) -> nn.Module:
        return self.Dropped()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@forward("checkpoint of a function", expected=OR_REFUSED)
def checkpointed_function(self, x):
    def pair(x: Tensor, index: int) -> Tensor:
        return self.blocks[index + 1](self.blocks[index](x))

    for index in (0, 2):
        x = checkpoint(pair, x, index, use_reentrant=False)
    return self.head(x)


step("checkpoints in training alone")(
    lambda self, block, x: (
        checkpoint(block, x, use_reentrant=False) if self.training and torch.is_grad_enabled() else block(x)
    )
)
