"""Cuts a model between the blocks of its longest list of like blocks, where its own code can't be recorded.

A stage runs the author's forward as it is, from the model's input on. Blocks of earlier stages return what arrived;
once the stage's own last block has returned, the stage ends, and what it returned is what the next stage receives:

    stage 0:   stem  block 0  block 1 ─► end                      the author's code up to there
    stage 1:   stem  ( . )    ( <- )  block 2  block 3 ─► end     block 1 returns what arrived
    stage 2:   stem  ( . )    ( . )   ( . )    ( <- )  head       and the model's output

Whatever a stage does before something has arrived is only for the author's code to have its variables: random numbers
drawn there are drawn again, and buffers changed there are put back. A parameter that this code trains is tied: each
stage that uses it has it. A buffer that two stages change is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from stagewright.errors import UserError
from stagewright.model.call import Inputs, call
from stagewright.model.pieces import Piece, modes_of, steps
from stagewright.model.standin import Build, analysing, copied, kept_generators, stand_ins, unchanged_state
from stagewright.torch_internals import (
    TreeSpec,
    buffers_in,
    parameters_in,
    share_tables,
    tree_flatten,
    tree_unflatten,
)

_FEWEST = 2


def find_blocks(twin: nn.Module, example: Inputs, context: Callable[[], Any], device: str) -> tuple[str, ...]:
    """Watch a forward of a model's twin, and find the list of like blocks with the most parameters, by their paths.

    Every block of it is called once, in the order of the list.
    """
    lists = [
        tuple(f"{path}.{name}" if path else name for name, _ in module.named_children())
        for path, module in twin.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    ]
    calls: list[str] = []
    for path in {path for paths in lists for path in paths}:
        twin.get_submodule(path).register_forward_pre_hook(lambda module, given, path=path: calls.append(path))
    with analysing(), on_stand_ins((twin,), example, device) as given, context():
        twin.train()
        given.call(twin)
    found = []
    for paths in lists:
        kinds = {type(twin.get_submodule(path)) for path in paths}
        if len(paths) >= _FEWEST and len(kinds) == 1 and tuple(p for p in calls if p in paths) == paths:
            size = sum(p.numel() for path in paths for p in twin.get_submodule(path).parameters())
            found.append((size, len(paths), paths))
    return max(found)[2] if found else ()


@contextmanager
def on_stand_ins(roots: Sequence[nn.Module], example: Inputs, device: str) -> Iterator[Inputs]:
    """Put copies of parameters and buffers in place; yields two samples of the example, on the device.

    Not fake ones: the code of a model that is cut between blocks may read values.
    """
    with stand_ins(roots, partial(copied, device=device)):
        yield example.first(1).map(partial(copied, device=device)).repeated(2)


class _Ended(Exception):
    """The stage's own last block has returned; `output` is what it returned."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class BlockStage(nn.Module):
    """The author's model with the blocks of other stages stubbed: the blocks from `first` to `last` run.

    Its modules, parameters and buffers are the model's, by the same names. `forward` takes the model's inputs and what
    the block before `first` returned; it returns those inputs and what its own last block returned, or the model's
    output.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Sequence[str],
        first: int,
        last: int,
        specs: dict[tuple[int, bool], TreeSpec],
        inputs: int,
        names: tuple[str, ...],
    ) -> None:
        super().__init__()
        share_tables(self, model)
        self._whole = (model,)  # not a submodule: the names stay the model's
        self._specs = specs  # of what a block returned, by block and mode; shared by all stages
        self._first, self._last = first, last
        self._inputs, self._names = inputs, names  # how many the model takes, and which of them by name
        self._arrived: tuple[Tensor, ...] = ()
        self._restore: Callable[[], None] = lambda: None
        self.own = tuple(model.get_submodule(path) for path in paths[first:last])
        for index, path in enumerate(paths):
            block = model.get_submodule(path)
            if index < first:
                block.forward = partial(self._stub, index)
            elif index == last - 1 and last < len(paths):
                block.forward = partial(self._end, block.forward)
            elif index >= last:
                block.forward = partial(_overrun, paths[last - 1], path)

    @property
    def whole(self) -> nn.Module:
        """The author's model, whose forward the stage runs."""
        return self._whole[0]

    def forward(self, *values: Any) -> Any:
        model = self.whole
        model.training = self.training
        given, self._arrived = values[: self._inputs], values[self._inputs :]
        self._restore = _restorer(model) if self._first else lambda: None
        try:
            return call(model, given, self._names)
        except _Ended as end:
            leaves, self._specs[self._last - 1, self.training] = tree_flatten(end.output)
            return (*given, *leaves)
        finally:
            self._arrived = ()

    def _stub(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Return what arrived, in place of the last block before the stage; copies of it in place of earlier ones."""
        values: list[Any] = list(self._arrived)
        if index == self._first - 1:
            self._restore()
        else:
            values = [value.detach().clone() if isinstance(value, Tensor) else value for value in values]
        return tree_unflatten(values, self._specs[self._first - 1, self.training])

    @staticmethod
    def _end(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise _Ended(forward(*args, **kwargs))


def _overrun(last: str, path: str, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"the model's forward called '{path}' without '{last}' for these samples, so no stage can end there"
    )


def compiled(module: nn.Module) -> nn.Module:
    """A compiled stage; one that runs the author's own code has its blocks compiled, each by itself."""
    if not isinstance(module, BlockStage):
        return cast(nn.Module, torch.compile(module, dynamic=False))  # which its types don't tell
    for block in module.own:
        block.compile(dynamic=False)
    return module


def cut_between(
    twin_of: Build,
    paths: Sequence[str],
    bounds: Sequence[int],
    example: Inputs,
    context: Callable[[], Any],
    device: str,
) -> tuple[Piece, ...]:
    """One piece per range of blocks.

    A stage has the parameters that its own blocks and its part of the author's code train; what trains them is found by
    running all stages once, on copies. `twin_of` copies the model.
    """
    specs: dict[tuple[int, bool], TreeSpec] = {}
    twins = [twin_of() for _ in bounds[1:]]
    inputs, modes = example.parameters_of(twins[0]), modes_of(twin_of())
    stages = [
        BlockStage(twin, paths, first, last, specs, len(example.tensors), example.names)
        for twin, (first, last) in zip(twins, itertools.pairwise(bounds), strict=True)
    ]
    pieces = [
        Piece(stage, stage, inputs, inputs, paths[first], modes) for stage, first in zip(stages, bounds, strict=False)
    ]
    homes: dict[str, set[int]] = {}  # the stages that train a parameter, or that change a buffer
    with analysing(), unchanged_state(twins):
        for training in (False, True):
            for stage in stages:
                stage.train(training)
            with on_stand_ins(stages, example, device) as given, torch.set_grad_enabled(training):
                counts = _run_all(pieces, given, context, homes, training=training)
    found = []
    for index, (stage, piece, count) in enumerate(zip(stages, pieces, counts, strict=True)):
        _hide(stage, index, homes, paths, bounds[index : index + 2])
        names = (*inputs, *(f"value_{number}" for number in range(count - len(inputs))))
        found.append(replace(piece, inputs=names, evaluation_inputs=names))
    return tuple(found)


def _run_all(
    pieces: Sequence[Piece],
    given: Inputs,
    context: Callable[[], Any],
    homes: dict[str, set[int]],
    *,
    training: bool,
) -> list[int]:
    """Run all stages, note which train each parameter and change each buffer; returns how many values enter each."""
    counts = []
    for step in steps(pieces, given.tensors, training=training):
        counts.append(len(step.entered))
        before = {name: (buffer, buffer.detach().clone()) for name, buffer in step.module.named_buffers()}
        with context():
            step.run()
        for name, buffer in step.module.named_buffers():
            if name not in before or buffer is not before[name][0] or not torch.equal(buffer, before[name][1]):
                _note_home(homes, name, step.stage)
        if training:
            step.backward()
            for name, parameter in step.module.named_parameters(remove_duplicate=False):  # under each of its names
                if parameter.grad is not None:
                    homes.setdefault(name, set()).add(step.stage)
            step.module.zero_grad()
    return counts


def _note_home(homes: dict[str, set[int]], name: str, stage: int) -> None:
    if homes.setdefault(name, {stage}) != {stage}:
        raise UserError(
            f"'{name}' is changed by stage {min(homes[name])} and by stage {stage}, on both sides of a cut; "
            "use one stage, or move the cut so that one stage holds both uses"
        )


def _hide(
    stage: BlockStage, index: int, homes: Mapping[str, set[int]], paths: Sequence[str], bounds: Sequence[int]
) -> None:
    """Leave a stage the parameters it trains, and the buffers that no other stage changes.

    The others become plain attributes, without memory in foreign blocks.
    """
    foreign = [path for number, path in enumerate(paths) if not bounds[0] <= number < bounds[1]]
    for path, module in stage.named_modules():
        is_foreign = any(path == block or path.startswith(f"{block}.") for block in foreign)
        held = vars(module if path else stage.whole)
        parameters, buffers = parameters_in(module), buffers_in(module)
        for name, parameter in list(parameters.items()):
            if parameter is not None and index not in homes.get(f"{path}.{name}" if path else name, ()):
                held[name] = parameter.detach().to("meta") if is_foreign else parameter.detach()
                del parameters[name]
        for name, buffer in list(buffers.items()):
            if is_foreign:
                held[name] = buffers.pop(name)
            elif buffer is not None and index not in homes.get(f"{path}.{name}" if path else name, {index}):
                held[name] = buffer.detach().clone()
                del buffers[name]


def _restorer(model: nn.Module) -> Callable[[], None]:
    """What puts generators and buffers back to what they are now."""
    restore_generators = kept_generators()
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]

    def restore() -> None:
        restore_generators()
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                buffers_in(module)[name] = buffer
                if not torch.equal(buffer, before):
                    buffer.copy_(before)

    return restore
