"""Copies of a model to analyse: with its own Python state, and tensors that are shared, fake or copied.

Analysis runs a model's code. On a twin whose parameters and buffers are stand-ins that moves no parameter, buffer,
random state or flag of the model that trains.
"""

from __future__ import annotations

import copy
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stagewright.torch_internals import TABLES, FakeTensor, FakeTensorMode, buffers_in, parameters_in, version_of

Make = Callable[[Tensor], Tensor]
Build = Callable[[], nn.Module]
_TABLES = TABLES - {"training"}


def twin_of(model: nn.Module, build: Build | None = None) -> nn.Module:
    """A copy of a model's modules and Python attributes, whose parameters and buffers are the model's own.

    A model that can't be copied, since it holds a lock or a file, is built again.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():  # tensors that are neither, such as a weight that a hook computes from others
        held = [value for value in vars(module).values() if isinstance(value, Tensor)]
        memo |= {id(value): value.detach() for value in held if id(value) not in memo}
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # the author's code, or an attribute without a copy
        if build is None:
            raise
    twin = build()
    parts = dict(model.named_modules(remove_duplicate=False))
    for path, module in twin.named_modules(remove_duplicate=False):
        parameters_in(module).update(parameters_in(parts[path]))
        buffers_in(module).update(buffers_in(parts[path]))
    return twin


@contextmanager
def stand_ins(roots: Sequence[nn.Module], make: Make) -> Iterator[dict[str, Tensor]]:
    """Put stand-ins in place of all parameters and buffers while the context is open; yields them by name.

    Tied tensors stay tied. They stay in place during backward, which may run a forward again.
    """
    sites: list[tuple[dict[str, Any], str, Tensor]] = []
    made: dict[int, Tensor] = {}
    named: dict[str, Tensor] = {}
    for root in roots:
        for prefix, module in root.named_modules(remove_duplicate=False):
            for table in (parameters_in(module), buffers_in(module)):
                for name, tensor in table.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        sites.append((table, name, tensor))
                        made[id(tensor)] = stand_in = make(tensor)
                        made[id(stand_in)] = stand_in
                    elif made[id(tensor)] is not tensor:
                        sites.append((table, name, tensor))
                    named[f"{prefix}.{name}" if prefix else name] = table[name] = made[id(tensor)]
    try:
        yield named
    finally:
        for table, name, tensor in sites:
            table[name] = tensor


@contextmanager
def fake_tensors(device: str) -> Iterator[Make]:
    """Within, tensors have shapes and no data; yields what makes a fake one on a device."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # torch logs a traceback of exceptions that it raises anyway
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:

            def make(tensor: Tensor) -> Tensor:
                if device in ("cpu", tensor.device.type):
                    return _like(mode.from_tensor(tensor.detach()), tensor)
                return _like(torch.empty_like(tensor, device=device), tensor)

            yield make
    finally:
        logger.setLevel(level)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no data."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def copied(tensor: Tensor, device: str | torch.device = "cpu") -> Tensor:
    """A copy with the same values."""
    return _like(tensor.detach().to(device, copy=True), tensor)


def _like(made: Tensor, tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def kept_generators() -> Callable[[], None]:
    """What puts torch's, Python's and numpy's generators back to what they are now."""
    python, numbers, state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_rng_state(state)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)

    return restore


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Restore the state of torch's, Python's and numpy's generators at the end of the context."""
    restore = kept_generators()
    try:
        yield
    finally:
        restore()


@contextmanager
def analysing() -> Iterator[None]:
    """Within, the model's code runs for us, not for its user: generators stay as they were, and no warning is shown."""
    with untouched_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def unchanged_state(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Restore modes, buffers and Python attributes of all modules at the end of the context, whatever runs within."""
    modules = {id(module): module for root in roots for module in root.modules()}.values()
    modes = [(module, module.training) for module in modules]
    tables = [(module, _plain_state(module)) for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    buffers = [(module, dict(module.named_buffers(recurse=False))) for module in modules]
    values = {
        id(tensor): (tensor, tensor.detach().clone())
        for _, held in buffers
        for tensor in held.values()
        if tensor is not None
    }
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
        for module, before in tables:
            for name in set(_plain_state(module)) - set(before):
                object.__delattr__(module, name)
            vars(module).update(before)
        for module, held in buffers:
            for name, tensor in held.items():
                if getattr(module, name) is not tensor:
                    setattr(module, name, tensor)
        with torch.no_grad():
            for tensor, copy_before in values.values():
                if not torch.equal(tensor, copy_before):
                    tensor.copy_(copy_before)


def _plain_state(module: nn.Module) -> dict[str, Any]:
    """A module's mode and Python attributes; containers copied, since a forward may change them in place."""
    kept = {name: value for name, value in vars(module).items() if not name.startswith("_") or name not in _TABLES}
    return {name: copy.copy(value) if type(value) in (list, dict, set) else value for name, value in kept.items()}


def attribute_marks(module: nn.Module) -> dict[str, Any]:
    """A module's mode, Python attributes and hooks, as marks that differ once one of them changes."""
    return {
        name: tuple(value) if name in _TABLES else _mark(value)
        for name, value in vars(module).items()
        if name not in _TABLES or name.endswith("_hooks")
    }


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, list | tuple | set | dict):
        items = value.items() if isinstance(value, dict) else value
        return id(value), tuple(id(item) if not isinstance(item, tuple) else tuple(map(id, item)) for item in items)
    if isinstance(value, int | float | str):
        return type(value), value
    return id(value)
