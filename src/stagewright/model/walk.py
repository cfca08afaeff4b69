"""Runs a user's model outside training: unit by unit, with a check of its output and one-line errors.

`Walk` stops before each unit of a chain and shows its inputs, its call and the values that are live after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from stagewright.errors import UserError, first_line
from stagewright.model.cut import Chain


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

    def __init__(self, chain: Chain, example: Tensor) -> None:
        self._chain = chain
        self._example = example
        self._values: dict[fx.Node, Any] = {}
        self._last_use: dict[fx.Node, int] = {}
        self.output: Any = None
        self._position = -1

    def __iter__(self) -> Iterator[Visit]:
        graph, model = self._chain.training_graph, self._chain.model
        if graph is not None:
            yield from self._nodes(graph)
            return

        def whole() -> Any:
            self.output = model(self._example)
            return self.output

        yield Visit(self._chain.units[0], "", model, tuple(model.parameters()), (self._example,), whole)

    def live_after(self, output: Any) -> list[Any]:
        """The values that cross a cut after the unit that just returned `output`."""
        after = self._position + 1
        kept = [value for node, value in self._values.items() if self._last_use.get(node, -1) > after]
        return [*kept, output]

    def _nodes(self, graph: fx.Graph) -> Iterator[Visit]:
        interpreter = fx.Interpreter(fx.GraphModule(self._chain.model, graph))
        interpreter.args_iter = iter((self._example,))
        names = iter(self._chain.units)
        calls = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
        position = {node: index for index, node in enumerate(calls)}
        for node in graph.nodes:
            self._last_use[node] = max((position.get(user, len(calls)) for user in node.users), default=-1)
        for node in graph.nodes:
            if node.op == "output":
                returned = node.args[0]
                self.output = interpreter.env.get(returned) if isinstance(returned, fx.Node) else returned
                continue
            if node.op in ("placeholder", "get_attr"):
                interpreter.env[node] = interpreter.run_node(node)
                if node.op == "placeholder":
                    self._values[node] = interpreter.env[node]
                continue
            yield self._visit(next(names), node, interpreter)
            if node not in interpreter.env:
                raise RuntimeError(f"unit {node.name} was visited but not called")
            self._position += 1
            self._values[node] = interpreter.env[node]
            for used in [used for used in self._values if self._last_use.get(used, -1) <= self._position]:
                del self._values[used]
                interpreter.env.pop(used, None)

    def _visit(self, name: str, node: fx.Node, interpreter: fx.Interpreter) -> Visit:
        module = interpreter.fetch_attr(str(node.target)) if node.op == "call_module" else None
        attributes = [interpreter.env[used] for used in node.all_input_nodes if used.op == "get_attr"]
        parameters = [value for value in attributes if isinstance(value, nn.Parameter)]
        if module is not None:
            parameters += list(module.parameters())

        def call() -> Any:
            interpreter.env[node] = interpreter.run_node(node)
            return interpreter.env[node]

        target = "" if module is not None else getattr(node.target, "__name__", str(node.target))
        inputs = tuple(interpreter.env[used] for used in node.all_input_nodes if used.op != "get_attr")
        return Visit(name, target, module, tuple(parameters), inputs, call)


class WrongOutput(UserError):
    """A model runs, but its output can't be trained."""


def require_logits(output: Any, *, training: bool = True) -> None:
    """Raise unless the output is one tensor [samples, classes], in training one with a gradient."""
    if not isinstance(output, Tensor):
        kind = type(output).__name__.removeprefix("immutable_")  # the prefix of a traced list
        raise WrongOutput(f"the model returns {kind}, not one tensor; return the logits alone")
    if training and not output.requires_grad:
        raise WrongOutput("no parameter of the model gets a gradient; at least one must require it")
    if output.dim() < 2:
        raise WrongOutput(f"the model returns shape {list(output.shape)}; it must return logits [samples, classes]")


@contextmanager
def model_errors(name: str, sample: Sequence[int]) -> Iterator[None]:
    """Turn whatever a model's code raises on samples of a shape into a one-line error for the user."""
    try:
        yield
    except WrongOutput as error:
        raise UserError(f"model '{name}': {error}") from error
    except Exception as error:
        raise UserError(
            f"{name} can't run on input {list(sample)}: {type(error).__name__}: {first_line(error, 160)}; give --image"
        ) from error
