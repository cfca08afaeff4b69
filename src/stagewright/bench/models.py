"""Models made for measuring."""

from __future__ import annotations

from torch import nn

WIDTH = 8


def near_empty() -> nn.Module:
    """Two units with next to nothing to compute: what a microbatch costs is the pipeline itself."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
