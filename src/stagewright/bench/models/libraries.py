"""Imports the libraries that models come from, none of which the package depends on.

The CPU build of torch can't load torchvision's compiled operators, and importing torchvision fails where one that it
describes is missing. Those are declared here first, without an implementation: no model needs them.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from stagewright.errors import UserError

_DESCRIBED = dict.fromkeys(("nms", "qnms"), "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def is_installed(library: str) -> bool:
    """Whether a library can be imported here; an empty name stands for none."""
    return not library or find_spec(library) is not None


def import_library(name: str) -> Any:
    """Import a library or one of its modules; the others find torchvision usable, if it is installed."""
    if find_spec(name.partition(".")[0]) is None:
        raise UserError(f"{name} is not installed; install it with pip install 'stagewright[libraries]'")
    _declare_missing_operators()
    return import_module(name)


def _declare_missing_operators() -> None:
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        except OSError:  # built for another torch
            continue
    for name, schema in _DESCRIBED.items():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)
