"""Runs a user's model outside training: unit by unit, with a check of its output and one-line errors.

`Walk` stops before each unit of a chain and shows its inputs, its call and the values that are live after it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_unflatten

from stagewright.errors import UserError, first_line
from stagewright.model.call import Form, Inputs, differentiable, leaves_of
from stagewright.model.cut import Chain, Piece, Unit, Way, enter_autocast, leave_autocast
from stagewright.model.record import Context, Recording


@dataclass(frozen=True, slots=True)
class Visit:
    """One unit before it runs; `call` runs it, and may be called again if the unit changes nothing in place."""

    name: str
    target: str  # the function or method of a unit that is not a module
    module: nn.Module | None
    parameters: tuple[nn.Parameter, ...]
    inputs: tuple[Any, ...]
    call: Callable[[], Any]


class Walk:
    """The units of a chain in order, over one example."""

    def __init__(self, chain: Chain, example: Tensor | Inputs) -> None:
        self._chain = chain
        self._example = Inputs.of(example)
        self._values: dict[fx.Node, Any] = {}
        self._last_use: dict[fx.Node, int] = {}
        self.output: Any = None
        self._position = -1

    def __iter__(self) -> Iterator[Visit]:
        chain = self._chain
        if chain.recorded:
            assert chain.trace is not None
            yield from self._units(chain.trace.training)
            return
        if chain.way is Way.BLOCKS:
            yield from self._pieces()
            return

        def whole() -> Any:
            self.output = self._example.call(chain.model)
            return self.output

        yield Visit(chain.units[0], "", chain.model, tuple(chain.model.parameters()), self._example.tensors, whole)

    def _pieces(self) -> Iterator[Visit]:
        """Visit blocks as stages of one block each."""
        values: tuple[Any, ...] = self._example.tensors
        for piece in self._chain.cut(self._chain.units[1:]):
            made: list[Any] = []

            def call(piece: Piece = piece, values: tuple[Any, ...] = values, made: list[Any] = made) -> Any:
                made[:] = [piece.training(*values)]
                return made[0]

            yield Visit(piece.first_unit, "", piece.training, tuple(piece.training.parameters()), values, call)
            (self.output,) = made
            values = self.output if isinstance(self.output, tuple) else (self.output,)

    def live_after(self, output: Any) -> list[Any]:
        """The values that cross a cut after the unit that just returned `output`."""
        if not self._chain.recorded:
            return list(output) if isinstance(output, tuple) else [output]
        after = self._position + 1
        return [value for node, value in self._values.items() if self._last_use.get(node, -1) > after] + [output]

    def _units(self, recording: Recording) -> Iterator[Visit]:
        """Visit the units of a recorded forward; what is used no more is freed."""
        units = self._chain.recorded
        position = {node: index for index, unit in enumerate(units) for node in unit.nodes}
        for node in recording.graph.nodes:
            users = [
                user for user in node.users if not user.meta.get("is_size")
            ]  # a size is no use of the tensor later
            self._last_use[node] = max((position.get(user, len(units)) for user in users), default=-1)
        runner = UnitRunner(self._chain.model, recording, self._example)
        self._values |= {node: runner.values[node] for node in runner.inputs}
        for self._position, unit in enumerate(units):
            self._position -= 1  # the last unit that is done
            yield self._visit(unit, runner)
            if unit.nodes[-1] not in runner.values:
                raise RuntimeError(f"unit {unit.name} was visited but not called")
            self._position += 1
            for node in unit.nodes:
                self._values[node] = runner.values[node]
            for used in [used for used in self._values if self._last_use.get(used, -1) <= self._position]:
                del self._values[used]
                runner.values.pop(used, None)
        self.output = runner.output()

    def _visit(self, unit: Unit, runner: UnitRunner) -> Visit:
        first = unit.nodes[0]
        module = self._chain.model.get_submodule(str(first.target)) if first.op == "call_module" else None
        attributes = [
            runner.attribute(used) for node in unit.nodes for used in node.all_input_nodes if used.op == "get_attr"
        ]
        parameters = [value for value in attributes if isinstance(value, nn.Parameter)]
        for node in unit.nodes:
            if node.op == "call_module":
                parameters += list(self._chain.model.get_submodule(str(node.target)).parameters())
        for value in attributes:
            if isinstance(value, nn.Module):
                parameters += list(value.parameters())
        outside = {used for node in unit.nodes for used in node.all_input_nodes} - set(unit.nodes)
        inputs = tuple(runner.values[used] for used in outside if used in runner.values and used in self._values)
        target = "" if module is not None else getattr(first.target, "__name__", str(first.target))
        return Visit(unit.name, target, module, tuple(parameters), inputs, partial(runner.run, unit))


class UnitRunner:
    """Runs the units of a recorded forward one by one."""

    def __init__(self, model: nn.Module, recording: Recording, example: Inputs) -> None:
        self._model = model
        self._recording = recording
        self.values: dict[fx.Node, Any] = {}
        self.inputs = [node for node in recording.graph.nodes if node.op == "placeholder"]
        self.values |= dict(zip(self.inputs, example.tensors, strict=True))
        for node in recording.graph.nodes:
            if node.op == "call_method" and node.meta.get("is_size"):
                self.values[node] = len(example)  # the input may be freed before it is asked for

    def run(self, unit: Unit) -> Any:
        """Run a unit; returns what its first node returned, or its last where it has several calls."""
        for context, nodes in itertools.groupby(unit.nodes, key=lambda node: node.meta.get("context")):
            with nullcontext() if context is None else _entered(context):
                for node in nodes:
                    self.values[node] = self._call(node)
        calls = [node for node in unit.nodes if not node.meta.get("follows")]
        return self.values[calls[-1]]

    def attribute(self, node: fx.Node) -> Any:
        target = str(node.target)
        if target in self._recording.constants:
            return self._recording.constants[target]
        return operator.attrgetter(target)(self._model)

    def output(self) -> Any:
        (returned,) = (node for node in self._recording.graph.nodes if node.op == "output")
        assert self._recording.returned is not None
        return tree_unflatten(fx.map_arg(returned.args[0], self._value), self._recording.returned)

    def _value(self, node: fx.Node) -> Any:
        if node in self.values:
            return self.values[node]
        return self.attribute(node) if node.op == "get_attr" else self._call(node)

    def _call(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg(node.args, self._value), fx.map_arg(node.kwargs, self._value)
        if node.op == "call_method":
            own, *rest = args
            return getattr(own, str(node.target))(*rest, **kwargs)
        target = self._model.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        assert callable(target)
        return target(*args, **kwargs)


@contextmanager
def _entered(context: Context) -> Iterator[None]:
    entered = enter_autocast(*(context.autocast or (None, None)))
    try:
        with torch.set_grad_enabled(context.grad):
            yield
    finally:
        leave_autocast(entered)


class WrongOutput(UserError):
    """A model runs, but its output can't be trained."""


def require_output(output: Any, *, training: bool = True) -> None:
    """Raise unless the output has a tensor, in training one with a gradient."""
    if not leaves_of(output):
        kind = type(output).__name__.removeprefix("immutable_")  # the prefix of a traced list
        raise WrongOutput(f"the model returns {kind} without a tensor; return at least one")
    if training and not differentiable(output):
        raise WrongOutput("no parameter of the model gets a gradient; at least one must require it")


@contextmanager
def model_errors(name: str, form: Form) -> Iterator[None]:
    """Turn whatever a model's code raises on samples of a form into a one-line error for the user."""
    try:
        yield
    except WrongOutput as error:
        raise UserError(f"model '{name}': {error}") from error
    except Exception as error:
        raise UserError(
            f"{name} can't run on input {form}: {type(error).__name__}: {first_line(error, 160)}; {_advice(form)}"
        ) from error


def _advice(form: Form) -> str:
    return (
        "give --image" if [len(shape) for shape in form.shapes] == [3] else "name the fields that it takes by --inputs"
    )
