"""Stagewright: plans, runs and measures training over unequal, bounded-stale pipeline stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stagewright.api import Result, train

__all__ = ["Result", "train"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the API on first use, so that the command line starts without torch."""
    if name in __all__:
        from stagewright import api

        return getattr(api, name)
    raise AttributeError(f"module 'stagewright' has no attribute '{name}'")
