"""Traits of what takes part in backward, and how."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gumbel_softmax

from tests.traits.trait import OR_REFUSED, WIDTH, Block, Stack, forward, inside, step, trait


@inside("no_grad in a block")
def no_grad_inside(self, x):
    with torch.no_grad():
        scale = 1 + x.abs().mean(1, keepdim=True)
    return Block.forward(self, x) / scale


@forward("no_grad around blocks")
def no_grad_around(self, x):
    with torch.no_grad():
        x = self.blocks[1](self.blocks[0](x))
    return self.head(self.blocks[3](self.blocks[2](x)))


@trait("no_grad on a method")
class NoGradMethod(Stack):
    @torch.no_grad()
    def scale(self, x: Tensor) -> Tensor:
        return 1 + x.square().mean(1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) / self.scale(x)
        return self.head(x)


@forward("enable_grad inside no_grad")
def enable_grad(self, x):
    with torch.no_grad():
        x = self.blocks[0](x)
        with torch.enable_grad():
            x = self.blocks[1](x)
        shift = self.blocks[2](x)
    return self.head(self.blocks[3](x) + shift)


@forward("set_grad_enabled")
def set_grad_enabled(self, x):
    for index, block in enumerate(self.blocks):
        with torch.set_grad_enabled(index > 0):
            x = block(x)
    return self.head(x)


@forward("detach")
def detached(self, x):
    total = x
    for block in self.blocks:
        x = block(total.detach())
        total = total + x
    return self.head(total)


step("data of a tensor", expected=OR_REFUSED)(lambda self, block, x: block(x) - 0.1 * x.data)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradient, None


step("gradient reversal")(lambda self, block, x: block(x) + Reverse.apply(x, 0.5))


class Cube(torch.autograd.Function):
    """A gradient of its own, from a saved tensor and a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 0.5 * gradient * weight, 2 * (gradient * x).sum(0)


@trait("autograd function with a parameter")
class FunctionWithWeight(Stack):
    class Cubed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return Cube.apply(super().forward(x), self.scale)

    def block(self, index: int) -> nn.Module:
        return self.Cubed()


@step("straight-through estimator")
def straight_through(self, block, x):
    x = block(x)
    return x + ((4 * x).round() / 4 - x).detach()


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1, 1)


step("binary activations")(lambda self, block, x: Sign.apply(block(x)) + 0.1 * x)
step("gumbel softmax", draws=True)(
    lambda self, block, x: x + (gumbel_softmax(block(x), tau=0.7, hard=True) if self.training else block(x))
)


@step("gradient inside forward", expected=OR_REFUSED)
def inner_gradient(self, block, x):
    with torch.enable_grad():
        inner = x if x.requires_grad else x.detach().requires_grad_()
        (step,) = torch.autograd.grad(block(inner).square().sum(), inner, create_graph=True)
    return x - 0.1 * step


@forward("requires_grad_ inside forward", expected=OR_REFUSED)
def requires_grad_inside(self, x):
    if not x.requires_grad:
        x = x.detach().requires_grad_()
    return Stack.forward(self, x)


step("branch on is_grad_enabled")(lambda self, block, x: block(x) if torch.is_grad_enabled() else 0.5 * block(x))
