"""Traits of what takes part in backward, and how."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gumbel_softmax

from tests.traits.trait import OR_REFUSED, WIDTH, Block, Stack, trait


@trait("no_grad in a block")
class NoGradInside(Stack):
    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = 1 + x.abs().mean(1, keepdim=True)
            return super().forward(x) / scale

    def block(self, index: int) -> nn.Module:
        return self.Scaled()


@trait("no_grad around blocks")
class NoGradAround(Stack):
    def forward(self, x: Tensor) -> Tensor:
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


@trait("enable_grad inside no_grad")
class EnableGrad(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](x)
            with torch.enable_grad():
                x = self.blocks[1](x)
            shift = self.blocks[2](x)
        return self.head(self.blocks[3](x) + shift)


@trait("set_grad_enabled")
class SetGradEnabled(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            with torch.set_grad_enabled(index > 0):
                x = block(x)
        return self.head(x)


@trait("detach")
class Detached(Stack):
    def forward(self, x: Tensor) -> Tensor:
        total = x
        for block in self.blocks:
            x = block(total.detach())
            total = total + x
        return self.head(total)


@trait("data of a tensor", expected=OR_REFUSED)
class Data(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) - 0.1 * x.data
        return self.head(x)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradient, None


@trait("gradient reversal")
class Reversed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + Reverse.apply(x, 0.5)
        return self.head(x)


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


@trait("straight-through estimator")
class StraightThrough(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x + ((4 * x).round() / 4 - x).detach()
        return self.head(x)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1, 1)


@trait("binary activations")
class Binary(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Sign.apply(block(x)) + 0.1 * x
        return self.head(x)


@trait("gumbel softmax", draws=True)
class Gumbel(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (gumbel_softmax(block(x), tau=0.7, hard=True) if self.training else block(x))
        return self.head(x)


@trait("gradient inside forward", expected=OR_REFUSED)
class InnerGradient(Stack):
    """A step along the gradient of an energy, taken in forward."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            with torch.enable_grad():
                inner = x if x.requires_grad else x.detach().requires_grad_()
                (step,) = torch.autograd.grad(block(inner).square().sum(), inner, create_graph=True)
            x = x - 0.1 * step
        return self.head(x)


@trait("requires_grad_ inside forward", expected=OR_REFUSED)
class RequiresGradInside(Stack):
    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        return super().forward(x)


@trait("branch on is_grad_enabled")
class GradEnabledBranch(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if torch.is_grad_enabled() else 0.5 * block(x)
        return self.head(x)
