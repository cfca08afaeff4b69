"""Traces a model: its forward in training and in evaluation as recorded graphs, of copies of the model.

Each forward runs for two numbers of samples. What differs between the two becomes an expression of the number of
samples, `affine`, so that the graph holds for any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx, nn
from torch.fx.node import map_aggregate

from stagewright.errors import first_line
from stagewright.model.call import Inputs
from stagewright.model.pieces import Modes, modes_of
from stagewright.model.record import Recorder
from stagewright.model.recording import Recording, Untraceable
from stagewright.model.standin import Build, Make, analysing, copied, fake_tensors, stand_ins, twin_of

Context = Callable[[], AbstractContextManager[Any]]
SIZES = (2, 3)  # the numbers of samples that a forward is recorded with
_CHEAP = 5 * 10**10  # parameters x elements of a sample, of which a recording runs a few


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
            example = example.map(lambda tensor: tensor.to("meta"))
            with _forward_errors():  # only for planning: as many samples as the example has
                recording = Recorder(twin, {}, {}).run(example, True, context)
            return Trace(recording, recording, modes)
        fake = partial(_on_fake_tensors, context=context, device=device, modes=modes)
        if not on_values and not is_cheap(twin, example, device):
            if (found := fake(twin, example)) is not None:
                return found
            twin, on_values = twin_of(model, build), True
        copy = partial(copied, device=device)
        real: Trace | None = None
        failed: Untraceable | None = None
        try:
            with _forward_errors():
                real = _trace(twin, example.map(copy), context, copy, modes)
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


@contextmanager
def _forward_errors() -> Iterator[None]:
    try:
        yield
    except Untraceable:
        raise
    except Exception as error:  # the model's code may raise anything
        raise Untraceable(f"its forward raised {type(error).__name__}: {first_line(error, 160)}") from error


def is_cheap(model: nn.Module, example: Inputs, device: str, share: float = 1.0) -> bool:
    """Whether a forward of a few samples takes less time than to import what fake tensors need."""
    parameters = list(model.parameters())
    if device != "cpu":
        return bool(parameters) and parameters[0].device.type == device  # this process computes on the GPU anyway
    largest = max(1, *(tensor[:1].numel() for tensor in example.tensors))
    return sum(parameter.numel() for parameter in parameters) * largest * share <= _CHEAP


def _trace(twin: nn.Module, example: Inputs, context: Context, make: Make, modes: Modes) -> Trace:
    held = [*twin.named_parameters(), *twin.named_buffers()]
    names = {id(tensor): name for name, tensor in held}
    with stand_ins((twin,), make):
        training = record(twin, example, training=True, context=context, names=names)
        evaluation = record(twin, example, training=False, context=context, keep=training.whole, names=names)
    return Trace(training, evaluation, modes)


def record(
    model: nn.Module,
    example: Inputs,
    *,
    training: bool,
    context: Context = nullcontext,
    keep: Mapping[str, str] | None = None,
    names: Mapping[int, str],
) -> Recording:
    """Record a model's forward on samples like the example; `keep` names modules to keep whole, and why.

    `names` has the names of tensors, by id, that stand-ins have replaced: the author's code may hold them elsewhere.
    `model` must be a copy: its forward runs, on tensors that may be fake.
    """
    keep = dict(keep or {})
    for _ in range(len(list(model.modules())) + 1):
        first, second = _recorded_twice(model, keep, names, example, training, context)
        odd = _generalize(first.graph, second.graph)
        if odd is None:
            if any(second.constants.get(name) is not held for name, held in first.constants.items()):
                raise Untraceable("the forward makes a tensor in a way that torch does not show")
            return first
        if not odd:
            raise Untraceable("the forward does something else for 2 samples than for 3")
        kind = type(model.get_submodule(odd))  # what one module can't do, all others of its class can't
        alike = [path for path, module in model.named_modules() if type(module) is kind and path]
        keep |= dict.fromkeys(alike, "it does something else for 2 samples than for 3")
    raise Untraceable("the forward does something else each time")


def _recorded_twice(
    model: nn.Module,
    keep: Mapping[str, str],
    names: Mapping[int, str],
    example: Inputs,
    training: bool,
    context: Context,
) -> tuple[Recording, Recording]:
    """Two recordings, for different numbers of samples; what prepared itself in the first is recorded again."""

    def run(size: int) -> Recording:
        return Recorder(model, keep, names).run(example.repeated(size), training, context)

    first: Recording | None = None
    try:
        first = run(SIZES[0])
    except Untraceable as error:
        if not error.is_preparing:
            raise
    second = run(SIZES[1])
    return run(SIZES[0]) if first is None or first.is_preparing else first, second


def _generalize(graph: fx.Graph, other: fx.Graph) -> str | None:
    """Make a graph hold for any number of samples, by comparing it with the same forward for another number.

    Returns None, or the path of the module whose code does something else for each number.
    """
    nodes, others = list(graph.nodes), list(other.nodes)
    twins = dict(zip(others, nodes, strict=False))
    merged: list[tuple[fx.Node, Any, Any]] = []
    for node, twin in zip(nodes, others, strict=False):
        try:
            if (node.op, node.name, node.target) != (twin.op, twin.name, twin.target):
                raise _Odd
            merged.append((node, _merge(node.args, twin.args, twins), _merge(node.kwargs, twin.kwargs, twins)))
        except _Odd:
            return _owner(node)
    if len(nodes) != len(others):
        return _owner(max(nodes, others, key=len)[min(len(nodes), len(others))])
    sizes = _Sizes(graph)
    for node, args, kwargs in merged:
        node.args, node.kwargs = map_aggregate(args, sizes.node_of), map_aggregate(kwargs, sizes.node_of)
    return None


def affine(samples: int, factor: int, offset: int) -> int:
    """A number that a forward derives from its number of samples."""
    return factor * samples + offset


@dataclass(frozen=True, slots=True)
class _Size:
    factor: int
    offset: int


class _Odd(Exception):
    """Two recordings differ by more than the number of samples explains."""


def _owner(node: fx.Node) -> str:
    return str(node.meta.get("owner", ""))


def _merge(one: Any, other: Any, twins: Mapping[fx.Node, fx.Node]) -> Any:
    """One argument of two: of the same call, for different numbers of samples."""
    merge = partial(_merge, twins=twins)
    if isinstance(one, fx.Node):
        if not isinstance(other, fx.Node) or twins.get(other) is not one:
            raise _Odd
        return one
    if isinstance(one, tuple | list) and isinstance(other, tuple | list) and len(one) == len(other):
        merged = map(merge, one, other)
        if hasattr(one, "_fields"):
            return type(one)(*merged)
        return tuple(merged) if isinstance(one, tuple) else list(merged)
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return {key: merge(one[key], other[key]) for key in one}
    if isinstance(one, slice) and isinstance(other, slice):
        return slice(*(merge(getattr(one, name), getattr(other, name)) for name in ("start", "stop", "step")))
    if type(one) is int and type(other) is int and one != other:
        factor = (other - one) // (SIZES[1] - SIZES[0])
        return _Size(factor, one - factor * SIZES[0])
    if type(one) is not type(other) or (one != other and not (one != one and other != other)):
        raise _Odd
    return one


class _Sizes:
    """The nodes of a graph that compute sizes from the number of samples, made where they are first used."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._samples: fx.Node | None = None
        self._made: dict[_Size, fx.Node] = {}

    def node_of(self, value: Any) -> Any:
        """A size as a node; anything else as it is."""
        if not isinstance(value, _Size):
            return value
        if self._samples is None:
            source = next(node for node in self._graph.nodes if node.op == "placeholder")
            with self._graph.inserting_after(source):
                self._samples = self._graph.call_method("size", (source, 0))
            self._samples.meta = {"is_size": True}
        if value not in self._made:
            with self._graph.inserting_after(self._samples):
                made = self._graph.call_function(affine, (self._samples, value.factor, value.offset))
            made.meta = {"is_size": True}
            self._made[value] = made
        return self._made[value]
