"""A recorded forward cut into slices of its graph, one for each stage, each a module of its own.

A slice takes the values that are live where it begins and returns those that are live where it ends. Attributes and
sizes are made again where they are used; a buffer that evaluation reads in a later stage is fetched and sent there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from stagewright.errors import UserError
from stagewright.model.pieces import Piece
from stagewright.model.recording import Assign, Context, Recording
from stagewright.model.standin import twin_of
from stagewright.model.trace import Trace
from stagewright.model.units import Unit, Uses, carried_buffers, evaluation_bounds, homes_of, units_of, uses_of
from stagewright.torch_internals import TreeSpec, buffers_in, tree_unflatten


def slices(model: nn.Module, trace: Trace, units: Sequence[Unit], uses: Uses, cuts: Sequence[str]) -> tuple[Piece, ...]:
    """The pieces of a recorded model, cut before the units of these names; `uses` says what each unit uses."""
    names = [unit.name for unit in units]
    bounds = [0, *map(names.index, cuts), len(units)]
    homes = homes_of(uses, bounds)
    modules = _StageModules(model)
    training = _parts(modules, trace.training, units, bounds)
    evaluated = units_of(trace.evaluation)
    evaluation_uses = uses_of(model, trace.evaluation, evaluated)
    bounds = evaluation_bounds(evaluated, evaluation_uses, cuts, homes)
    carried = carried_buffers(evaluation_uses, bounds, homes)
    evaluation = _parts(modules, trace.evaluation, evaluated, bounds, carried)
    for train, evaluate in zip(training, evaluation, strict=True):
        for assigner in (*train.assigners, *evaluate.assigners):
            assigner.bind(train.module, evaluate.module)
    return tuple(
        Piece(train.module, evaluate.module, train.inputs, evaluate.inputs, first_unit, trace.modes)
        for train, evaluate, first_unit in zip(training, evaluation, (names[0], *cuts), strict=True)
    )


class _Part(NamedTuple):
    """One stage's part of one forward."""

    module: nn.Module
    inputs: tuple[str, ...]
    assigners: tuple[Assigner, ...]


class _StageModules:
    """The modules of each stage: the model's own, and copies where several stages train the same one.

    A copy has the same parameters. Each stage puts its own version of them into its modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._users: dict[int, int] = {}  # the first stage that runs a module
        self._copies: dict[tuple[int, str], nn.Module] = {}

    def get(self, stage: int, path: str, *, training: bool) -> Any:
        """What a stage has at a path of the model; evaluation has what training has."""
        found = _attribute(self.model, path)
        if not isinstance(found, nn.Module) or not any(p.requires_grad for p in found.parameters()):
            return found
        if training and {self._users.setdefault(id(part), stage) for part in found.modules()} != {stage}:
            self._copies.setdefault((stage, path), twin_of(found))
        return self._copies.get((stage, path), found)


def _parts(
    modules: _StageModules,
    recording: Recording,
    units: Sequence[Unit],
    bounds: Sequence[int],
    carried: Mapping[fx.Node, int] | None = None,
) -> list[_Part]:
    """A recorded forward as one module per stage; stage s has the units from bound s to bound s+1.

    `carried` has the attributes that a stage fetches for later ones.
    """
    graph, returned = recording.graph, recording.output
    if not returned.all_input_nodes:
        raise UserError("the model returns no tensor; return at least one that its parameters decide")
    nodes = [[node for unit in units[first:last] for node in unit.nodes] for first, last in itertools.pairwise(bounds)]
    live: list[Sequence[fx.Node] | None] = []
    for stage in range(len(nodes)):
        before, after = itertools.chain(*nodes[:stage]), itertools.chain(*nodes[stage:])
        fetched = [node for node, home in (carried or {}).items() if home < stage]
        live.append(_live(graph, [*fetched, *before], list(after), returned))
    parts = []
    for stage, (own, inputs, outputs) in enumerate(zip(nodes, live, [*live[1:], None], strict=True)):
        get = partial(modules.get, stage, training=carried is None)
        parts.append(_Slice(modules.model, recording, get).part(own, inputs or (), outputs))
    return parts


def _live(graph: fx.Graph, before: Sequence[fx.Node], after: Sequence[fx.Node], returned: fx.Node) -> list[fx.Node]:
    """Values made before a boundary and used after it; attributes and sizes are made again where they are used."""
    if not before:
        return [node for node in graph.nodes if node.op == "placeholder"]
    used = {argument for node in (*after, returned) for argument in _sources(node)}
    made = [*(node for node in graph.nodes if node.op == "placeholder" or _is_samples(node)), *before]
    return [node for node in made if node in used]


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose values a node needs, through expressions of the number of samples."""
    for argument in node.all_input_nodes:
        if argument.meta.get("is_size") and not _is_samples(argument):
            yield from _sources(argument)
        else:
            yield argument


def _is_samples(node: fx.Node) -> bool:
    """Whether a node is the number of samples itself."""
    return bool(node.meta.get("is_size")) and node.op == "call_method"


