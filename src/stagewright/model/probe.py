"""Finds what crosses each cut by running the stages on fake tensors.

It needs no data, and changes neither BatchNorm statistics nor the random state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from stagewright.errors import UserError
from stagewright.model.call import Form, Inputs, differentiable, leaves_of
from stagewright.model.loss import LossError, Measured, Watched
from stagewright.model.pieces import Piece, Step, steps
from stagewright.model.standin import (
    analysing,
    attribute_marks,
    copied,
    fake_tensors,
    stand_ins,
    unchanged_state,
)
from stagewright.model.walk import require_output
from stagewright.torch_internals import (
    NEEDS_VALUES,
    backward,
    memory_of,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    unset_fake_temporarily,
    version_of,
)

_CASTING = frozenset([torch.conv1d, torch.conv2d, torch.conv3d, functional.linear])  # to autocast's type
_SIZES = frozenset(["size", "dim", "shape", "ndim", "device"])  # which do not depend on the type
Constant = int | float | bool | str | None | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """One live value at a cut: a tensor that is sent, or a constant that follows from the shapes and is not sent."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str | None = None  # None: a constant
    requires_grad: bool = False
    changed: bool = False  # the next stage changes it in place, so it gets a copy
    constant: Constant = None
    field: str | None = None  # the field of the sample that it is

    @staticmethod
    def of(name: str, tensor: Tensor) -> Value:
        return Value(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    def empty(self) -> Tensor:
        """A tensor like it, of any values; an integer one of zeros, which are valid indices."""
        assert self.dtype is not None
        return torch.zeros(self.shape, dtype=getattr(torch, self.dtype))

    def __str__(self) -> str:
        if self.dtype is None:
            return f"{self.name}={self.constant}"
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Probe:
    """The values at every cut for one microbatch size, and the parameters that a gradient reaches."""

    samples: int
    inputs: tuple[Value, ...]  # of the model, by the names of their fields
    names: tuple[str, ...]  # forward's parameters that get the last of them
    cuts: tuple[tuple[Value, ...], ...]
    reached: frozenset[str]
    fields: tuple[Value, ...] = ()  # of the sample, which the last stage reads
    divisor: int | None = None  # targets of a microbatch by shape, where the loss is a total and its count
    outputs: tuple[tuple[int, ...], ...] = ()  # the shapes of what the model returns
    changed: frozenset[str] = frozenset()  # the buffers that the forward changes
    attributes: tuple[str, ...] = ()  # the Python attributes that it changes
    casts_inputs: bool = False  # autocast makes all that is used of them another type, at once

    @property
    def form(self) -> Form:
        """What the model is called with."""
        kinds = tuple(value.dtype or "" for value in self.inputs)
        return Form(tuple(value.shape[1:] for value in self.inputs), kinds, self.names)


@dataclass(frozen=True, slots=True)
class Given:
    """Samples to probe with: what the model is called with, and all fields by name."""

    inputs: Inputs
    names: tuple[str, ...] = ("input",)  # the field that each input is
    fields: Mapping[str, Tensor] = field(default_factory=dict)

    def map(self, make: Callable[[Tensor], Tensor]) -> Given:
        fields = {name: make(tensor) for name, tensor in self.fields.items()}
        return replace(self, inputs=self.inputs.map(make), fields=fields)

    def first(self, samples: int) -> Given:
        return self.map(lambda tensor: tensor[:samples])


Measure = Callable[[Any, Watched], Any]  # the loss, or in evaluation the loss and the metrics


def probe(
    pieces: Sequence[Piece],
    given: Given,
    context: Callable[[], AbstractContextManager[Any]],
    *,
    training: bool,
    measure: Measure | None = None,
    device: str = "cpu",
    is_conditional: bool = False,
    watches_inputs: bool = False,
    on_values: bool = False,
) -> Probe:
    """Run every stage on fake tensors, as one process would, and record what passes from each to the next.

    Fake tensors pretend to be on the run's device, since autocast's types depend on it. If the model's code reads
    values, which fake tensors don't have, it runs on copies of the real tensors; so it does with `on_values`, which is
    quicker than to import what fake ones need where model and samples are small. `is_conditional` says that another
    sample may take another path: then any parameter may be reached, and any value may need a gradient. Without a loss
    to `measure`, gradients come from everything that the model returns. `watches_inputs`: find out whether the inputs
    are only cast.
    """
    study = partial(_run, pieces, given, context, measure, training=training, watches=watches_inputs)
    roots = [root for piece in pieces for root in (piece.training, piece.evaluation)]  # a buffer is replaced in both
    with analysing(), unchanged_state(roots), torch.set_grad_enabled(training):
        for piece in pieces:
            piece.train(training)
        try:
            with nullcontext(partial(copied, device=device)) if on_values else fake_tensors(device) as make:
                found = study(make)
        except NEEDS_VALUES:
            found, is_conditional = study(partial(copied, device=device)), True
    return _for_any_path(found, pieces) if is_conditional and training else found


def _for_any_path(found: Probe, pieces: Sequence[Piece]) -> Probe:
    """What may be reached, and may need a gradient, whichever path a sample takes."""
    cuts = tuple(
        tuple(replace(value, requires_grad=value.requires_grad or _may_need_gradient(value)) for value in values)
        for values in found.cuts
    )
    named = itertools.chain(*(piece.training.named_parameters(remove_duplicate=False) for piece in pieces))
    return replace(found, reached=frozenset(name for name, parameter in named if parameter.requires_grad), cuts=cuts)


def _may_need_gradient(value: Value) -> bool:
    """Whether a value is one of real numbers that a stage made: a field of the sample has no gradient."""
    return value.field is None and value.dtype is not None and getattr(torch, value.dtype).is_floating_point


def _run(
    pieces: Sequence[Piece],
    given: Given,
    context: Callable[[], AbstractContextManager[Any]],
    measure: Measure | None,
    stand_in: Callable[[Tensor], Tensor],
    *,
    training: bool,
    watches: bool,
) -> Probe:
    """Run the pieces in one graph, the loss behind them, and look at what that has changed."""
    inputs = given.inputs.map(stand_in)
    before = [version_of(tensor) for tensor in inputs.tensors]
    watched = [tensor for tensor in inputs.tensors if watches and tensor.is_floating_point()]
    uses = _Uses(watched, inputs.tensors[0].device.type)
    modules = [piece.training if training else piece.evaluation for piece in pieces]
    authored = {path: part for module in modules for path, part in _authored(module)}
    marks = {path: attribute_marks(part) for path, part in authored.items()}
    cuts: list[tuple[Value, ...]] = []
    with stand_ins(modules, stand_in) as states:
        versions = {name: _mark(tensor) for name, tensor in states.items()}
        for step in steps(pieces, inputs.tensors, training=training, is_apart=False):
            entered = [version_of(value) if isinstance(value, Tensor) else 0 for value in step.entered]
            with context(), uses if watched else nullcontext():
                step.run()
            cuts.append(_describe(step, entered) if step.stage else ())
        require_output(step.output, training=training)
        measured = _measure(step.output, given, measure, stand_in)
        if training:
            backward(measured.roots, [torch.ones_like(root) for root in measured.roots])
        reached = frozenset(name for name, tensor in states.items() if training and tensor.grad is not None)
        after = {name: buffer for module in modules for name, buffer in module.named_buffers(remove_duplicate=False)}
        changed = frozenset(name for name, buffer in after.items() if versions.get(name) != _mark(buffer))
        _require_unchanged(modules, versions)
    attributes = [
        f"{path}.{name}" if path else name
        for path, part in authored.items()
        for name, mark in attribute_marks(part).items()
        if marks[path].get(name) != mark
    ]
    first = pieces[0].inputs if training else pieces[0].evaluation_inputs
    pairs = zip(first, given.names, inputs.tensors, before, strict=True)
    unchanged = {name: field for name, field, tensor, version in pairs if version_of(tensor) == version}
    changed_fields = (set(given.names) - set(unchanged.values())) & set(measured.read)
    if changed_fields:
        raise LossError(
            f"the model changes its input '{min(changed_fields)}' in place, and the loss or a metric reads it: which "
            "numbers it would see depends on the cut; change a copy of it"
        )
    described = tuple(tuple(replace(value, field=unchanged.get(value.name)) for value in values) for values in cuts[1:])
    is_sent_on = any(value.field for values in described for value in values)
    return Probe(
        len(given.inputs),
        tuple(Value.of(name, tensor) for name, tensor in zip(given.names, given.inputs.tensors, strict=True)),
        given.inputs.names,
        described,
        reached,
        tuple(Value.of(name, given.fields[name]) for name in given.fields if name in measured.read),
        measured.divisor,
        tuple(tuple(leaf.shape) for leaf in leaves_of(step.output)),
        changed,
        tuple(attributes),
        uses.are_casts and not is_sent_on and set(given.names).isdisjoint(measured.read),
    )


class _Uses(TorchFunctionMode):
    """Watches what is done with some tensors."""

    def __init__(self, tensors: Sequence[Tensor], device: str) -> None:
        super().__init__()
        self._tensors = {id(tensor) for tensor in tensors}
        self._device = device
        self.are_casts = bool(tensors)  # autocast makes each another type before it is used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(id(leaf) in self._tensors for leaf in tree_leaves((args, kwargs))) and _called(func) not in _SIZES:
            self.are_casts &= func in _CASTING and torch.is_autocast_enabled(self._device)
        return func(*args, **(kwargs or {}))


def _called(func: Any) -> str:
    """The name of a method, or of the attribute that a getter reads."""
    name = getattr(func, "__name__", "")
    return str(func.__self__.__name__ if name == "__get__" else name)


@dataclass(frozen=True, slots=True)
class _Loss:
    """What a loss does: where backward begins, the fields it reads, and the divisor where it returns a count."""

    roots: Sequence[Tensor]
    read: Collection[str] = ()
    divisor: int | None = None


def _measure(outputs: Any, given: Given, measure: Measure | None, stand_in: Callable[[Tensor], Tensor]) -> _Loss:
    """Compute the loss on what the model returned; where it reads values, on zeros in place of that."""
    if measure is None:
        return _Loss(differentiable(outputs))
    sample = Watched({name: stand_in(tensor) for name, tensor in given.fields.items()})
    try:
        made = measure(outputs, sample)
        roots = [made.total] if isinstance(made, Measured) else []
    except Exception:  # it reads values, which fake tensors don't have; or it is wrong, and says so again
        with unset_fake_temporarily():
            leaves, spec = tree_flatten(outputs)
            zeros = [_zeros(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            sample = Watched(given.fields)
            made = measure(tree_unflatten(zeros, spec), sample)
            if isinstance(made, Measured) and made.total.requires_grad:
                torch.autograd.backward(made.total)
        pairs = zip(leaves, zeros, strict=True)
        roots = [leaf for leaf, zero in pairs if isinstance(zero, Tensor) and zero.grad is not None]
    if not isinstance(made, Measured):
        return _Loss((), sample.read)
    if torch.is_grad_enabled() and not any(root.requires_grad for root in roots):
        raise LossError("the loss does not depend on the model's parameters; it must be computed from the outputs")
    targets = [tensor.numel() for name, tensor in given.fields.items() if name in sample.read - set(given.names)]
    return _Loss(roots, sample.read, None if made.count is None else max(targets, default=len(given.inputs)))


def _zeros(leaf: Tensor) -> Tensor:
    return torch.zeros(leaf.shape, dtype=leaf.dtype).requires_grad_(leaf.requires_grad)


def _authored(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose code is the author's, not torch's own, which may keep a weight that it computes."""
    for path, module in getattr(root, "whole", root).named_modules():
        if not type(module).__module__.startswith("torch."):
            yield path, module


def _mark(tensor: Tensor) -> tuple[int, int, int]:
    """What differs once a tensor was changed or replaced."""
    return id(tensor), version_of(tensor), memory_of(tensor)


def _require_unchanged(modules: Sequence[nn.Module], versions: Mapping[str, tuple[int, int, int]]) -> None:
    """An error where the forward itself changes a parameter: only the optimizer may, or no version would be exact."""
    for module in modules:
        for name, parameter in module.named_parameters():
            if versions.get(name) != _mark(parameter):
                raise UserError(
                    f"the model's forward changes its parameter '{name}' (as max_norm of an embedding does); "
                    "change it after training, or keep such a tensor in a buffer"
                )


def _describe(step: Step, versions: Sequence[int]) -> tuple[Value, ...]:
    """What has entered a stage; `versions` are those from before it ran."""
    described: list[Value] = []
    changed: dict[int, str] = {}
    unit = step.piece.first_unit
    for name, value, version in zip(step.names, step.entered, versions, strict=True):
        if isinstance(value, Tensor):
            is_changed = version_of(value) != version
            if is_changed and (other := changed.setdefault(memory_of(value), name)) != name:
                raise UserError(
                    f"'{other}' and '{name}' share memory across the cut before '{unit}', and stage {step.stage} "
                    "changes it in place; cut elsewhere, or make that operation not in place"
                )
            described.append(replace(Value.of(name, value), requires_grad=value.requires_grad, changed=is_changed))
        elif value is None or isinstance(value, int | float | bool | str | torch.Size):
            described.append(Value(name, constant=tuple(value) if isinstance(value, torch.Size) else value))
        else:
            raise UserError(
                f"'{name}' is live across the cut before '{unit}' (stage {step.stage}) and is a "
                f"{type(value).__name__}, not a tensor; cut elsewhere"
            )
    return tuple(described)
