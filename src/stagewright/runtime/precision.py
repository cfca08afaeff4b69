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

from stagewright.config.sections import Config
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


FORMATS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {  # of the weights, and of autocast
    "fp64": (torch.float64, None),
    **dict.fromkeys(("fp32", "ieee", "tf32"), (torch.float32, None)),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
}


def make_precision(name: str, device: str) -> Precision:
    """The precision of that name; `config.rules` says which device supports it."""
    if name not in FORMATS:
        raise UserError(f"unknown precision '{name}'; choose {', '.join(FORMATS)}")
    return Precision(name, device, *FORMATS[name], is_scaled=name == "fp16")


def precision_of(config: Config) -> Precision:
    """The precision of a run."""
    return make_precision(config.run.precision, config.run.device)
