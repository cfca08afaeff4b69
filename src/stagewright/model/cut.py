"""Traces a model into a chain of units, and cuts the chain into stages.

A unit is one call in the model's forward: of a module, a function or a method. `Chain` holds the traces of training and
evaluation; `Chain.cut` returns one `Piece` per stage.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from stagewright.errors import UserError, did_you_mean, first_line

_CALLS = ("call_module", "call_function", "call_method")


@dataclass(frozen=True, slots=True)
class Piece:
    """One stage's part of a model, and the names of the live values that enter it.

    `training` and `evaluation` share their modules and parameters; they differ where the model's code reads
    `self.training`. Parameter names are those of the whole model.
    """

    training: nn.Module
    evaluation: nn.Module
    inputs: tuple[str, ...]
    evaluation_inputs: tuple[str, ...]
    first_unit: str


class Chain:
    """A model as a sequence of units, in the order in which they run."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.trace_error: str | None = None  # why the model stays whole
        was_training = model.training
        try:
            self._training = _trace(model.train())
            self._evaluation = _trace(model.eval())
        except Exception as error:  # the model's code ran on symbols: any error means that it can't be traced
            self.trace_error = f"{type(model).__name__} can't be traced ({first_line(error, 160)})"
        model.train(was_training)
        nodes = [] if self.trace_error else _calls(self._training)
        self.units = tuple(_unit_names(nodes)) or (type(model).__name__,)
        self._first_nodes = {name: node.name for name, node in zip(self.units, nodes, strict=False)}

    @property
    def training_graph(self) -> fx.Graph | None:
        """The trace of the training forward; None if the model can't be traced."""
        return None if self.trace_error else self._training

    def by_shares(self, shares: Sequence[int]) -> tuple[str, ...]:
        """The first unit of each later stage when every stage gets its share of the units.

        The boundary after a prefix of the shares is floor(units * prefix / total).
        """
        units, total = len(self.units), sum(shares)
        if min(shares) < 1:
            raise UserError(f"shares {':'.join(map(str, shares))}: each must be at least 1")
        self._require_cuttable(len(shares))
        bounds = [units * sum(shares[:index]) // total for index in range(len(shares) + 1)]
        for stage, (first, last) in enumerate(itertools.pairwise(bounds)):
            if first == last:
                raise UserError(
                    f"shares {':'.join(map(str, shares))} leave stage {stage} without units: the model has "
                    f"{units} units; raise that share or name the units with --cut"
                )
        return tuple(self.units[bound] for bound in bounds[1:-1])

    def by_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """The first unit of each later stage, from unit names or the names of modules that contain them."""
        return tuple(self._find(name) for name in names)

    def cut(self, cuts: Sequence[str]) -> tuple[Piece, ...]:
        """The model as one piece per stage; `cuts` name the first unit of each stage after the first."""
        if not cuts:
            return (Piece(self.model, self.model, ("input",), ("input",), self.units[0]),)
        self._require_cuttable(len(cuts) + 1)
        positions = [0, *(self.units.index(name) for name in cuts), len(self.units)]
        for stage, (first, last) in enumerate(itertools.pairwise(positions)):
            if first >= last:
                raise UserError(
                    f"cut {','.join(cuts)} leaves stage {stage} without units; the units run in the order "
                    f"{self.units[0]} ... {self.units[-1]}"
                )
        first_nodes = [self._first_nodes[name] for name in cuts]
        training = _slices(self.model, self._training, first_nodes)
        evaluation = _slices(self.model, self._evaluation, first_nodes)
        pieces = tuple(
            Piece(train[0], evaluate[0], train[1], evaluate[1], first_unit)
            for train, evaluate, first_unit in zip(training, evaluation, (self.units[0], *cuts), strict=True)
        )
        _require_unshared(pieces)
        return pieces

    def _require_cuttable(self, stages: int) -> None:
        if self.trace_error and stages > 1:
            raise UserError(
                f"{self.trace_error}, so it can't be cut into {stages} stages; return an nn.Sequential or a "
                "list of modules from the factory, or use one stage"
            )

    def _find(self, name: str) -> str:
        for unit in self.units:
            if unit == name or unit.startswith(name + "."):
                return unit
        why = f" ({self.trace_error})" if self.trace_error else ""
        raise UserError(
            f"--cut or the plan file cuts before '{name}', but the model has no such unit{why}; "
            f"{did_you_mean(name, self.units)}"
        )


def _slices(model: nn.Module, graph: fx.Graph, first_nodes: Sequence[str]) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """The graph as one module per stage, each with the names of the live values that enter it."""
    nodes = _calls(graph)
    position = {node.name: index for index, node in enumerate(nodes)}
    missing = [name for name in first_nodes if name not in position]
    if missing:
        raise UserError(
            f"the forward runs '{missing[0]}' in training but not in evaluation, so no stage can begin there; "
            "cut at another unit"
        )
    bounds = [0, *(position[name] for name in first_nodes), len(nodes)]
    (returned,) = (node for node in graph.nodes if node.op == "output")
    if not isinstance(returned.args[0], fx.Node):
        raise UserError(f"the model returns {type(returned.args[0]).__name__}, not one tensor")
    live = [_live(graph, nodes[:bound], nodes[bound:], returned) for bound in bounds[:-1]] + [[returned.args[0]]]
    stages: list[tuple[nn.Module, tuple[str, ...]]] = []
    for stage, (first, last) in enumerate(itertools.pairwise(bounds)):
        part = _slice(nodes[first:last], live[stage], live[stage + 1], is_last=stage == len(bounds) - 2)
        stages.append((fx.GraphModule(model, part), tuple(node.name for node in live[stage])))
    return stages


def _live(graph: fx.Graph, before: Sequence[fx.Node], after: Sequence[fx.Node], returned: fx.Node) -> list[fx.Node]:
    """Values made before a boundary and used after it; attributes are fetched where they are used."""
    later = {*after, returned}
    made = [*(node for node in graph.nodes if node.op == "placeholder"), *before]
    return [node for node in made if any(user in later for user in node.users)]


def _slice(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], is_last: bool) -> fx.Graph:
    part = fx.Graph()
    values = {node: part.placeholder(node.name) for node in inputs}

    def value(node: fx.Node) -> fx.Node:
        if node not in values:
            assert node.op == "get_attr", node
            values[node] = part.node_copy(node)
        return values[node]

    for node in nodes:
        values[node] = part.node_copy(node, value)
    part.output(value(outputs[0]) if is_last else tuple(value(node) for node in outputs))
    return part


