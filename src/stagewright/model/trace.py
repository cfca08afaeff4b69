"""Traces a model: its forward in training and in evaluation as recorded graphs, of copies of the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from stagewright.errors import first_line
from stagewright.model.call import Inputs
from stagewright.model.pieces import Modes, modes_of
from stagewright.model.record import Recording, Untraceable, record, record_once
from stagewright.model.standin import Build, Make, analysing, copied, fake_tensors, stand_ins, twin_of

Context = Callable[[], AbstractContextManager[Any]]
_CHEAP = 5 * 10**10  # parameters x elements of a sample


@dataclass(frozen=True, slots=True)
class Trace:
    """The forwards of a model, and the mode of each of its modules in training and in evaluation."""

    training: Recording
    evaluation: Recording
    modes: Modes

    @property
    def names_types(self) -> bool:
        """Whether its code names types, so that it holds in the precision alone that it was recorded in."""
        return self.training.names_types or self.evaluation.names_types


def trace(
    model: nn.Module,
    example: Inputs,
    *,
    context: Context = nullcontext,
    device: str = "cpu",
    on_values: bool = False,
    build: Build | None = None,
) -> Trace:
    """Trace a model that takes samples like the example; `Untraceable` where its own code can't be recorded.

    A large one runs on fake tensors, which pretend to be on `device`, since what autocast does depends on it; where the
    model's code reads values, which fake tensors don't have, where it is small, or with `on_values`, on copies of the
    real ones. Code may read values only where it finds some, as transformers looks for masks of ones that it can leave
    out: so where real tensors' values are read, fake ones are tried. `build` makes the model anew, where it can't be
    copied.
    """
    try:
        twin = twin_of(model, build)
    except Exception as error:  # the model's own code, or an attribute that can't be copied
        raise Untraceable(f"it can't be copied ({first_line(error, 100)})") from error
    modes = modes_of(twin)
    with analysing():
        if example.tensors[0].is_meta or any(parameter.is_meta for parameter in twin.parameters()):
            return _without_storage(twin, example.map(lambda tensor: tensor.to("meta")), context, modes)
        fake = partial(_on_fake_tensors, context=context, device=device, modes=modes)
        if not on_values and not _is_cheap(twin, example, device):
            if (found := fake(twin, example)) is not None:
                return found
            twin, on_values = twin_of(model, build), True
        copy = partial(copied, device=device)
        real: Trace | None = None
        failed: Untraceable | None = None
        try:
            real = _real(twin, example.map(copy), context, copy, modes)
            reads_values = real.training.reads_values
        except Untraceable as error:
            failed, reads_values = error, error.reads_values
        if reads_values and not on_values:
            with suppress(Untraceable):  # what real tensors gave stands
                real = fake(twin_of(model, build), example) or real
        if real is not None:
            return real
        assert failed is not None
        raise failed


def _on_fake_tensors(twin: nn.Module, example: Inputs, *, context: Context, device: str, modes: Modes) -> Trace | None:
    """Trace a model on tensors without data; None where its forward needs values, or an operation has no fake."""
    try:
        with fake_tensors(device) as make:
            return _trace(twin, example.map(make), context, make, modes)
    except Untraceable:
        raise
    except Exception:  # the model's code may raise anything
        return None


def _without_storage(twin: nn.Module, example: Inputs, context: Context, modes: Modes) -> Trace:
    """Trace a model whose tensors have no storage, which is only for planning: as many samples as the example has."""
    try:
        recording = record_once(twin, example, context=context)
    except Untraceable:
        raise
    except Exception as error:  # the model's code may raise anything
        raise Untraceable(f"its forward raised {type(error).__name__}: {first_line(error, 160)}") from error
    return Trace(recording, recording, modes)


def _is_cheap(model: nn.Module, example: Inputs, device: str) -> bool:
    """Whether a forward of a few samples takes less time than to import what fake tensors need."""
    parameters = list(model.parameters())
    if device != "cpu":
        return bool(parameters) and parameters[0].device.type == device  # this process computes on the GPU anyway
    largest = max(1, *(tensor[:1].numel() for tensor in example.tensors))
    return sum(parameter.numel() for parameter in parameters) * largest <= _CHEAP


def _real(twin: nn.Module, example: Inputs, context: Context, make: Make, modes: Modes) -> Trace:
    try:
        return _trace(twin, example, context, make, modes)
    except Untraceable:
        raise
    except Exception as error:  # the model's code may raise anything
        raise Untraceable(f"its forward raised {type(error).__name__}: {first_line(error, 160)}") from error


def _trace(twin: nn.Module, example: Inputs, context: Context, make: Make, modes: Modes) -> Trace:
    held = [*twin.named_parameters(), *twin.named_buffers()]
    names = {id(tensor): name for name, tensor in held}
    with stand_ins((twin,), make):
        training = record(twin, example, training=True, context=context, names=names)
        evaluation = record(twin, example, training=False, context=context, keep=training.whole, names=names)
        return Trace(training, evaluation, modes)
