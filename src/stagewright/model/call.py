"""What a model is called with, and what it returns: trees of tensors.

A model takes `Inputs`: tensors with the samples first, some by position, the others by name. It returns a tensor, or a
tuple, list, dict or registered class of tensors; `leaves_of` has them in order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.torch_internals import tree_leaves


@dataclass(frozen=True, slots=True)
class Form:
    """What a model is called with, without its samples: the shape and type of each tensor."""

    shapes: tuple[tuple[int, ...], ...]  # of one sample
    dtypes: tuple[str, ...]
    names: tuple[str, ...] = ()

    @staticmethod
    def image(side: int, channels: int = 3) -> Form:
        return Form(((channels, side, side),), ("float32",))

    @staticmethod
    def text(tokens: int) -> Form:
        return Form(((tokens,),), ("int64",))

    def zeros(self, samples: int, device: str = "cpu") -> Inputs:
        """Inputs of zeros, which are valid indices."""
        made = zip(self.shapes, self.dtypes, strict=True)
        return Inputs(
            tuple(torch.zeros(samples, *shape, dtype=getattr(torch, kind), device=device) for shape, kind in made),
            self.names,
        )

    def __str__(self) -> str:
        return ", ".join(f"{list(shape)} {kind}" for shape, kind in zip(self.shapes, self.dtypes, strict=True))


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of one call, each with the samples as its first dimension."""

    tensors: tuple[Tensor, ...]
    names: tuple[str, ...] = ()  # forward's parameters that get the last of them; those before go by position

    @staticmethod
    def of(given: Tensor | Inputs) -> Inputs:
        return Inputs((given,)) if isinstance(given, Tensor) else given

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.tensors[0])

    @property
    def form(self) -> Form:
        kinds = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors)
        return Form(tuple(tuple(tensor.shape[1:]) for tensor in self.tensors), kinds, self.names)

    def map(self, make: Callable[[Tensor], Tensor]) -> Inputs:
        return replace(self, tensors=tuple(make(tensor) for tensor in self.tensors))

    def first(self, samples: int) -> Inputs:
        return self.map(lambda tensor: tensor[:samples])

    def repeated(self, samples: int) -> Inputs:
        """The first sample, that many times."""
        return self.map(lambda tensor: torch.cat([tensor[:1]] * samples))

    def call(self, function: Callable[..., Any]) -> Any:
        return call(function, self.tensors, self.names)

    def parameters_of(self, model: nn.Module) -> tuple[str, ...]:
        """The name of forward's parameter that gets each of the tensors; `input` where it has none."""
        count = len(self.tensors) - len(self.names)
        try:
            kinds = inspect.signature(model.forward).parameters.values()
        except (TypeError, ValueError):
            kinds = {}.values()
        by_position = [p.name for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
        found = [name if name != "self" else "input" for name in by_position]
        found += ["input" if not index else f"input_{index}" for index in range(len(found), count)]
        return (*found, *self.names)

    def __str__(self) -> str:
        return ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in self.tensors)


def call(function: Callable[..., Any], values: Sequence[Any], names: Sequence[str]) -> Any:
    """Call a function with values of which the last are given by name."""
    count = len(values) - len(names)
    return function(*values[:count], **dict(zip(names, values[count:], strict=True)))


def leaves_of(tree: Any) -> list[Tensor]:
    """The tensors in what a model returned, in order."""
    return [tree] if isinstance(tree, Tensor) else [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def differentiable(tree: Any) -> list[Tensor]:
    """The tensors in it that have a gradient."""
    return [leaf for leaf in leaves_of(tree) if leaf.requires_grad]


def samples_like(example: Inputs, count: int, weights: torch.dtype, seed: int) -> Inputs:
    """Different samples like the example: its own, and where it has fewer, those moved by noise."""
    generator = torch.Generator().manual_seed(seed)

    def moved(field: Tensor) -> Tensor:
        rows = torch.cat([field] * -(-count // len(field)))[:count].clone()
        if not rows.is_floating_point():
            return rows
        if len(field) >= count and not torch.equal(rows[0], rows[1]):
            return rows.to(weights)
        noise = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
        scale = float(rows.double().std()) if rows.numel() > 1 else 0.0
        return (rows.double() + 0.1 * (scale or 1.0) * noise).to(weights)

    return example.map(moved)
