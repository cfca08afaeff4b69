"""Traits of models that differ in training and evaluation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import softmax

from tests.traits.trait import CLASSES, IMAGE, OR_REFUSED, WIDTH, Block, Images, Stack, forward, through_blocks, trait


@forward("another path in evaluation")
def other_evaluation(self, x):
    for block in self.blocks:
        x = block(x) if self.training else torch.tanh(block(x))
    return self.head(x) if self.training else softmax(self.head(x), 1)


@forward("fewer blocks in evaluation", expected=OR_REFUSED)
def fewer_in_evaluation(self, x):
    for block in self.blocks if self.training else self.blocks[:2]:  # type: ignore[attr-defined]
        x = block(x)
    return self.head(x)


@trait("another head in evaluation", expected=OR_REFUSED)
class OtherHead(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = through_blocks(self, x)
        return self.head(x) + self.other(x) if self.training else self.other(x)


@trait("frozen BatchNorm by train()", sample=IMAGE)
class FrozenNorms(Images):
    def train(self, mode: bool = True) -> FrozenNorms:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


@trait("a block that is always in training", draws=True)
class AlwaysTraining(Stack):
    class Stubborn(Block):
        def train(self, mode: bool = True) -> AlwaysTraining.Stubborn:
            return super().train(True)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1.0 if self.training else 3.0)

    def block(self, index: int) -> nn.Module:
        return self.Stubborn()


@trait("train() that counts", expected=OR_REFUSED)
class CountingTrain(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def train(self, mode: bool = True) -> CountingTrain:
        self.calls = getattr(self, "calls", 0) + 1
        return super().train(mode)
