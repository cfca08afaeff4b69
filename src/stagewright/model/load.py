"""From the text a user gives to a module: a zoo name, or package.module:factory. What training needs of a model's output, said in one line whoever runs the model first."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.model import zoo
from stagewright.model.trace import as_module


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


class WrongOutput(ValueError):
    """A model runs, but what it returns can't be trained."""


def require_logits(output: Any, *, training: bool = True) -> None:
    """One tensor [samples, classes], and in training one that a gradient goes back from."""
    if not isinstance(output, Tensor):
        kind = type(output).__name__.removeprefix("immutable_")  # as a traced list is called
        raise WrongOutput(f"the model returns {kind}, not one tensor; return the logits alone")
    if training and not output.requires_grad:
        raise WrongOutput("no parameter of the model gets a gradient; at least one must require it")
    if output.dim() < 2:
        raise WrongOutput(f"the model returns shape {list(output.shape)}; it must return logits [samples, classes]")


@contextmanager
def running(name: str, sample: Sequence[int]) -> Iterator[None]:
    """Whatever a model's own code raises on samples of a shape is the user's to read, in one line."""
    try:
        yield
    except WrongOutput as error:
        raise ValueError(f"model '{name}': {error}") from error
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"{name} can't run on input {list(sample)}: {type(error).__name__}: {reason[:160]}; give --image"
        ) from error