class _Slice:
    """Copies a range of a recorded forward's nodes into a graph of its own, and makes a module of it."""

    def __init__(self, model: nn.Module, recording: Recording, get: Callable[[str], Any]) -> None:
        self._model = model
        self._recording = recording
        self._get = get
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}
        self._attributes: dict[str, Any] = {}

    def part(self, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node] | None) -> _Part:
        """The part with these nodes; it returns values for the next, or where there is none, what the model does."""
        graph = self._graph
        for node in inputs:
            self._values[node] = graph.placeholder(node.name)
        for context, run in itertools.groupby(nodes, key=lambda node: node.meta.get("context")):
            with nullcontext() if context is None else _Region(graph, context):
                for node in run:
                    self._values[node] = self._copy(node)
        assigned = [assign for assign in self._recording.assigned if assign.value in set(nodes)]
        assigners = tuple(self._assign(number, assign) for number, assign in enumerate(assigned))
        graph.output(self._returned() if outputs is None else tuple(map(self._value, outputs)))
        module = fx.GraphModule(self._attributes, graph)
        for assigner in assigners:
            assigner.require_buffer(self._model, module)
        return _Part(module, tuple(node.name for node in inputs), assigners)

    def _returned(self) -> fx.Node:
        """What the whole model returns."""
        leaves: Any = fx.map_arg(self._recording.output.args[0], self._value)
        spec = self._recording.returned
        assert spec is not None
        if spec.is_leaf():
            (only,) = leaves
            assert isinstance(only, fx.Node)
            return only
        self._attributes["_returned"] = _Returned(spec)
        return self._graph.call_module("_returned", (leaves,))

    def _value(self, node: fx.Node) -> fx.Node:
        if node not in self._values:
            assert node.op == "get_attr" or node.meta.get("is_size"), node
            self._values[node] = self._copy(node)
        return self._values[node]

    def _copy(self, node: fx.Node) -> fx.Node:
        target = str(node.target)
        if node.op == "get_attr" and target in self._recording.constants:
            self._attributes[target] = _Constant(self._recording.constants[target])
            return self._graph.call_module(target, ())
        if node.op in ("get_attr", "call_module"):
            self._attributes[target] = self._get(target)
        return self._graph.node_copy(node, self._value)

    def _assign(self, number: int, assign: Assign) -> Assigner:
        assigner = self._attributes[f"_assign_{number}"] = Assigner(assign)
        self._graph.call_module(f"_assign_{number}", (self._values[assign.value],))
        return assigner


class _Region:
    """Wraps the nodes added within it in another grad mode and autocast, as a `with` in the author's code does."""

    def __init__(self, graph: fx.Graph, context: Context) -> None:
        self._graph = graph
        self._context = context
        self._entered: fx.Node | None = None

    def __enter__(self) -> None:
        self._entered = self._graph.call_function(enter_autocast, self._context.autocast or (None, None))
        self._graph.call_function(torch.set_grad_enabled, (self._context.grad,))

    def __exit__(self, *error: object) -> None:
        assert self._entered is not None
        self._graph.call_function(torch.set_grad_enabled, (True,))  # a region differs from the training around it
        self._graph.call_function(leave_autocast, (self._entered,))


def enter_autocast(device: str | None, dtype: torch.dtype | None) -> list[Any]:
    """Turn autocast on for a device, or off for all; returns what `leave_autocast` leaves."""
    devices = [device] if device else [name for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)]
    entered: list[Any] = [torch.autocast(name, dtype, enabled=device is not None) for name in devices]
    for context in entered:
        context.__enter__()
    return entered


def leave_autocast(entered: Sequence[Any]) -> None:
    for context in reversed(entered):
        context.__exit__(None, None, None)


class _Returned(nn.Module):
    """Makes what the model returns of its tensors."""

    def __init__(self, spec: TreeSpec) -> None:
        super().__init__()
        self._spec = spec

    def forward(self, leaves: Sequence[Any]) -> Any:
        return tree_unflatten(leaves, self._spec)


class _Constant(nn.Module):
    """A tensor of the author's that is neither a parameter nor a buffer: no part of the model's state."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._held = (tensor,)

    def forward(self) -> Tensor:
        return self._held[0]


class Assigner(nn.Module):
    """Replaces a buffer, wherever a stage holds it."""

    def __init__(self, assign: Assign) -> None:
        super().__init__()
        self._owner, self._name, self._path = assign.module, assign.name, assign.path
        self._holders: tuple[nn.Module, ...] = ()

    def require_buffer(self, model: nn.Module, part: nn.Module) -> None:
        """Give a part the buffer that it replaces, also where it does not read it."""
        holder = part
        for step in filter(None, self._owner.split(".")):
            if not hasattr(holder, step):
                holder.add_module(step, nn.Module())
            holder = getattr(holder, step)
        if self._name not in buffers_in(holder):
            holder.register_buffer(self._name, _attribute(model, self._path))

    def bind(self, *parts: nn.Module) -> None:
        """Replace the buffer in these parts."""
        held = [dict(part.named_modules(remove_duplicate=False)).get(self._owner) for part in parts]
        self._holders = tuple(holder for holder in held if holder is not None and self._name in buffers_in(holder))

    def forward(self, value: Tensor) -> None:
        for holder in self._holders:
            setattr(holder, self._name, value)


def _attribute(model: nn.Module, path: str) -> Any:
    value: Any = model
    for step in path.split("."):
        value = getattr(value, step)
    return value
