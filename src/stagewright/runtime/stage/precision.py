"""Number formats of a run: the dtype of the weights, and the dtype in which forward computes.

fp64          for proofs on the CPU
fp32          as stock PyTorch: convolutions on a GPU may use tf32
ieee, tf32    fp32 without tf32; tf32 in matrix products too
bf16, fp16    fp32 weights, forward by autocast; fp16 with loss scaling
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from stagewright.errors import UserError


@dataclass(frozen=True, slots=True)
class Precision:
    """A named precision on one type of device."""

    name: str
    device: str
    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    is_scaled: bool = False  # needs loss scaling, or small gradients vanish

    def forward_context(self, *, keeps_casts: bool = True) -> AbstractContextManager[Any]:
        """A fresh context for one forward: autocast keeps casts of the weights, if at all, while it is open."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device, self.autocast, cache_enabled=keeps_casts)

    def set_flags(self) -> None:
        """Set whether this process computes fp32 products in tf32; PyTorch's default is for convolutions only."""
        torch.backends.cuda.matmul.allow_tf32 = self.name == "tf32"
        torch.backends.cudnn.allow_tf32 = self.name != "ieee"


def make_precision(name: str, device: str) -> Precision:
    """The precision of that name; `config.rules` says which device supports it."""
    if name == "fp64":
        return Precision(name, device, torch.float64)
    if name in ("fp32", "ieee", "tf32"):
        return Precision(name, device)
    if name == "bf16":
        return Precision(name, device, autocast=torch.bfloat16)
    if name == "fp16":
        return Precision(name, device, autocast=torch.float16, is_scaled=True)
    raise UserError(f"unknown precision '{name}'; choose fp64, fp32, ieee, tf32, bf16 or fp16")
