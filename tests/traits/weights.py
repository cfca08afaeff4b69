"""Traits of weights that forward makes from others."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, relu
from torch.nn.utils import parametrizations, parametrize

from tests.traits.trait import IMAGE, WIDTH, Images, Stack, on_blocks, trait

on_blocks("weight_norm by hook")(lambda block: nn.utils.weight_norm(block.linear))
on_blocks("weight_norm by parametrization")(lambda block: parametrizations.weight_norm(block.linear))
on_blocks("spectral_norm by hook")(lambda block: nn.utils.spectral_norm(block.linear))
on_blocks("spectral_norm by parametrization")(lambda block: parametrizations.spectral_norm(block.linear))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


on_blocks("a parametrization of its own")(
    lambda block: parametrize.register_parametrization(block.linear, "weight", Symmetric())
)


@trait("weights standardized in forward", sample=IMAGE)
class Standardized(Images):
    class Standard(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            weight = weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
            return relu(conv2d(x, weight, self.bias, padding=1))

    def block(self, index: int, channels: int) -> nn.Module:
        return self.Standard(channels, 4, 3)


@trait("product of two weights")
class LowRank(Stack):
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(WIDTH, 3) * 0.3)
            self.b = nn.Parameter(torch.randn(3, WIDTH) * 0.3)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(x @ (self.a @ self.b))

    def block(self, index: int) -> nn.Module:
        return self.Product()
