"""A model as a chain of units, and the chain cut into stages.

A unit is one call in the model's forward: of a module, a function or a method; what runs together in another grad mode
or autocast is one unit. `Chain` holds the traces of training and evaluation; `Chain.cut` returns one `Piece` per stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from stagewright.errors import UserError, did_you_mean, first_line
from stagewright.model.blocks import cut_between, find_blocks
from stagewright.model.call import Inputs
from stagewright.model.record import Assign, Context, Recording, Untraceable
from stagewright.model.standin import Build, analysing, attribute_marks, twin_of
from stagewright.model.trace import Context as Precision
from stagewright.model.trace import Modes, Trace, modes_of, trace

_CALLS = ("call_module", "call_function", "call_method")


@dataclass(frozen=True, slots=True)
class Piece:
    """One stage's part of a model, and the names of the live values that enter it.

    `training` and `evaluation` share their modules and parameters; they differ where the model's code reads
    `self.training`. Parameter names are those of the whole model. The only piece of an uncut model is the model itself.
    """

    training: nn.Module
    evaluation: nn.Module
    inputs: tuple[str, ...]
    evaluation_inputs: tuple[str, ...]
    first_unit: str
    modes: Modes | None = None  # of the modules in a cut model; None: the model's own `train` sets them
    names: tuple[str, ...] = ()  # of an uncut model: forward's parameters that get the last inputs by name

    @property
    def is_whole(self) -> bool:
        """Whether the piece is the author's module itself."""
        return self.modes is None

    def train(self, training: bool = True) -> None:
        """Put the modules into the mode that the author's `train` or `eval` puts them into."""
        if self.modes is None:
            self.training.train(training)
            return
        for root in (self.training, self.evaluation):
            for path, module in root.named_modules():
                module.training = self.modes.get(path, (True, False))[0 if training else 1]


