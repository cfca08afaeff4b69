"""Stagewright: plans, runs and measures training over unequal, bounded-stale pipeline stages."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stagewright.api import (
        Engine,
        Evaluated,
        Interrupted,
        Result,
        RunFailed,
        Saved,
        Step,
        UserError,
        inspect,
        plan,
        profile,
        simulate,
        train,
    )

__all__ = [
    "Engine",
    "Evaluated",
    "Interrupted",
    "Result",
    "RunFailed",
    "Saved",
    "Step",
    "UserError",
    "inspect",
    "plan",
    "profile",
    "simulate",
    "train",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the API on first use, so that the command line starts without torch."""
    if name in __all__:
        from stagewright import api

        return getattr(api, name)
    raise AttributeError(f"module 'stagewright' has no attribute '{name}'")


class _Package(ModuleType):
    """`plan` and `profile` are folders too, which Python would make attributes of this package: they stay functions."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
