"""The units of a recorded forward, and which tensors of the model each of them uses.

A unit is one call in the model's forward: of a module, a function or a method; what runs together in another grad mode
or autocast is one unit. `uses_of` has one row of `Use`s for each unit: the only answer to which unit, and so which
stage, uses a tensor.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn

from stagewright.errors import UserError
from stagewright.model.recording import Recording

_CALLS = ("call_module", "call_function", "call_method")
_STATISTICS = "running_mean"  # how the name of what only one stage can keep ends


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of a recorded forward: its name and its nodes."""

    name: str
    nodes: tuple[fx.Node, ...]


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


def beginnings(units: Sequence[Unit]) -> dict[str, tuple[str, bool]]:
    """For each module, the unit that its first call begins in, and whether the unit begins with it."""
    begins: dict[str, tuple[str, bool]] = {}
    for unit in units:
        for index, node in enumerate(unit.nodes):
            for path in node.meta.get("opens", ()):
                begins.setdefault(path, (unit.name, index == 0))
    return begins


@dataclass(frozen=True, slots=True)
class Use:
    """One tensor of a model that a unit uses."""

    name: str  # by the path that the unit takes to it
    tensor: Tensor
    source: fx.Node | None = None  # what reads it for the unit's own code; None: a module has it that the unit calls
    is_assigned: bool = False  # the unit makes what replaces it

    @property
    def is_trained(self) -> bool:
        return isinstance(self.tensor, nn.Parameter) and self.tensor.requires_grad


Uses = tuple[tuple[Use, ...], ...]  # of each unit


def uses_of(model: nn.Module, recording: Recording, units: Sequence[Unit]) -> Uses:
    """What each unit uses of a model's tensors."""
    return tuple(tuple(_uses(model, recording, unit)) for unit in units)


def _uses(model: nn.Module, recording: Recording, unit: Unit) -> Iterator[Use]:
    for node in unit.nodes:
        for made in recording.assigned:
            if made.value is node:
                yield Use(made.path, operator.attrgetter(made.path)(model), is_assigned=True)
        for source in (node, *(source for source in node.all_input_nodes if source.op == "get_attr")):
            path = str(source.target)
            if source.op not in ("call_module", "get_attr") or path in recording.constants:
                continue
            found = operator.attrgetter(path)(model)
            if isinstance(found, nn.Module):
                held = (*found.named_parameters(remove_duplicate=False), *found.named_buffers(remove_duplicate=False))
                yield from (Use(f"{path}.{name}", tensor) for name, tensor in held)
            else:
                yield Use(path, found, source)


def shared_by(uses: Uses) -> dict[int, tuple[int, ...]]:
    """The trained parameters that several units use, by id, with the units' numbers."""
    users: dict[int, dict[int, None]] = {}
    for index, row in enumerate(uses):
        for use in row:
            if use.is_trained:
                users.setdefault(id(use.tensor), {})[index] = None
    return {key: tuple(units) for key, units in users.items() if len(units) > 1}


def homes_of(uses: Uses, bounds: Sequence[int]) -> dict[str, int]:
    """The stage of each parameter and buffer that one stage alone uses; stage s has the units from bound s to s+1."""
    homes: dict[str, set[int]] = {}
    for stage, (first, last) in enumerate(itertools.pairwise(bounds)):
        for use in itertools.chain(*uses[first:last]):
            homes.setdefault(use.name, set()).add(stage)
    return {name: min(stages) for name, stages in homes.items() if len(stages) == 1}