def whole_piece(model: nn.Module, inputs: Sequence[str] = ("input",), names: Sequence[str] = ()) -> Piece:
    """An uncut model: the author's module itself, with the names of what it takes."""
    return Piece(model, model, tuple(inputs), tuple(inputs), type(model).__name__, names=tuple(names))


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of a recorded forward: its name and its nodes."""

    name: str
    nodes: tuple[fx.Node, ...]


class Way(StrEnum):
    """How a model is cut."""

    GRAPH = "graph"  # between the calls of its forward, as recorded on tensors without data where that is possible
    VALUES = "values"  # the same, as recorded on real tensors: the code may ask for the type of a tensor
    BLOCKS = "blocks"  # between like blocks, each stage running the author's own code
    WHOLE = "whole"  # not at all


WAYS = (Way.GRAPH, Way.VALUES, Way.BLOCKS)  # in the order in which they are tried


class Chain:
    """A model as a sequence of units, in the order in which they run.

    `way` says how to cut it; by default, the first way of cutting that works for the model's code.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Tensor | Inputs,
        *,
        context: Precision = nullcontext,
        device: str = "cpu",
        way: Way | None = None,
        build: Build | None = None,
        is_plain: bool = False,
    ) -> None:
        """`is_plain`: its code is known to run the same for every batch, and to draw from torch's generator alone.

        Such a model is not traced where it stays whole.
        """
        self.model = model
        example = Inputs.of(example)
        self._build = build  # makes the model anew, where it can't be copied
        self.trace_error: str | None = None  # why the model's own code was not recorded
        self.draws: frozenset[str] = frozenset()  # the generators, beside torch's, that the forward draws from
        self.is_conditional = True  # what runs, and so which parameters get a gradient, may differ between batches
        self.recorded: tuple[Unit, ...] = ()
        self.example, self._context, self._device = example, context, device
        self.leaks: tuple[str, ...] = ()  # modules that the forward of a copy has changed: it holds on to this one
        is_known = is_plain and way is Way.WHOLE
        self.trace = None if is_known else self._recorded(way)
        if is_known:
            self.is_conditional = False
        self.way, self.units = self._choose(way)
        self._begins = _beginnings(self.recorded) if self.recorded else {unit: (unit, True) for unit in self.units}
        self.impossible: dict[str, str] = {}  # the units that no stage can begin with, and why
        self._shared: tuple[_Shared, ...] = ()
        if self.way in (Way.GRAPH, Way.VALUES) and self.trace:
            self.impossible = _impossible(model, self.trace.training, self.recorded)
            self._shared = _shared(model, self.recorded)

    def _recorded(self, way: Way | None) -> Trace | None:
        """The model's forward, and what its code does; None where it can't be recorded."""
        model, context, device = self.model, self._context, self._device
        marks = {path: attribute_marks(module) for path, module in model.named_modules()}
        found: Trace | None = None
        try:
            found = trace(
                model, self.example, context=context, device=device, on_values=way is Way.VALUES, build=self._build
            )
        except Untraceable as error:
            self.trace_error = str(error)
            self.draws = error.draws
        else:
            self.draws = found.training.draws
            self.is_conditional = bool(found.training.whole or self.draws)
        leaked = [path for path, module in model.named_modules() if attribute_marks(module) != marks[path]]
        self.leaks = tuple(leaked)
        if leaked:
            self.trace_error = f"its forward changes '{leaked[0] or type(model).__name__}' through a copy"
        return None if leaked else found

    def _choose(self, way: Way | None) -> tuple[Way, tuple[str, ...]]:
        whole = self.trace.training.whole if self.trace else {"": ""}
        blocks: tuple[str, ...] = ()
        if way is Way.BLOCKS or (way is None and whole and not self.example.tensors[0].is_meta):
            try:
                blocks = find_blocks(self._twin(), self.example, self._context, self._device)
            except Exception:  # the model's code may raise anything, and says so when it is trained
                blocks = ()
        is_inside = any(path == "" or (blocks and blocks[0].startswith(f"{path}.")) for path in whole)
        if blocks and (way is Way.BLOCKS or is_inside):  # a module that is kept whole would hide them
            self.is_conditional = True
            return Way.BLOCKS, blocks
        if way in (None, Way.GRAPH, Way.VALUES) and self.trace is not None:
            self.recorded = units_of(self.trace.training)
            if self.recorded:
                return way or Way.GRAPH, tuple(unit.name for unit in self.recorded)
        return Way.WHOLE, (type(self.model).__name__,)

    def _twin(self) -> nn.Module:
        return twin_of(self.model, self._build)

    def by_shares(self, shares: Sequence[int]) -> tuple[str, ...]:
        """The first unit of each later stage when every stage gets its share of the units.

        The boundary after a prefix of the shares is floor(units * prefix / total).
        """
        units, total = len(self.units), sum(shares)
        if min(shares) < 1:
            raise UserError(f"shares {':'.join(map(str, shares))}: each must be at least 1")
        self._require_cuttable(len(shares))
        bounds = [units * sum(shares[:index]) // total for index in range(len(shares) + 1)]
        if self.impossible:
            bounds = self._possible(bounds)
        for stage, (first, last) in enumerate(itertools.pairwise(bounds)):
            if first == last:
                raise UserError(
                    f"shares {':'.join(map(str, shares))} leave stage {stage} without units: the model has "
                    f"{units} units; raise that share or name the units with --cut"
                )
        return tuple(self.units[bound] for bound in bounds[1:-1])

    def _possible(self, bounds: Sequence[int]) -> list[int]:
        """The nearest bounds at which a stage can begin, each behind the one before it."""
        rest = [index for index, unit in enumerate(self.units) if index and unit not in self.impossible]
        found = [0]
        for left, bound in zip(range(len(bounds) - 2, 0, -1), bounds[1:-1], strict=True):
            room = [index for index in rest if index > found[-1]][: 1 - left or None]
            found.append(min(room, key=lambda index: abs(index - bound), default=found[-1]))
        return [*found, bounds[-1]]

    def tied(self, cuts: Sequence[str]) -> tuple[tuple[tuple[str, ...], tuple[int, ...], int], ...]:
        """The trained parameters that several stages of a cut use: all their names, the stages, and their size."""
        if not cuts or self.way is Way.WHOLE:
            return ()
        if self.way is Way.BLOCKS:
            try:
                return tied_parameters(self.model, self.cut(cuts))
            except UserError:
                raise
            except Exception:  # the model's code may raise anything, which its proof tells
                return ()
        bounds = [self.units.index(name) for name in cuts]
        found = []
        for shared in self._shared:
            homes = {sum(unit >= bound for bound in bounds) for unit in shared.units}
            if len(homes) > 1:
                found.append((shared.names, tuple(sorted(homes)), shared.size))
        return tuple(found)

    def by_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """The first unit of each later stage, from unit names or the names of modules whose call begins there."""
        return tuple(self._find(name) for name in names)

    def cut(self, cuts: Sequence[str]) -> tuple[Piece, ...]:
        """The model as one piece per stage; `cuts` name the first unit of each stage after the first."""
        if not cuts:
            return (whole_piece(self.model, self.example.parameters_of(self.model), self.example.names),)
        self._require_cuttable(len(cuts) + 1)
        positions = [0, *(self.units.index(name) for name in cuts), len(self.units)]
        for stage, (first, last) in enumerate(itertools.pairwise(positions)):
            if first >= last:
                raise UserError(
                    f"cut {','.join(cuts)} leaves stage {stage} without units; the units run in the order "
                    f"{self.units[0]} ... {self.units[-1]}"
                )
        if self.way is Way.BLOCKS:
            parts = cut_between(self._twin, self.units, positions, self.example, self._context, self._device)
            modes = modes_of(self._twin())
            named = zip(parts, (self.units[0], *cuts), strict=True)
            return tuple(Piece(part, part, names, names, unit, modes) for (part, names), unit in named)
        assert self.trace is not None
        modules = StageModules(self.model)
        training = _parts(modules, self.trace.training, self.recorded, positions)
        homes = _homes(training)
        for name in cuts:
            if name in self.impossible:
                raise UserError(
                    f"--cut or the plan file can't cut before '{name}': {self.impossible[name]}; cut elsewhere"
                )
        evaluated = units_of(self.trace.evaluation)
        bounds = _evaluation_bounds(self.model, evaluated, cuts, homes)
        carried = _carried(self.model, evaluated, bounds, homes)
        evaluation = _parts(modules, self.trace.evaluation, evaluated, bounds, carried)
        pieces = tuple(
            Piece(train.module, evaluate.module, train.inputs, evaluate.inputs, first_unit, self.trace.modes)
            for train, evaluate, first_unit in zip(training, evaluation, (self.units[0], *cuts), strict=True)
        )
        for train, evaluate in zip(training, evaluation, strict=True):
            for assigner in (*train.assigners, *evaluate.assigners):
                assigner.bind(train.module, evaluate.module)
        return pieces

    def _require_cuttable(self, stages: int) -> None:
        if self.way is Way.WHOLE and stages > 1:
            self._require_runs()
            why = self.trace_error or self._why_whole()
            raise UserError(
                f"{type(self.model).__name__} can't be cut into {stages} stages: {why}, and it has no list of like "
                "blocks; return an nn.Sequential or a list of modules from the factory, or use one stage"
            )

    def _require_runs(self) -> None:
        """An error where the model as it is can't run on the example either, whatever its code looks like."""
        if self.trace_error is None or any(tensor.is_meta for tensor in self.example.tensors):
            return
        try:
            with analysing(), torch.enable_grad(), self._context():
                self.example.map(torch.clone).call(self._twin())
        except Exception as error:  # the model's code may raise anything
            raise UserError(
                f"the model can't run on input {self.example}: {type(error).__name__}: {first_line(error, 160)}"
            ) from error

    def _why_whole(self) -> str:
        """Why a model that was recorded has a single unit."""
        whole = self.trace.training.whole if self.trace else {}
        return next((f"'{path}' stays whole, since {why}" for path, why in whole.items()), "it has one unit")

    def _find(self, name: str) -> str:
        if name in self.units:
            return name
        if name in self._begins:
            unit, is_start = self._begins[name]
            if is_start:
                return unit
            raise UserError(
                f"--cut or the plan file cuts before '{name}', which begins inside unit '{unit}'; cut before that unit"
            )
        why = f" ({type(self.model).__name__} can't be cut: {self.trace_error})" if self.trace_error else ""
        raise UserError(
            f"--cut or the plan file cuts before '{name}', but the model has no such unit{why}; "
            f"{did_you_mean(name, [*self.units, *self._begins])}"
        )


def units_of(recording: Recording) -> tuple[Unit, ...]:
    """The units of a recorded forward; nodes that take a result apart belong to the unit that made it."""
    groups: list[list[fx.Node]] = []
    for node in recording.graph.nodes:
        if node.op not in _CALLS or node.meta.get("is_size"):
            continue
        context = node.meta.get("context")
        is_same = bool(groups) and context is not None and groups[-1][-1].meta.get("context") == context
        if groups and (node.meta.get("follows") or is_same):
            groups[-1].append(node)
        else:
            groups.append([node])
    return tuple(Unit(name, tuple(nodes)) for name, nodes in zip(_unit_names(groups), groups, strict=True))


def _unit_names(groups: Sequence[Sequence[fx.Node]]) -> list[str]:
    """A module's name for its first call, otherwise the name of the call."""
    names: dict[str, None] = {}
    for first, *_ in groups:
        path = first.target if first.op == "call_module" else None
        if path is None and (owner := next(iter(first.args), None)) is not None and isinstance(owner, fx.Node):
            path = owner.target if owner.op == "get_attr" and first.meta["opens"][-1:] == (owner.target,) else None
        name = str(path) if path is not None and str(path) not in names else first.name
        names[name if name not in names else f"{name}#{len(names)}"] = None
    return list(names)


def _beginnings(units: Sequence[Unit]) -> dict[str, tuple[str, bool]]:
    """For each module, the unit that its first call begins in, and whether the unit begins with it."""
    begins: dict[str, tuple[str, bool]] = {}
    for unit in units:
        for index, node in enumerate(unit.nodes):
            for path in node.meta.get("opens", ()):
                begins.setdefault(path, (unit.name, index == 0))
    return begins


@dataclass(frozen=True, slots=True)
class _Part:
    """One stage's part of one forward."""

    module: nn.Module
    inputs: tuple[str, ...]
    names: frozenset[str]  # of the parameters and buffers that it uses
    assigners: tuple[Assigner, ...]


class StageModules:
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
    modules: StageModules,
    recording: Recording,
    units: Sequence[Unit],
    bounds: Sequence[int],
    carried: Mapping[fx.Node, int] | None = None,
) -> list[_Part]:
    """A recorded forward as one module per stage; stage s has the units from bound s to bound s+1.

    `carried` has the attributes that a stage fetches for later ones.
    """
    graph = recording.graph
    (returned,) = (node for node in graph.nodes if node.op == "output")
    if not returned.all_input_nodes:
        raise UserError("the model returns no tensor; return at least one that its parameters decide")
    nodes = [[node for unit in units[first:last] for node in unit.nodes] for first, last in itertools.pairwise(bounds)]
    live: list[list[fx.Node]] = []
    for stage in range(len(nodes)):
        before, after = itertools.chain(*nodes[:stage]), itertools.chain(*nodes[stage:])
        fetched = [node for node, home in (carried or {}).items() if home < stage]
        live.append(_live(graph, [*fetched, *before], list(after), returned))
    parts = []
    for stage, own in enumerate(nodes):
        outputs = live[stage + 1] if stage < len(nodes) - 1 else None
        get = partial(modules.get, stage, training=carried is None)
        parts.append(_Slice(modules.model, recording, get).part(own, live[stage], outputs))
    return parts


