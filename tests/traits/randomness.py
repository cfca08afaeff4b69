"""Traits of random numbers, in forward and in the factory."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from tests.traits.trait import OR_REFUSED, WIDTH, Block, Stack, forward, inside, overriding, step, through_blocks, trait


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


dropped = overriding(_Dropping, "is_dropped")


dropped("layerdrop by torch", draws=True, expected=OR_REFUSED)(lambda self: torch.rand(()).item() < 0.3)
dropped("layerdrop by a torch comparison", draws=True, expected=OR_REFUSED)(lambda self: bool(torch.rand(1) < 0.3))
dropped("layerdrop by random", draws=True, expected=OR_REFUSED)(lambda self: random.random() < 0.3)
dropped("layerdrop by numpy", draws=True, expected=OR_REFUSED)(lambda self: np.random.uniform() < 0.3)


@inside("layerdrop inside a block", draws=True, notes="every block can decide for itself, so it can be cut")
def layer_drop_inside(self, x):
    if self.training and torch.rand(()).item() < 0.3:
        return x
    return Block.forward(self, x)


class _Noisy(Stack):
    def noise(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.training:
                x = x + 0.1 * self.noise(x)
        return self.head(x)


noise = overriding(_Noisy, "noise")


noise("noise by randn of a fixed shape", draws=True)(lambda self, x: torch.randn(WIDTH))
noise("noise by randn of a shape", draws=True)(lambda self, x: torch.randn(x.shape, dtype=x.dtype, device=x.device))
noise("noise by randn of sizes", draws=True)(lambda self, x: torch.rand(x.shape[0], 1, dtype=x.dtype))
noise("noise by randn_like", draws=True)(lambda self, x: torch.randn_like(x))
noise("noise by filling in place", draws=True)(
    lambda self, x: torch.empty(x.shape, dtype=x.dtype).normal_() + x.new_empty(WIDTH).uniform_()
)


@noise("noise by bernoulli and randperm", draws=True)
def noise_kinds(self, x):
    kept = torch.bernoulli(torch.full((WIDTH,), 0.5, dtype=x.dtype))
    return kept * x[:, torch.randperm(WIDTH)] + torch.normal(0.0, 1.0, (WIDTH,), dtype=x.dtype)


noise("noise by numpy", draws=True, expected=OR_REFUSED)(
    lambda self, x: torch.from_numpy(np.random.randn(WIDTH)).to(x.dtype)
)
noise("noise by random", draws=True, expected=OR_REFUSED)(lambda self, x: random.gauss(0, 1) * x)


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


step("functional dropout", draws=True)(lambda self, block, x: dropout(block(x), 0.2, self.training))


forward("dropout that never stops", draws=True, notes="F.dropout with its default training=True, also in evaluation")(
    lambda self, x: self.head(0 * dropout(through_blocks(self, x), 0.2) + through_blocks(self, x))
)


@trait("numpy and random in the factory")
def random_factory() -> nn.Module:
    model = Stack()
    for block in model.blocks:
        values = np.random.randn(WIDTH, WIDTH) * random.uniform(0.1, 0.3)
        block.linear.weight.data.copy_(torch.from_numpy(values))  # type: ignore[union-attr, arg-type, operator]
    return model