def _require_unshared(pieces: Sequence[Piece]) -> None:
    """Raise if two stages use a tensor that training changes: each parameter and statistic belongs to one stage."""
    users: dict[int, tuple[int, str]] = {}
    for stage, piece in enumerate(pieces):
        named = piece.training.named_parameters()
        parameters = [(name, tensor) for name, tensor in named if tensor.requires_grad]
        buffers = piece.training.named_buffers()
        statistics = [(name, tensor) for name, tensor in buffers if name.endswith("running_mean")]
        for name, tensor in parameters + statistics:
            other, other_name = users.setdefault(id(tensor), (stage, name))
            if other != stage:
                raise UserError(
                    f"'{name}' is used by stage {other}{f' (as {other_name})' if other_name != name else ''} and by "
                    f"stage {stage}, on both sides of a cut; move the cut so that one stage holds both uses"
                )


class _Tracer(fx.Tracer):
    """Traces into modules; a module whose code can't be traced stays whole, as one unit."""

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        known = set(self.graph.nodes)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:  # the module's code ran on symbols: any error means that it can't be traced
            for node in reversed([node for node in self.graph.nodes if node not in known]):
                self.graph.erase_node(node)
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return super().getattr(attr, attr_val, {})  # no cache: it would return nodes that call_module erased


def _trace(model: nn.Module) -> fx.Graph:
    """The graph of a model's forward, which takes one tensor; optional arguments keep their defaults."""
    optional = {
        name: parameter.default
        for name, parameter in list(inspect.signature(model.forward).parameters.items())[1:]
        if parameter.default is not inspect.Parameter.empty
    }
    graph = _Tracer().trace(model, concrete_args=optional or None)
    for node in reversed(list(graph.nodes)):  # drop what the tracer adds for arguments that keep their default
        guard = node.op == "call_function" and getattr(node.target, "__name__", "") in ("_assert", "_assert_is_none")
        if (guard or node.op == "placeholder") and not node.users and node is not next(iter(graph.nodes)):
            graph.erase_node(node)
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise UserError(f"forward takes {len(inputs)} arguments ({', '.join(inputs)}), not one tensor")
    return graph


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op in _CALLS]


def _unit_names(nodes: Sequence[fx.Node]) -> list[str]:
    """A module's name for its first call, otherwise the name of the call."""
    names: dict[str, None] = {}
    for node in nodes:
        name = str(node.target) if node.op == "call_module" and str(node.target) not in names else node.name
        names[name if name not in names else f"{name}#{len(names)}"] = None
    return list(names)