def _live(graph: fx.Graph, before: Sequence[fx.Node], after: Sequence[fx.Node], returned: fx.Node) -> list[fx.Node]:
    """Values made before a boundary and used after it; attributes and sizes are made again where they are used."""
    later = {*after, returned}
    used = {argument for node in later for argument in _sources(node)}
    made = [*(node for node in graph.nodes if node.op == "placeholder" or _is_samples(node)), *before]
    if not before:
        made = [node for node in made if node.op == "placeholder"]
    return [node for node in made if node in used or (not before and node.op == "placeholder")]


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
            with self._within(context):
                for node in run:
                    self._values[node] = self._copy(node)
        assigners = [self._assign(assign) for assign in self._recording.assigned if assign.value in set(nodes)]
        graph.output(self._returned() if outputs is None else tuple(map(self._value, outputs)))
        module = fx.GraphModule(self._attributes, graph)
        for assigner in assigners:
            assigner.require_buffer(self._model, module)
        names = [name for name, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())]
        return _Part(module, tuple(node.name for node in inputs), frozenset(names), tuple(assigners))

    def _returned(self) -> fx.Node:
        """What the whole model returns."""
        (returned,) = (node for node in self._recording.graph.nodes if node.op == "output")
        leaves = fx.map_arg(returned.args[0], self._value)
        spec = self._recording.returned
        assert spec is not None
        if spec.is_leaf():
            (only,) = leaves
            assert isinstance(only, fx.Node)
            return only
        self._attributes["_returned"] = Returned(spec)
        return self._graph.call_module("_returned", (leaves,))

    def _value(self, node: fx.Node) -> fx.Node:
        if node not in self._values:
            assert node.op == "get_attr" or node.meta.get("is_size"), node
            self._values[node] = self._copy(node)
        return self._values[node]

    def _copy(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and node.target in self._recording.constants:
            self._attributes[str(node.target)] = Constant(self._recording.constants[str(node.target)])
            return self._graph.call_module(str(node.target), ())
        if node.op in ("get_attr", "call_module"):
            self._attributes[str(node.target)] = self._get(str(node.target))
        return self._graph.node_copy(node, self._value)

    def _within(self, context: Context | None) -> Any:
        return nullcontext() if context is None else _Region(self._graph, context)

    def _assign(self, assign: Assign) -> Assigner:
        assigner = Assigner(assign.module, assign.name)
        target = f"_assign_{len([name for name in self._attributes if name.startswith('_assign_')])}"
        self._attributes[target] = assigner
        self._graph.call_module(target, (self._values[assign.value],))
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


class Returned(nn.Module):
    """Makes what the model returns of its tensors."""

    def __init__(self, spec: TreeSpec) -> None:
        super().__init__()
        self._spec = spec

    def forward(self, leaves: Sequence[Any]) -> Any:
        return tree_unflatten(leaves, self._spec)


class Constant(nn.Module):
    """A tensor of the author's that is neither a parameter nor a buffer: no part of the model's state."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._held = (tensor,)

    def forward(self) -> Tensor:
        return self._held[0]


class Assigner(nn.Module):
    """Replaces a buffer, wherever a stage holds it."""

    def __init__(self, module: str, name: str) -> None:
        super().__init__()
        self._path = module
        self._name = name
        self._holders: tuple[nn.Module, ...] = ()

    def require_buffer(self, model: nn.Module, part: nn.Module) -> None:
        """Give a part the buffer that it replaces, also where it does not read it."""
        holder = part
        for step in filter(None, self._path.split(".")):
            if not hasattr(holder, step):
                holder.add_module(step, nn.Module())
            holder = getattr(holder, step)
        if self._name not in holder._buffers:
            holder.register_buffer(self._name, _attribute(model, f"{self._path}.{self._name}".lstrip(".")))

    def bind(self, *parts: nn.Module) -> None:
        """Replace the buffer in these parts."""
        holders = []
        for part in parts:
            try:
                holder = part.get_submodule(self._path)
            except AttributeError:
                continue
            if self._name in holder._buffers:
                holders.append(holder)
        self._holders = tuple(holders)

    def forward(self, value: Tensor) -> None:
        for holder in self._holders:
            setattr(holder, self._name, value)


def _attribute(model: nn.Module, path: str) -> Any:
    value: Any = model
    for step in path.split("."):
        value = getattr(value, step)
    return value


def _homes(parts: Sequence[_Part]) -> dict[str, int]:
    """The stage of each parameter and buffer that one stage uses; an error for running statistics that two use."""
    homes: dict[str, set[int]] = {}
    users: dict[int, tuple[int, str]] = {}
    for stage, part in enumerate(parts):
        named = [*part.module.named_parameters(remove_duplicate=False)]
        buffers = [*part.module.named_buffers(remove_duplicate=False)]
        statistics = [(name, tensor) for name, tensor in buffers if name.endswith("running_mean")]
        for name, tensor in statistics:
            other, other_name = users.setdefault(id(tensor), (stage, name))
            if other != stage:
                raise UserError(
                    f"'{name}' is used by stage {other}{f' (as {other_name})' if other_name != name else ''} and by "
                    f"stage {stage}, on both sides of a cut; move the cut so that one stage holds both uses"
                )
        for name, _ in (*named, *buffers):
            homes.setdefault(name, set()).add(stage)
    return {name: min(stages) for name, stages in homes.items() if len(stages) == 1}


def _evaluation_bounds(
    model: nn.Module, units: Sequence[Unit], cuts: Sequence[str], homes: Mapping[str, int]
) -> list[int]:
    """Where to cut the forward of evaluation, so that every stage evaluates with the parameters that it trains.

    It is cut before the same units, where it has them and that is so; otherwise between the parameters of the stages.
    """
    used = [_stages_used(model, unit, homes) for unit in units]
    names = {unit.name: index for index, unit in enumerate(units)}
    bounds = [0]
    for stage, name in enumerate(cuts, start=1):
        earliest = max(
            (index + 1 for index, stages in enumerate(used) if min(stages, default=stage) < stage), default=0
        )
        latest = min(
            (index for index, stages in enumerate(used) if max(stages, default=-1) >= stage), default=len(units)
        )
        earliest = max(earliest, bounds[-1])
        if earliest > latest:
            raise UserError(
                f"evaluation runs '{units[latest].name}' of stage {stage} before '{units[earliest - 1].name}' of an "
                f"earlier stage, so no stage can begin at '{name}'; cut at another unit"
            )
        bound = names.get(name, earliest)
        bounds.append(bound if earliest <= bound <= latest else earliest)
    return [*bounds, len(units)]


def _impossible(model: nn.Module, recording: Recording, units: Sequence[Unit]) -> dict[str, str]:
    """The units that no stage can begin with: a buffer that changes, or memory that does, would be on both sides."""
    found: dict[str, str] = {}
    changed = _changed_buffers(recording)
    assigned = {made.value: f"{made.module}.{made.name}".lstrip(".") for made in recording.assigned}
    uses = [_tensors_used(model, unit, changed, assigned) for unit in units]
    first: dict[int, tuple[int, str]] = {}
    last: dict[int, int] = {}
    for index, used in enumerate(uses):
        for key, name in used.items():
            first.setdefault(key, (index, name))
            last[key] = index
    for key, (begin, name) in first.items():
        for index in range(begin + 1, last[key] + 1):
            found.setdefault(units[index].name, f"'{name}' would be used on both sides")
    written = {memory for unit in units for node in unit.nodes for memory in node.meta.get("writes", ())}
    (returned,) = (node for node in recording.graph.nodes if node.op == "output")
    position = {node: index for index, unit in enumerate(units) for node in unit.nodes}
    sharing: dict[int, list[tuple[int, int, str]]] = {}  # of memory that is changed: from where to where it is live
    for node in recording.graph.nodes:
        if node.meta.get("memory") in written and (node in position or node.op == "placeholder"):
            until = max((len(units) if user is returned else position.get(user, -1) for user in node.users), default=-1)
            sharing.setdefault(node.meta["memory"], []).append((position.get(node, -1), until, node.name))
    for index, unit in enumerate(units):
        for memory in {memory for node in unit.nodes for memory in node.meta.get("writes", ())}:
            for cut in range(index, -1, -1):
                live = [name for begin, until, name in sharing.get(memory, ()) if begin < cut <= until]
                if len(live) > 1:
                    why = f"'{live[0]}' and '{live[1]}' share memory, which '{unit.name}' changes in place"
                    found.setdefault(units[cut].name, why)
                elif not live:
                    break
    return {unit.name: found[unit.name] for unit in units if unit.name in found}


def _changed_buffers(recording: Recording) -> set[str]:
    """The tensors, by name, that the forward's own code replaces or changes in place."""
    changed = {f"{made.module}.{made.name}".lstrip(".") for made in recording.assigned}
    for node in recording.graph.nodes:
        if node.meta.get("writes"):
            changed |= {str(source.target) for source in node.all_input_nodes if source.op == "get_attr"}
    return changed


@dataclass(frozen=True, slots=True)
class _Shared:
    """A trained parameter that several units use."""

    names: tuple[str, ...]
    units: tuple[int, ...]
    size: int


def _shared(model: nn.Module, units: Sequence[Unit]) -> tuple[_Shared, ...]:
    """The trained parameters that several units use, in the order of the model."""
    users: dict[int, list[int]] = {}
    for index, unit in enumerate(units):
        for key in _trained_by(model, unit):
            users.setdefault(key, []).append(index)
    return tuple(
        _Shared(tuple(names), tuple(users[key]), size)
        for key, (names, size) in _all_names(model).items()
        if len(users.get(key, ())) > 1
    )


def _all_names(model: nn.Module) -> dict[int, tuple[list[str], int]]:
    """Each trained parameter by id: every name of it, and how many numbers it has."""
    found: dict[int, tuple[list[str], int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            found.setdefault(id(parameter), ([], parameter.numel() * (2 if parameter.is_complex() else 1)))[0].append(
                name
            )
    return found


def tied_parameters(
    model: nn.Module, pieces: Sequence[Piece]
) -> tuple[tuple[tuple[str, ...], tuple[int, ...], int], ...]:
    """The trained parameters that several pieces of a model use, by their names: as `Chain.tied` has them."""
    found = []
    held = [{name for name, _ in piece.training.named_parameters(remove_duplicate=False)} for piece in pieces]
    for names, size in _all_names(model).values():
        homes = tuple(stage for stage, own in enumerate(held) if own & set(names))
        if len(homes) > 1:
            found.append((tuple(names), homes, size))
    return tuple(found)


def _trained_by(model: nn.Module, unit: Unit) -> set[int]:
    """The trained parameters that a unit uses, by id."""
    used: set[int] = set()
    for node in unit.nodes:
        for source in (node, *(source for source in node.all_input_nodes if source.op == "get_attr")):
            try:
                value = _attribute(model, str(source.target)) if source.op in ("call_module", "get_attr") else None
            except AttributeError:
                continue  # a constant of the recording
            parameters = list(value.parameters()) if isinstance(value, nn.Module) else [value]
            used |= {id(p) for p in parameters if isinstance(p, nn.Parameter) and p.requires_grad}
    return used


def _tensors_used(
    model: nn.Module, unit: Unit, changed: Collection[str], assigned: Mapping[fx.Node, str]
) -> dict[int, str]:
    """What a unit uses that only one stage can: running statistics, and buffers that the forward's code changes.

    By id, with their names.
    """
    used: dict[int, str] = {}
    for node in unit.nodes:
        if node in assigned:
            used[id(_attribute(model, assigned[node]))] = assigned[node]
        for source in (node, *(source for source in node.all_input_nodes if source.op == "get_attr")):
            if source.op not in ("call_module", "get_attr"):
                continue
            try:
                value = _attribute(model, str(source.target))
            except AttributeError:
                continue  # a constant of the recording
            if isinstance(value, nn.Module):
                statistics = [(name, b) for name, b in value.named_buffers() if name.endswith("running_mean")]
                used |= {id(tensor): f"{source.target}.{name}" for name, tensor in statistics}
            elif str(source.target) in changed:
                used[id(value)] = str(source.target)
    return used


def _carried(
    model: nn.Module, units: Sequence[Unit], bounds: Sequence[int], homes: Mapping[str, int]
) -> dict[fx.Node, int]:
    """The buffers of a stage, which it changes in training, that evaluation reads in a later one."""
    carried: dict[fx.Node, int] = {}
    for stage, (first, last) in enumerate(itertools.pairwise(bounds)):
        for node in (node for unit in units[first:last] for node in unit.nodes):
            for source in node.all_input_nodes:
                home = homes.get(str(source.target), stage) if source.op == "get_attr" else stage
                if home > stage:
                    raise UserError(
                        f"evaluation reads '{source.target}' of stage {home} in stage {stage}, before it arrives; "
                        "cut at another unit"
                    )
                if home < stage:
                    carried[source] = home
    return carried


def _stages_used(model: nn.Module, unit: Unit, homes: Mapping[str, int]) -> set[int]:
    """The stages whose parameters and buffers a unit uses."""
    stages: set[int] = set()
    for node in unit.nodes:
        attributes = [used for used in node.all_input_nodes if used.op == "get_attr"]
        for used in (node, *attributes):
            if used.op not in ("call_module", "get_attr"):
                continue
            target = str(used.target)
            if target in homes and isinstance(_attribute(model, target), nn.Parameter):
                stages.add(homes[target])
            prefix = f"{target}."
            stages |= {stage for name, stage in homes.items() if name.startswith(prefix)}
    return stages
