"""The vision transformer, with torchvision's parameter names and initialization, so that its weight files load.

An image becomes a sequence of patches, each a vector, behind one learned class token; the class token's vector after
the last block is classified.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

RGB = 3
_EPS = 1e-6


class VisionTransformer(nn.Module):
    """Patches of an image of one size through `depth` blocks of attention and a two-layer perceptron."""

    def __init__(self, image: int, patch: int, depth: int, heads: int, width: int, classes: int) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(RGB, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder = Encoder((image // patch) ** 2 + 1, depth, heads, width)
        self.heads = nn.Sequential(OrderedDict(head=nn.Linear(width, classes)))
        nn.init.trunc_normal_(self.conv_proj.weight, std=math.sqrt(1 / (RGB * patch**2)))
        for zero in (self.conv_proj.bias, *self.heads.parameters()):
            assert zero is not None
            nn.init.zeros_(zero)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.conv_proj(images).flatten(2).transpose(1, 2)
        token = self.class_token.expand(patches.shape[0], -1, -1)
        encoded = self.encoder(torch.cat([token, patches], 1))
        logits: Tensor = self.heads(encoded[:, 0])
        return logits


class Encoder(nn.Module):
    """Learned positions, the blocks, and a last norm."""

    def __init__(self, tokens: int, depth: int, heads: int, width: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, tokens, width).normal_(std=0.02))
        blocks = ((f"encoder_layer_{index}", EncoderBlock(heads, width)) for index in range(depth))
        self.layers = nn.Sequential(OrderedDict(blocks))
        self.ln = nn.LayerNorm(width, eps=_EPS)

    def forward(self, tokens: Tensor) -> Tensor:
        encoded: Tensor = self.ln(self.layers(tokens + self.pos_embedding))
        return encoded


class EncoderBlock(nn.Module):
    """Self-attention, then a perceptron four times as wide; each after a norm and beside a shortcut."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=_EPS)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width, eps=_EPS)
        first, second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for layer in (first, second):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)
        self.mlp = nn.Sequential(first, nn.GELU(), nn.Dropout(0.0), second, nn.Dropout(0.0))
        self.register_load_state_dict_pre_hook(_rename_linears)  # type: ignore[no-untyped-call]

    def forward(self, tokens: Tensor) -> Tensor:
        normed = self.ln_1(tokens)
        attended, _ = self.self_attention(normed, normed, normed, need_weights=False)
        tokens = tokens + attended
        out: Tensor = tokens + self.mlp(self.ln_2(tokens))
        return out


def _rename_linears(block: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the perceptron's layers, which the published files call linear_1 and linear_2."""
    for old, new in (("linear_1", "0"), ("linear_2", "3")):
        for kind in ("weight", "bias"):
            if (name := f"{prefix}mlp.{old}.{kind}") in state:
                state[f"{prefix}mlp.{new}.{kind}"] = state.pop(name)
