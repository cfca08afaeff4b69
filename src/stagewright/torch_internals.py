"""What the package uses of torch that is not public, all of it: a new release of torch may change it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.autograd import graph
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TreeSpec",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
    "unset_fake_temporarily",
]
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_SKIPPED = "__dynamo_disable"  # an attribute of functions: what runs in their place
TABLES = frozenset(vars(nn.Module()))  # of every module: its mode, hooks, parameters, buffers and modules


def parameters_in(module: nn.Module) -> dict[str, Any]:
    """A module's own table of parameters, to read and to change."""
    return module._parameters


def buffers_in(module: nn.Module) -> dict[str, Any]:
    """A module's own table of buffers, to read and to change."""
    return module._buffers


def share_tables(module: nn.Module, model: nn.Module) -> None:
    """Let a module have the parameters, buffers and modules that a model has, by the same names."""
    for table in ("_modules", "_parameters", "_buffers"):
        vars(module)[table] = vars(model)[table]


def has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def version_of(tensor: Tensor) -> int:
    """A number that grows with every change of a tensor in place."""
    return tensor._version


def memory_of(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    return int(tensor.untyped_storage()._cdata)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy several tensors at once."""
    torch._foreach_copy_(list(targets), list(sources))


def resize_into(planes: Tensor, target: Tensor) -> None:
    """Resize images, antialiased bilinear, straight into `target`."""
    torch.ops.aten._upsample_bilinear2d_aa.out(planes, list(target.shape[2:]), False, None, None, out=target)


def backward(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """As torch.autograd.backward, which imports sympy to compare shapes: half a second of every process."""
    run: Any = graph._engine_run_backward
    run(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def step_plainly(optimizer: torch.optim.Optimizer) -> None:
    """A step of one of torch's optimizers without its hooks, which import the compiler: a second of every process."""
    step: Any = inspect.unwrap(type(optimizer).step)
    with torch.no_grad():
        step(optimizer)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Within, torch makes an optimizer without importing its compiler, which would otherwise be told to skip it."""
    add: Any = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    if (is_known := hasattr(add, _SKIPPED)) is False:
        setattr(add, _SKIPPED, add)
    try:
        yield
    finally:
        if not is_known:
            delattr(add, _SKIPPED)


def keep_gpu_busy(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


@contextmanager
def calls_intercepted(call: Callable[..., Any], apply: Callable[..., Any]) -> Iterator[None]:
    """Within, torch calls `call(original, module, args, kwargs)` for modules, and the like of autograd functions."""
    original = nn.Module.__call__
    apply_method: Any = inspect.getattr_static(torch.autograd.Function, "apply")  # of Python, or of C

    def own_apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        return apply_method.__get__(None, function)(*args, **kwargs)

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(original, module, args, kwargs)

    def applied(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        return apply(own_apply, function, args, kwargs)

    with (
        mock.patch.object(nn.Module, "__call__", called),
        mock.patch.object(torch.autograd.Function, "apply", classmethod(applied)),
    ):
        yield


@contextmanager
def autocast_noted() -> Iterator[list[str]]:
    """Within, note the devices for which any code enters autocast."""
    noted: list[str] = []
    original = torch.autocast.__enter__

    def entered(region: Any) -> Any:
        noted.append(region.device)
        return original(region)  # type: ignore[no-untyped-call]

    with mock.patch.object(torch.autocast, "__enter__", entered):
        yield noted
