"""Traits of code that reads values, shapes or the fact that it is traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.traits.trait import OR_REFUSED, Block, Stack, trait


@trait("isinstance of a value")
class IsInstance(Stack):
    def forward(self, x: Any) -> Tensor:
        for block in self.blocks:
            x = block(x) if isinstance(x, Tensor) else block(2 * x)
        return self.head(x)


@trait("type of a value")
class TypeOf(Stack):
    def forward(self, x: Any) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if type(x).__name__ != "Tensor":
                x = 3 * x
        return self.head(x)


@trait("try on a value")
class TryValue(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            try:
                scale = 1 + 0.1 * float(x.mean() > 0)
            except Exception:
                scale = 5.0
            x = x * scale
        return self.head(x)


@trait("try inside a block")
class TryInside(Stack):
    class Trying(Block):
        def forward(self, x: Tensor) -> Tensor:
            try:
                scale = 1 + 0.1 * float(x.abs().mean())
            except Exception:
                scale = 5.0
            return super().forward(x) * scale

    def block(self, index: int) -> nn.Module:
        return self.Trying()


@trait("hasattr of a value")
class HasAttribute(Stack):
    def forward(self, x: Any) -> Tensor:
        for block in self.blocks:
            x = block(x) * (2 if hasattr(x, "no_such_attribute") else 1)
        return self.head(x)


@trait("branch on a value inside blocks")
class BranchInside(Stack):
    class Branching(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.mean() > 0 else -x)

    def block(self, index: int) -> nn.Module:
        return self.Branching()


@trait("branch on a value between blocks", expected=OR_REFUSED)
class BranchBetween(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.mean() > 0:
                x = 0.5 * x
        return self.head(x)


@trait("branch that skips a block", expected=OR_REFUSED, weight_decay=0.1)
class BranchSkips(Stack):
    def forward(self, x: Tensor) -> Tensor:
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


@trait("loop until a value", expected=OR_REFUSED)
class Loop(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            while x.abs().max() > 1.5:
                x = 0.7 * x
        return self.head(x)


@trait("item as a factor", expected=OR_REFUSED)
class Item(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * (1 + 0.1 * x.std().item())
        return self.head(x)


@trait("shape that follows from values", expected=OR_REFUSED)
class ValueShape(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x + x[x > 0].mean()
        return self.head(x)


@trait("where instead of a branch")
class Where(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.where(x.mean() > 0, block(x), x)
        return self.head(x)


@trait("iterates over samples", expected=OR_REFUSED)
class OverSamples(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.stack([block(row) for row in x])
        return self.head(x)


@trait("length of the batch", expected=OR_REFUSED)
class BatchLength(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) / len(x)
        return self.head(x)


@trait("branch on the batch's size")
class BatchSize(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if x.shape[0] > 1 else 10 * block(x)
            x = x * (x.size(0) / 2)
        return self.head(x)


@trait("assert on a value", expected=OR_REFUSED)
class Asserts(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert x.dim() == 2 and x.isfinite().all(), "wrong input"
            x = block(x)
        return self.head(x)


@trait("branch on tracing")
class TracingBranch(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if torch.jit.is_scripting() or torch.jit.is_tracing() or torch.compiler.is_compiling():
                x = 7 * x
        return self.head(x)


@trait("branch on fx")
class FxBranch(Stack):
    def forward(self, x: Any) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if isinstance(x, torch.fx.Proxy):
                x = 7 * x
        return self.head(x)
