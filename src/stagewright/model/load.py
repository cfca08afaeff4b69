"""From the text a user gives to a module: a zoo name, or package.module:factory."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import torch
from torch import nn

from stagewright.model import zoo
from stagewright.model.units import as_module


def build_model(name: str, seed: int, classes: int | None = None) -> nn.Module:
    """The model with its initial weights, the same on every rank: seeded, then built on the CPU in fp32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _from_factory(name, classes) if ":" in name else zoo.build(name, classes)


def _from_factory(name: str, classes: int | None) -> nn.Module:
    module_name, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` would: a user's own file beside the command
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"model '{name}': can't import {module_name} ({error}); is it on PYTHONPATH?") from error
    except (Exception, SystemExit) as error:  # a user's code, as below
        raise ValueError(f"model '{name}': importing {module_name} raised {type(error).__name__}: {error}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ValueError(f"model '{name}': {module_name} has no callable '{attribute}'")
    wants_classes = classes is not None and "classes" in inspect.signature(factory).parameters
    try:
        made = factory(classes=classes) if wants_classes else factory()
        model = as_module(made)
    except (Exception, SystemExit) as error:  # a user's code: whatever it raises is the user's to read
        raise ValueError(f"model '{name}': the factory raised {type(error).__name__}: {error}") from error
    return model
