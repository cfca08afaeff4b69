"""Traits of random numbers, in forward and in the factory."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from tests.traits.trait import OR_REFUSED, WIDTH, Block, Stack, through_blocks, trait


class _Dropping(Stack):
    """Layers are left out at random."""

    def is_dropped(self) -> bool:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and self.is_dropped():
                continue
            x = block(x)
        return self.head(x)


@trait("layerdrop by torch", draws=True, expected=OR_REFUSED)
class LayerDropTorch(_Dropping):
    def is_dropped(self) -> bool:
        return torch.rand(()).item() < 0.3


@trait("layerdrop by a torch comparison", draws=True, expected=OR_REFUSED)
class LayerDropComparison(_Dropping):
    def is_dropped(self) -> bool:
        return bool(torch.rand(1) < 0.3)


@trait("layerdrop by random", draws=True, expected=OR_REFUSED)
class LayerDropRandom(_Dropping):
    def is_dropped(self) -> bool:
        return random.random() < 0.3


@trait("layerdrop by numpy", draws=True, expected=OR_REFUSED)
class LayerDropNumpy(_Dropping):
    def is_dropped(self) -> bool:
        return np.random.uniform() < 0.3


@trait("layerdrop inside a block", draws=True, notes="every block can decide for itself, so it can be cut")
class LayerDropInside(Stack):
    class Dropped(Block):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and torch.rand(()).item() < 0.3:
                return x
            return super().forward(x)

    def block(self, index: int) -> nn.Module:
        return self.Dropped()


class _Noisy(Stack):
    def noise(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.training:
                x = x + 0.1 * self.noise(x)
        return self.head(x)


@trait("noise by randn of a fixed shape", draws=True)
class NoiseFixed(_Noisy):
    def noise(self, x: Tensor) -> Tensor:
        return torch.randn(WIDTH)


@trait("noise by randn of a shape", draws=True)
class NoiseShape(_Noisy):
    def noise(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape, dtype=x.dtype, device=x.device)


@trait("noise by randn of sizes", draws=True)
class NoiseSizes(_Noisy):
    def noise(self, x: Tensor) -> Tensor:
        return torch.rand(x.shape[0], 1, dtype=x.dtype)


@trait("noise by randn_like", draws=True)
class NoiseLike(_Noisy):
    def noise(self, x: Tensor) -> Tensor:
        return torch.randn_like(x)


@trait("noise by filling in place", draws=True)
class NoiseInPlace(_Noisy):
    def noise(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype).normal_() + x.new_empty(WIDTH).uniform_()


@trait("noise by bernoulli and randperm", draws=True)
class NoiseKinds(_Noisy):
    def noise(self, x: Tensor) -> Tensor:
        kept = torch.bernoulli(torch.full((WIDTH,), 0.5, dtype=x.dtype))
        return kept * x[:, torch.randperm(WIDTH)] + torch.normal(0.0, 1.0, (WIDTH,), dtype=x.dtype)


@trait("noise by numpy", draws=True, expected=OR_REFUSED)
class NoiseNumpy(_Noisy):
    def noise(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.random.randn(WIDTH)).to(x.dtype)


@trait("noise by random", draws=True, expected=OR_REFUSED)
class NoiseRandom(_Noisy):
    def noise(self, x: Tensor) -> Tensor:
        return random.gauss(0, 1) * x


@trait("a generator of its own", draws=True, expected=OR_REFUSED, notes="its state is none of the run's seeds")
class OwnGenerator(_Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def noise(self, x: Tensor) -> Tensor:
        return torch.randn(WIDTH, generator=self.generator, dtype=torch.float64).to(x.dtype)


@trait("a numpy generator of its own", draws=True, expected=OR_REFUSED)
class OwnNumpyGenerator(_Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(1)

    def noise(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.generator.normal(size=WIDTH)).to(x.dtype)


@trait("functional dropout", draws=True)
class FunctionalDropout(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = dropout(block(x), 0.2, self.training)
        return self.head(x)


@trait("dropout that never stops", draws=True, notes="F.dropout with its default training=True, also in evaluation")
class AlwaysDropout(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(0 * dropout(through_blocks(self, x), 0.2) + through_blocks(self, x))


@trait("numpy and random in the factory")
def random_factory() -> nn.Module:
    model = Stack()
    for block in model.blocks:
        values = np.random.randn(WIDTH, WIDTH) * random.uniform(0.1, 0.3)
        block.linear.weight.data.copy_(torch.from_numpy(values))  # type: ignore[union-attr, arg-type, operator]
    return model
