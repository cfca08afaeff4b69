"""A GPU without memory to spare: what was asked of it, and what this rank could have had."""

from __future__ import annotations

import re
from typing import Any

import torch

GIB = 2**30
_ASKED = re.compile(r"Tried to allocate ([0-9.]+ [KMG]iB)")


def describe_shortage(error: torch.OutOfMemoryError, samples: int) -> str:
    """The numbers of an allocation that failed."""
    asked = _ASKED.search(str(error))
    free, total = torch.cuda.mem_get_info()
    return (
        f"out of GPU memory with microbatches of {samples} samples: {asked[1] if asked else 'something'} more needed, "
        f"{free / GIB:.2f} GiB free of {total / GIB:.1f}"
    )


def shortage_event(rank: int) -> dict[str, Any]:
    """What the rank holds and what is free: all that it could have had."""
    return {"kind": "shortage", "rank": rank, "room": torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()}