def evaluation_bounds(units: Sequence[Unit], uses: Uses, cuts: Sequence[str], homes: Mapping[str, int]) -> list[int]:
    """Where to cut the forward of evaluation, so that every stage evaluates with the parameters that it trains.

    It is cut before the same units, where it has them and that is so; otherwise between the parameters of the stages.
    """
    used = [{homes[use.name] for use in row if use.name in homes and _stays_home(use)} for row in uses]
    names = {unit.name: index for index, unit in enumerate(units)}
    bounds = [0]
    for stage, name in enumerate(cuts, start=1):
        before = [index + 1 for index, stages in enumerate(used) if min(stages, default=stage) < stage]
        behind = [index for index, stages in enumerate(used) if max(stages, default=-1) >= stage]
        earliest, latest = max([bounds[-1], *before]), min([len(units), *behind])
        if earliest > latest:
            raise UserError(
                f"evaluation runs '{units[latest].name}' of stage {stage} before '{units[earliest - 1].name}' of an "
                f"earlier stage, so no stage can begin at '{name}'; cut at another unit"
            )
        bound = names.get(name, earliest)
        bounds.append(bound if earliest <= bound <= latest else earliest)
    return [*bounds, len(units)]


def _stays_home(use: Use) -> bool:
    """Whether only the stage that trains with a tensor can evaluate with it: a buffer that code reads may be sent."""
    return not use.is_assigned and (use.source is None or isinstance(use.tensor, nn.Parameter))


def carried_buffers(uses: Uses, bounds: Sequence[int], homes: Mapping[str, int]) -> dict[fx.Node, int]:
    """The buffers of a stage, which it changes in training, that evaluation reads in a later one; and that stage."""
    carried: dict[fx.Node, int] = {}
    for stage, (first, last) in enumerate(itertools.pairwise(bounds)):
        for use in itertools.chain(*uses[first:last]):
            home = homes.get(use.name, stage) if use.source is not None else stage
            if home > stage:
                raise UserError(
                    f"evaluation reads '{use.name}' of stage {home} in stage {stage}, before it arrives; "
                    "cut at another unit"
                )
            if home < stage and use.source is not None:
                carried[use.source] = home
    return carried


def impossible_beginnings(recording: Recording, units: Sequence[Unit], uses: Uses) -> dict[str, str]:
    """The units that no stage can begin with: a buffer that changes, or memory that does, would be on both sides."""
    changed = {made.path for made in recording.assigned}
    for node in recording.graph.nodes:
        if node.meta.get("writes"):
            changed |= {str(source.target) for source in node.all_input_nodes if source.op == "get_attr"}
    spans: dict[int, tuple[int, int, str]] = {}  # from its first use to its last
    for index, row in enumerate(uses):
        for use in row:
            is_inside = use.source is None and not use.is_assigned
            if use.name.endswith(_STATISTICS) or (not is_inside and use.name in changed):
                first, _, name = spans.get(id(use.tensor), (index, index, use.name))
                spans[id(use.tensor)] = (first, index, name)
    found: dict[str, str] = {}
    for first, last, name in spans.values():
        for unit in units[first + 1 : last + 1]:
            found.setdefault(unit.name, f"'{name}' would be used on both sides")
    for name, why in _shared_memory(recording, units):
        found.setdefault(name, why)
    return {unit.name: found[unit.name] for unit in units if unit.name in found}


def _shared_memory(recording: Recording, units: Sequence[Unit]) -> Iterator[tuple[str, str]]:
    """Units before which two values are live that share memory which a later unit changes; and what to say."""
    position = {node: index for index, unit in enumerate(units) for node in unit.nodes}
    writes = [{memory for node in unit.nodes for memory in node.meta.get("writes", ())} for unit in units]
    written = set().union(*writes)
    sharing: dict[int, list[tuple[int, int, str]]] = {}  # of memory that is changed: from where to where it is live
    for node in recording.graph.nodes:
        if node.meta.get("memory") in written and (node in position or node.op == "placeholder"):
            until = max(
                (len(units) if user is recording.output else position.get(user, -1) for user in node.users), default=-1
            )
            sharing.setdefault(node.meta["memory"], []).append((position.get(node, -1), until, node.name))
    for index, unit in enumerate(units):
        for memory in writes[index]:
            for cut in range(index, -1, -1):
                live = [name for begin, until, name in sharing.get(memory, ()) if begin < cut <= until]
                if len(live) > 1:
                    why = f"'{live[0]}' and '{live[1]}' share memory, which '{unit.name}' changes in place"
                    yield units[cut].name, why
                elif not live:
                    break
