"""A model's pieces, one for each stage, and the one interpreter that runs them in this process.

`steps` goes from piece to piece: whoever iterates looks at what enters one, runs it, and looks at what it returned. In
one graph values go on as they are; apart, as between ranks, what crosses is a copy and a new leaf:

    forward    inputs -> piece 0 -> (copies) -> piece 1 -> (copies) -> piece 2 -> output
    backward             piece 0 <- gradients <- piece 1 <- gradients <- piece 2 <- gradients of the output
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.model.call import call, differentiable
from stagewright.torch_internals import backward as backward_from

Modes = dict[str, tuple[bool, bool]]  # of each module: whether it trains in training, and in evaluation


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


def modes_of(model: nn.Module) -> Modes:
    """The mode of every module after the model's own `train` and `eval`, which may be overridden."""
    model.eval()
    evaluation = {path: module.training for path, module in model.named_modules()}
    model.train()
    return {path: (module.training, evaluation[path]) for path, module in model.named_modules()}


@dataclass(slots=True)
class Step:
    """One piece and what enters it; once it was run, also what it returned."""

    stage: int
    piece: Piece
    module: nn.Module  # the piece's, for training or for evaluation
    names: tuple[str, ...]  # of what enters
    entered: tuple[Any, ...]
    is_apart: bool
    outputs: list[Any] = field(default_factory=list)  # of the last run alone

    @property
    def output(self) -> Any:
        if not self.outputs:
            raise RuntimeError(f"the piece from '{self.piece.first_unit}' on was visited but not run")
        return self.outputs[0]

    def run(self) -> Any:
        given = self.entered
        if self.is_apart:  # a piece may change in place what it gets, which a leaf does not allow
            given = tuple(value.clone() if _is_differentiable(value) else value for value in given)
        self.outputs = [call(self.module, given, self.piece.names)]
        return self.output

    def backward(self, gradients: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Backward from all that it returned, by default from ones; the gradients of what entered, apart."""
        roots = differentiable(self.output)
        if roots:
            backward_from(roots, [*map(torch.ones_like, roots)] if gradients is None else gradients)
        leaves = [value for value in self.entered if _is_differentiable(value)]
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def steps(pieces: Sequence[Piece], inputs: Sequence[Any], *, training: bool, is_apart: bool = True) -> Iterator[Step]:
    """Each piece, before it runs, with what enters it; whoever iterates runs it."""
    values = tuple(inputs)
    for stage, piece in enumerate(pieces):
        module, names = (piece.training, piece.inputs) if training else (piece.evaluation, piece.evaluation_inputs)
        step = Step(stage, piece, module, names, values, is_apart)
        yield step
        values = step.output if isinstance(step.output, tuple) else (step.output,)
        if is_apart:
            values = tuple(map(_crossed, values))


def run(pieces: Sequence[Piece], inputs: Sequence[Any], *, training: bool) -> list[Step]:
    """Run all pieces forward, apart."""
    done = []
    for step in steps(pieces, inputs, training=training):
        step.run()
        done.append(step)
    return done


def backward(done: Sequence[Step], gradients: Sequence[Tensor]) -> None:
    """Run all pieces backward: each gets the gradients of what the next one took from it."""
    for step in reversed(done):
        gradients = step.backward(gradients)


def _crossed(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
