"""Builds the model that a user names: a zoo name, or package.module:factory."""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d
from torch.nn.parameter import UninitializedParameter

from stagewright.errors import UserError, first_line
from stagewright.model import zoo
from stagewright.model.standin import untouched_generators


def build_model(name: str, seed: int, classes: int | None = None, weights: torch.dtype = torch.float32) -> nn.Module:
    """The model with its initial weights on the CPU, made in fp32 and converted; seeded, so the same on every rank."""
    with untouched_generators():
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(seed)  # else torch would seed them when they are first used, maybe much later
        model = _from_factory(name, classes) if ":" in name else zoo.build(name, classes)
    return convert(model, weights)


def convert(model: nn.Module, weights: torch.dtype) -> nn.Module:
    """Convert the tensors of single precision; an author's other types stay what they are, but complex ones widen."""
    if weights == torch.float32:
        return model
    widened = {torch.float32: weights, torch.complex64: torch.complex128 if weights == torch.float64 else None}

    for parameter in model.parameters():
        parameter.data = parameter.data.to(widened.get(parameter.dtype) or parameter.dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(widened.get(buffer.dtype) or buffer.dtype))
    return model


def load_callable(name: str, what: str) -> Callable[..., Any]:
    """The function or class that `package.module:name` names; `what` it is for, in errors."""
    module_name, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, for a user's file in the current folder
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{what} '{name}': can't import {module_name} ({error}); is it on PYTHONPATH?") from error
    except (Exception, SystemExit) as error:  # the user's code, as below
        raise UserError(
            f"{what} '{name}': importing {module_name} raised {type(error).__name__}: {first_line(error)}"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise UserError(f"{what} '{name}': {module_name} has no callable '{attribute}'")
    result: Callable[..., Any] = found
    return result


def _from_factory(name: str, classes: int | None) -> nn.Module:
    factory = load_callable(name, "model")
    wants_classes = classes is not None and "classes" in inspect.signature(factory).parameters
    try:
        made = factory(classes=classes) if wants_classes else factory()
        model = made if isinstance(made, nn.Module) else nn.Sequential(*made)  # a list of modules is a chain
    except (Exception, SystemExit) as error:  # the user's code: report whatever it raises
        raise UserError(f"model '{name}': the factory raised {type(error).__name__}: {first_line(error)}") from error
    lazy = [path for path, tensor in model.named_parameters() if isinstance(tensor, UninitializedParameter)]
    if lazy:
        raise UserError(
            f"model '{name}': parameter '{lazy[0]}' of a lazy module has no shape yet; run one sample through "
            "the model in the factory"
        )
    return model


def make_deterministic(model: nn.Module) -> nn.Module:
    """Replace the poolings whose backward is not deterministic on a GPU; torch reports other such operations itself."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.AdaptiveAvgPool2d:
                setattr(module, name, DeterministicPool(child.output_size))
    return model


class DeterministicPool(nn.AdaptiveAvgPool2d):
    """Adaptive pooling as plain pooling where the output size divides the input; its backward repeats bit for bit."""

    def forward(self, features: Tensor) -> Tensor:
        grid = self.output_size if isinstance(self.output_size, tuple) else (self.output_size,) * 2
        sides = [(side, cells or side) for side, cells in zip(features.shape[2:], grid, strict=True)]
        if any(side % cells for side, cells in sides):
            return super().forward(features)
        return avg_pool2d(features, [side // cells for side, cells in sides])
