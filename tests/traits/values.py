"""Traits of code that reads values, shapes or the fact that it is traced."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.traits.trait import OR_REFUSED, Block, Stack, forward, inside, step, trait

step("isinstance of a value")(lambda self, block, x: block(x) if isinstance(x, Tensor) else block(2 * x))


@step("type of a value")
def type_of(self, block, x):
    x = block(x)
    if type(x).__name__ != "Tensor":
        x = 3 * x
    return x


@step("try on a value")
def try_value(self, block, x):
    x = block(x)
    try:
        scale = 1 + 0.1 * float(x.mean() > 0)
    except Exception:
        scale = 5.0
    return x * scale


@inside("try inside a block")
def try_inside(self, x):
    try:
        scale = 1 + 0.1 * float(x.abs().mean())
    except Exception:
        scale = 5.0
    return Block.forward(self, x) * scale


step("hasattr of a value")(lambda self, block, x: block(x) * (2 if hasattr(x, "no_such_attribute") else 1))
inside("branch on a value inside blocks")(lambda self, x: Block.forward(self, x if x.mean() > 0 else -x))


@step("branch on a value between blocks", expected=OR_REFUSED)
def branch_between(self, block, x):
    x = block(x)
    if x.mean() > 0:
        x = 0.5 * x
    return x


@forward("branch that skips a block", expected=OR_REFUSED, weight_decay=0.1)
def branch_skips(self, x):
    for index, block in enumerate(self.blocks):
        if index != 2 or x[0, 0] > 0:
            x = block(x)
    return self.head(x)


@trait("branch inside a block that skips its layer", weight_decay=0.1)
class BranchSkipsInside(Stack):
    class Skipping(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x[0, 0] > 0 else x

    def block(self, index: int) -> nn.Module:
        return self.Skipping() if index == 2 else Block()


@step("loop until a value", expected=OR_REFUSED)
def loop(self, block, x):
    x = block(x)
    while x.abs().max() > 1.5:
        x = 0.7 * x
    return x


step("item as a factor", expected=OR_REFUSED)(lambda self, block, x: block(x) * (1 + 0.1 * x.std().item()))


@step("shape that follows from values", expected=OR_REFUSED)
def value_shape(self, block, x):
    x = block(x)
    return x + x[x > 0].mean()


step("where instead of a branch")(lambda self, block, x: torch.where(x.mean() > 0, block(x), x))
step("iterates over samples", expected=OR_REFUSED)(lambda self, block, x: torch.stack([block(row) for row in x]))
step("length of the batch", expected=OR_REFUSED)(lambda self, block, x: block(x) / len(x))


@step("branch on the batch's size")
def batch_size(self, block, x):
    x = block(x) if x.shape[0] > 1 else 10 * block(x)
    return x * (x.size(0) / 2)


@step("assert on a value", expected=OR_REFUSED)
def asserts(self, block, x):
    assert x.dim() == 2 and x.isfinite().all(), "wrong input"
    return block(x)


@step("branch on tracing")
def tracing_branch(self, block, x):
    x = block(x)
    if torch.jit.is_scripting() or torch.jit.is_tracing() or torch.compiler.is_compiling():
        x = 7 * x
    return x


@step("branch on fx")
def fx_branch(self, block, x):
    x = block(x)
    if isinstance(x, torch.fx.Proxy):
        x = 7 * x
    return x
