"""Runs a user's model outside training: unit by unit, with a check of its output and one-line errors.

`Walk` stops before each unit of a chain and shows its inputs, its call and the values that are live after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from stagewright.errors import UserError, first_line
from stagewright.model.call import Form, Inputs, differentiable, leaves_of
from stagewright.model.chain import Chain, Way
from stagewright.model.pieces import steps
from stagewright.model.recording import Context, Recording
from stagewright.model.slice import enter_autocast, leave_autocast
from stagewright.model.units import Unit, uses_of
from stagewright.torch_internals import tree_unflatten


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
        self._values: dict[fx.Node, Any] = {}  # that were made before the unit
        self._last_use: dict[fx.Node, int] = {}  # the number of the unit
        self._index = 0
        self.output: Any = None

    def __iter__(self) -> Iterator[Visit]:
        chain = self._chain
        if chain.recorded:
            assert chain.trace is not None
            yield from self._units(chain.trace.training)
            return
        cuts = chain.units[1:] if chain.way is Way.BLOCKS else ()
        for step in steps(chain.cut(cuts), self._example.tensors, training=True, is_apart=False):
            parameters = tuple(step.module.parameters())
            yield Visit(step.piece.first_unit, "", step.module, parameters, step.entered, step.run)
            self.output = step.output

    def live_after(self, output: Any) -> list[Any]:
        """The values that cross a cut after the unit that just returned `output`."""
        if not self._chain.recorded:
            return list(output) if isinstance(output, tuple) else [output]
        return [value for node, value in self._values.items() if self._last_use[node] > self._index] + [output]

    def _units(self, recording: Recording) -> Iterator[Visit]:
        """Visit the units of a recorded forward; what is used no more is freed."""
        model, units = self._chain.model, self._chain.recorded
        position = {node: index for index, unit in enumerate(units) for node in unit.nodes}
        for node in recording.graph.nodes:
            users = [user for user in node.users if not user.meta.get("is_size")]  # which asks before it is freed
            self._last_use[node] = max((position.get(user, len(units)) for user in users), default=-1)
        runner = UnitRunner(model, recording, self._example)
        self._values |= {node: value for node, value in runner.env.items() if node.op == "placeholder"}
        all_uses = uses_of(model, recording, units)
        for self._index, (unit, uses) in enumerate(zip(units, all_uses, strict=True)):
            first, inputs = unit.nodes[0], {used for node in unit.nodes for used in node.all_input_nodes}
            module = model.get_submodule(str(first.target)) if first.op == "call_module" else None
            target = "" if module is not None else getattr(first.target, "__name__", str(first.target))
            parameters = {id(use.tensor): use.tensor for use in uses if isinstance(use.tensor, nn.Parameter)}
            entered = tuple(value for node, value in self._values.items() if node in inputs)
            call = partial(runner.run_unit, unit)
            yield Visit(unit.name, target, module, tuple(parameters.values()), entered, call)
            if unit.nodes[-1] not in runner.env:
                raise RuntimeError(f"unit {unit.name} was visited but not called")
            self._values |= {node: runner.env[node] for node in unit.nodes}
            for node in [node for node in self._values if self._last_use[node] <= self._index]:
                del self._values[node], runner.env[node]
        self.output = runner.returned()


class UnitRunner(fx.Interpreter):
    """Runs the units of a recorded forward one by one."""

    def __init__(self, model: nn.Module, recording: Recording, example: Inputs) -> None:
        super().__init__(model, garbage_collect_values=False, graph=recording.graph)
        self._recording = recording
        inputs = [node for node in recording.graph.nodes if node.op == "placeholder"]
        self.env |= dict(zip(inputs, example.tensors, strict=True))
        for node in recording.graph.nodes:
            if node.op == "call_method" and node.meta.get("is_size"):
                self.env[node] = len(example)  # the input may be freed before it is asked for

    def run_unit(self, unit: Unit) -> Any:
        """Run a unit; returns what its first node returned, or its last where it has several calls."""
        for context, nodes in itertools.groupby(unit.nodes, key=lambda node: node.meta.get("context")):
            with nullcontext() if context is None else _entered(context):
                for node in nodes:
                    self.env[node] = self._call(node)
        calls = [node for node in unit.nodes if not node.meta.get("follows")]
        return self.env[calls[-1]]

    def returned(self) -> Any:
        """What the whole model returns, once all units have run."""
        assert self._recording.returned is not None
        output = self._recording.output
        leaves: Any = self.map_nodes_to_values(output.args[0], output)
        return tree_unflatten(leaves, self._recording.returned)

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        """Arguments by their values; attributes and sizes are made where they are used."""
        return fx.map_arg(args, lambda node: self.env[node] if node in self.env else self._call(node))

    def fetch_attr(self, target: str) -> Any:
        constants = self._recording.constants
        return constants[target] if target in constants else super().fetch_attr(target)

    def _call(self, node: fx.Node) -> Any:
        return getattr(self, node.op)(node.target, *self.fetch_args_kwargs_from_env(node))


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
