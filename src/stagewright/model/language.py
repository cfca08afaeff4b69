"""Transformers for text: a GPT-2-like decoder that predicts the next token, and a BERT-like encoder that classifies.

Both take `input_ids` [samples, tokens]. GPT's output layer is its token embedding: the two are one parameter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

_DEVIATION = 0.02
_PERCEPTRON = 4  # times the width


class Attention(nn.Module):
    """Self-attention; of a decoder, to earlier tokens only."""

    def __init__(self, width: int, heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.is_causal = is_causal
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend; where `mask` [samples, 1, 1, tokens] is given, only to tokens where it is true."""
        samples, length, width = tokens.shape
        query, key, value = (
            part.view(samples, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(tokens).split(width, dim=2)
        )
        attended = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.is_causal)
        made: Tensor = self.c_proj(attended.transpose(1, 2).reshape(samples, length, width))
        return made


class Perceptron(nn.Module):
    """Two layers, the inner one four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, _PERCEPTRON * width)
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(_PERCEPTRON * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.c_proj(self.gelu(self.c_fc(tokens)))
        return made


class DecoderBlock(nn.Module):
    """Attention and a perceptron, each after a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, is_causal=True)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = Perceptron(width)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attn(self.ln_1(tokens))
        made: Tensor = tokens + self.mlp(self.ln_2(tokens))
        return made


class GPT(nn.Module):
    """Predicts at each position which token follows: [samples, tokens, vocabulary]."""

    def __init__(self, context: int, depth: int, heads: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.context = context
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.Sequential(*(DecoderBlock(width, heads) for _ in range(depth)))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        _initialize(self)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):  # they add up over the depth
                nn.init.normal_(parameter, std=_DEVIATION / math.sqrt(2 * depth))

    def forward(self, input_ids: Tensor) -> Tensor:
        _require_fit(input_ids, self.context)
        tokens = self.wte(input_ids) + self.wpe.weight[: input_ids.shape[1]]
        logits: Tensor = self.lm_head(self.ln_f(self.h(tokens)))
        return logits


class EncoderBlock(nn.Module):
    """Attention and a perceptron, each beside a shortcut and before a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn = Attention(width, heads, is_causal=False)
        self.ln_1 = nn.LayerNorm(width)
        self.mlp = Perceptron(width)
        self.ln_2 = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        tokens = self.ln_1(tokens + self.attn(tokens, mask))
        made: Tensor = self.ln_2(tokens + self.mlp(tokens))
        return made


class BERT(nn.Module):
    """Classifies a text by its first token's vector; `attention_mask` is 0 where a text has ended."""

    def __init__(self, vocabulary: int, context: int, depth: int, heads: int, width: int, classes: int) -> None:
        super().__init__()
        self.context = context
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.ln = nn.LayerNorm(width)
        self.h = nn.ModuleList(EncoderBlock(width, heads) for _ in range(depth))
        self.pooler = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)
        _initialize(self)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        _require_fit(input_ids, self.context)
        mask = None if attention_mask is None else attention_mask[:, None, None, :] != 0
        tokens = self.ln(self.wte(input_ids) + self.wpe.weight[: input_ids.shape[1]])
        for block in self.h:
            tokens = block(tokens, mask)
        logits: Tensor = self.head(torch.tanh(self.pooler(tokens[:, 0])))
        return logits


def _require_fit(input_ids: Tensor, context: int) -> None:
    if input_ids.shape[1] > context:
        length = input_ids.shape[1]
        raise ValueError(f"a sample has {length} tokens but the model takes at most {context}; use --context")


def _initialize(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=_DEVIATION)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
