"""Traits of attention, recurrence and code across samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, scaled_dot_product_attention, softmax

from tests.traits.trait import (
    CLASSES,
    OR_REFUSED,
    SEQUENCE,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Block,
    Stack,
    step,
    through_blocks,
    trait,
)


@trait("attention with a mask by length", sample=SEQUENCE)
class Attention(Stack):
    class Attending(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x) + scaled_dot_product_attention(x, x, x, attn_mask=mask)

    def block(self, index: int) -> nn.Module:
        return self.Attending()

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x[:, -1])


@trait("attention with a mask by ids", sample=TOKENS, is_tokens=True)
class MaskedAttention(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != 0)[:, None, :] | torch.eye(ids.shape[1], dtype=torch.bool)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x.mean(1))


@trait("MultiheadAttention", sample=SEQUENCE)
class MultiHead(Stack):
    class Attending(Block):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            attended, weights = self.attention(x, x, x)
            return super().forward(x) + attended * weights.mean()

    def block(self, index: int) -> nn.Module:
        return self.Attending()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(through_blocks(self, x).mean(1))


@trait("a recurrent cell over steps", sample=SEQUENCE)
class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            hidden = torch.zeros(x.shape[0], WIDTH, dtype=x.dtype)
            outputs = []
            for number in range(x.shape[1]):
                hidden = cell(x[:, number], hidden)
                outputs.append(hidden)
            x = torch.stack(outputs, 1)
        return self.head(x[:, -1])


step("normalizes over the batch", notes="over the microbatch, in one process as well")(
    lambda self, block, x: block(x - x.mean(0, keepdim=True))
)


@trait("routes samples to experts", expected=OR_REFUSED)
class Experts(nn.Module):
    """Every sample is sent to one of three layers, so that some get none of a microbatch."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weights = softmax(self.router(x), 1)
            chosen = weights.argmax(1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).nonzero().squeeze(1)
                if len(rows):
                    out[rows] = expert(x[rows]) * weights[rows, index, None]
            return x + out

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(self.Routed() for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


@step("dense routing by one-hot")
def dense_experts(self, block, x):
    chosen = one_hot(x[:, :3].argmax(1), WIDTH).to(x.dtype)
    return block(x) + chosen
