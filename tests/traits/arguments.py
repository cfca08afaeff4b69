"""Traits of constants, arguments, and of what passes between blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tests.traits.trait import CLASSES, WIDTH, Block, Stack, forward, step, trait

_TABLE = torch.linspace(0.5, 1.5, WIDTH)
_SHIFT = torch.full((WIDTH,), 0.25, dtype=torch.float64)


@forward("constants made in forward")
def constants(self, x):
    for index, block in enumerate(self.blocks):
        x = block(x) + torch.arange(WIDTH) * 0.01 + torch.tensor([0.1 * index])
        x = x @ torch.eye(WIDTH, dtype=x.dtype)
    return self.head(x)


@step("constants by the batch's size")
def shaped_constants(self, block, x):
    x = block(x) + 0.1 * torch.arange(x.shape[0], dtype=x.dtype, device=x.device).unsqueeze(1)
    return torch.cat([x, torch.zeros(x.shape[0], 1, dtype=x.dtype)], 1)[:, :WIDTH]


step("a constant of the module's file")(lambda self, block, x: block(x) * _TABLE.to(x.dtype))


@trait("a tensor attribute as a constant")
class AttributeConstant(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.linspace(0.5, 1.5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.table.to(x)
        return self.head(x)


@step("numpy constants")
def numpy_constants(self, block, x):
    x = block(x) * torch.as_tensor(np.linspace(0.5, 1.5, WIDTH), dtype=x.dtype)
    return x * float(np.sqrt(0.5))


@trait("optional arguments")
class Optional(Stack):
    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 0.5, return_features: bool = False) -> Any:
        for block in self.blocks:
            x = block(x) * scale
            if mask is not None:
                x = x * mask
        return x if return_features else self.head(x)


@trait("an optional tensor with a default")
class DefaultTensor(Stack):
    def forward(self, x: Tensor, shift: Tensor = _SHIFT) -> Tensor:
        for block in self.blocks:
            x = block(x) + shift
        return self.head(x)


@trait("arguments by star and keyword")
class StarArguments(Stack):
    def forward(self, *inputs: Tensor, **options: Any) -> Tensor:
        (x,) = inputs
        for block in self.blocks:
            x = block(x) * options.get("scale", 0.5)
        return self.head(x)


@trait("keyword-only arguments")
class KeywordOnly(Stack):
    class Scaling(Block):
        def forward(self, x: Tensor, *, scale: float, shift: Tensor | None = None) -> Tensor:
            x = scale * super().forward(x)
            return x if shift is None else x + shift

    def block(self, index: int) -> nn.Module:
        return self.Scaling()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.7, shift=x.mean(0))
        return self.head(x)


@trait("tuples between blocks")
class Tuples(Stack):
    class Pair(Block):
        def forward(self, pair: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
            x, memory = pair
            x = super().forward(x)
            return x, x if memory is None else memory + x

    def block(self, index: int) -> nn.Module:
        return self.Pair()

    def forward(self, x: Tensor) -> Tensor:
        pair = (x, None)
        for block in self.blocks:
            pair = block(pair)
        return self.head(pair[0] + pair[1])


@trait("dicts between blocks")
class Dicts(Stack):
    class Entries(Block):
        def forward(self, entries: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
            x = super().forward(entries["x"])
            return {"x": x, "sum": entries["sum"] + x, "depth": entries["depth"] + 1}

    def block(self, index: int) -> nn.Module:
        return self.Entries()

    def forward(self, x: Tensor) -> Tensor:
        entries = {"x": x, "sum": x, "depth": 0}
        for block in self.blocks:
            entries = block(entries)
        return self.head(entries["x"] + entries["sum"] / entries["depth"])


@dataclass
class Features:
    x: Tensor
    mask: Tensor


@trait("dataclasses between blocks")
class DataClasses(Stack):
    class Featured(Block):
        def forward(self, features: Features) -> Features:  # type: ignore[override]
            return Features(super().forward(features.x) * features.mask, features.mask)

    def block(self, index: int) -> nn.Module:
        return self.Featured()

    def forward(self, x: Tensor) -> Tensor:
        features = Features(x, (x > -1).to(x.dtype))
        for block in self.blocks:
            features = block(features)
        return self.head(features.x)


class Named(NamedTuple):
    x: Tensor
    total: Tensor


@trait("named tuples between blocks")
class NamedTuples(Stack):
    class Summed(Block):
        def forward(self, named: Named) -> Named:  # type: ignore[override]
            x = super().forward(named.x)
            return Named(x, named.total + x)

    def block(self, index: int) -> nn.Module:
        return self.Summed()

    def forward(self, x: Tensor) -> Tensor:
        named = Named(x, torch.zeros_like(x))
        for block in self.blocks:
            named = block(named)
        return self.head(named.x + named.total)


@forward("a list of all features")
def dense(self, x):
    features = [x]
    for block in self.blocks:
        features.append(block(torch.stack(features).mean(0)))
    return self.head(torch.stack(features[1:], 1).sum(1))


@trait("nested containers")
class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleDict(
            {f"stage{index}": nn.Sequential(nn.Sequential(Block(), nn.Identity()), Block()) for index in range(2)}
        )
        self.extra = nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleList([Block(), Block()])])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for key in sorted(self.stages):
            x = self.stages[key](x)
        for inner in self.extra:
            for block in inner:  # type: ignore[attr-defined]
                x = block(x)
        return self.head(x)


@trait("layers by getattr")
class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for index in range(4):
            setattr(self, f"layer{index}", Block())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for index in range(4):
            x = getattr(self, f"layer{index}")(x)
        return self.head(x)


@forward("children out of order")
def out_of_order(self, x):
    for index in (2, 0, 3, 1):
        x = self.blocks[index](x)
    return self.head(x)


@trait("a list of modules")
def listed() -> list[nn.Module]:
    return [Block(), Block(), Block(), Block(), nn.Linear(WIDTH, CLASSES)]
