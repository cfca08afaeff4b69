"""A model as a chain of units, and the ways to cut it into stages.

A chain is made once for each model, which records its forward in training and in evaluation, and handed on: `by` has
the same model cut in another way, `on` another build of it, and neither records it again. `cut` returns one `Piece`
for each stage.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from enum import StrEnum

import torch
from torch import Tensor, nn

from stagewright.errors import UserError, did_you_mean, first_line
from stagewright.model.blocks import cut_between, find_blocks
from stagewright.model.call import Inputs
from stagewright.model.pieces import Piece, whole_piece
from stagewright.model.recording import Untraceable
from stagewright.model.slice import slices
from stagewright.model.standin import Build, analysing, attribute_marks, twin_of
from stagewright.model.trace import Context, Trace, trace
from stagewright.model.units import Unit, beginnings, impossible_beginnings, shared_by, units_of, uses_of

Tied = tuple[tuple[str, ...], tuple[int, ...], int]  # all names of a parameter, the stages that use it, its size


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
        context: Context = nullcontext,
        device: str = "cpu",
        way: Way | None = None,
        build: Build | None = None,
        is_plain: bool = False,
    ) -> None:
        """`is_plain`: its code is known to run the same for every batch, and to draw from torch's generator alone.

        Such a model is not traced where it stays whole. `build` makes the model anew, where it can't be copied.
        """
        self.model, self.example = model, Inputs.of(example)
        self._context, self._device, self._build = context, device, build
        self.trace: Trace | None = None
        self.trace_error: str | None = None  # why the model's own code was not recorded
        self.draws: frozenset[str] = frozenset()  # the generators, beside torch's, that the forward draws from
        self.leaks: tuple[str, ...] = ()  # modules that the forward of a copy has changed: it holds on to this one
        self._varies = False
        if not (is_plain and way is Way.WHOLE):
            self._record(on_values=way is Way.VALUES)
        self._choose(way)

    def by(self, way: Way) -> Chain:
        """The same model cut in another way; only `Way.VALUES` needs a recording of its own."""
        if way is Way.VALUES:
            return Chain(
                self.model, self.example, context=self._context, device=self._device, way=way, build=self._build
            )
        other = copy.copy(self)
        other._choose(way)
        return other

    def on(self, model: nn.Module, build: Build | None = None) -> Chain:
        """The chain of another build of the same model, whose tensors may have another precision or be elsewhere."""
        other = copy.copy(self)
        other.model, other._build = model, build or self._build
        other._look_up()
        return other

    @property
    def is_conditional(self) -> bool:
        """Whether what runs, and so which parameters get a gradient, may differ between batches."""
        return self._varies or self.way is Way.BLOCKS

    @property
    def is_in_single(self) -> bool:
        """Whether its forward was recorded as a CPU runs it in single precision, without autocast."""
        with self._context():
            is_cast = torch.is_autocast_enabled(self._device)
        kinds = {parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point()}
        return self._device == "cpu" and not is_cast and kinds == {torch.float32}

    def _record(self, *, on_values: bool) -> None:
        """Record the model's forward, and note what its code does."""
        model, context, device = self.model, self._context, self._device
        marks = {path: attribute_marks(module) for path, module in model.named_modules()}
        try:
            self.trace = trace(
                model, self.example, context=context, device=device, on_values=on_values, build=self._build
            )
        except Untraceable as error:
            self.trace_error, self.draws, self._varies = str(error), error.draws, True
        else:
            self.draws = self.trace.training.draws
            self._varies = bool(self.trace.training.whole or self.draws)
        self.leaks = tuple(path for path, module in model.named_modules() if attribute_marks(module) != marks[path])
        if self.leaks:
            self.trace = None
            self.trace_error = f"its forward changes '{self.leaks[0] or type(model).__name__}' through a copy"

    def _choose(self, way: Way | None) -> None:
        """Set the way and the units."""
        whole = self.trace.training.whole if self.trace else {"": ""}
        blocks: tuple[str, ...] = ()
        if way is Way.BLOCKS or (way is None and whole and not self.example.tensors[0].is_meta):
            try:
                blocks = find_blocks(self._twin(), self.example, self._context, self._device)
            except Exception:  # the model's code may raise anything, and says so when it is trained
                blocks = ()
        is_inside = any(path == "" or (blocks and blocks[0].startswith(f"{path}.")) for path in whole)
        is_between = bool(blocks) and (way is Way.BLOCKS or is_inside)  # a module that is kept whole would hide them
        is_recorded = not is_between and way in (None, Way.GRAPH, Way.VALUES) and self.trace is not None
        self.recorded: tuple[Unit, ...] = units_of(self.trace.training) if self.trace and is_recorded else ()
        self.units = blocks if is_between else tuple(unit.name for unit in self.recorded)
        self.way = Way.BLOCKS if is_between else (way or Way.GRAPH) if self.recorded else Way.WHOLE
        self.units = self.units or (type(self.model).__name__,)
        self._begins = beginnings(self.recorded) if self.recorded else {unit: (unit, True) for unit in self.units}
        self._look_up()

    def _look_up(self) -> None:
        """Note which units use which of the model's tensors."""
        self.impossible: dict[str, str] = {}  # the units that no stage can begin with, and why
        self._uses = uses_of(self.model, self.trace.training, self.recorded) if self.trace else ()
        if self.trace and self.recorded:
            self.impossible = impossible_beginnings(self.trace.training, self.recorded, self._uses)

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

    def tied(self, cuts: Sequence[str]) -> tuple[Tied, ...]:
        """The trained parameters that several stages of a cut use, in the order of the model."""
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
        stages = {
            key: {sum(unit >= bound for bound in bounds) for unit in units}
            for key, units in shared_by(self._uses).items()
        }
        return _tied(self.model, stages)

    def by_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """The first unit of each later stage, from unit names or the names of modules whose call begins there."""
        return tuple(self._find(name) for name in names)

    def cut(self, cuts: Sequence[str]) -> tuple[Piece, ...]:
        """The model as one piece per stage; `cuts` name the first unit of each stage after the first."""
        if not cuts:
            return (whole_piece(self.model, self.example.parameters_of(self.model), self.example.names),)
        self._require_cuttable(len(cuts) + 1)
        bounds = [0, *(self.units.index(name) for name in cuts), len(self.units)]
        for stage, (first, last) in enumerate(itertools.pairwise(bounds)):
            if first >= last:
                raise UserError(
                    f"cut {','.join(cuts)} leaves stage {stage} without units; the units run in the order "
                    f"{self.units[0]} ... {self.units[-1]}"
                )
        if self.way is Way.BLOCKS:
            return cut_between(self._twin, self.units, bounds, self.example, self._context, self._device)
        for name in cuts:
            if name in self.impossible:
                raise UserError(
                    f"--cut or the plan file can't cut before '{name}': {self.impossible[name]}; cut elsewhere"
                )
        assert self.trace is not None
        return slices(self.model, self.trace, self.recorded, self._uses, cuts)

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


def tied_parameters(model: nn.Module, pieces: Sequence[Piece]) -> tuple[Tied, ...]:
    """The trained parameters that several pieces of a model use, by their names: as `Chain.tied` has them."""
    names = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    stages: dict[int, set[int]] = {}
    for stage, piece in enumerate(pieces):
        for name, _ in piece.training.named_parameters(remove_duplicate=False):
            if name in names:
                stages.setdefault(names[name], set()).add(stage)
    return _tied(model, stages)


def _tied(model: nn.Module, stages: dict[int, set[int]]) -> tuple[Tied, ...]:
    """What several stages use of a model's trained parameters, from the stages that use each, by id."""
    found: dict[int, Tied] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        homes = stages.get(id(parameter), ())
        if parameter.requires_grad and len(homes) > 1:
            size = parameter.numel() * (2 if parameter.is_complex() else 1)
            names = found[id(parameter)][0] if id(parameter) in found else ()
            found[id(parameter)] = ((*names, name), tuple(sorted(homes)), size)
    return tuple(found.values())
