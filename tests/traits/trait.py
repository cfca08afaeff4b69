"""What a trait is, and the models that most of them change in one place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import relu

CLASSES = 7
WIDTH = 12
SIDE = 8
VOCABULARY = 11
VECTOR = (WIDTH,)
IMAGE = (3, SIDE, SIDE)
SEQUENCE = (5, WIDTH)
TOKENS = (5,)


class Expected(StrEnum):
    """What must come of a trait."""

    EQUAL = "equal"
    EQUAL_OR_REFUSED = "equal or refused"


@dataclass(frozen=True)
class Trait:
    """One model, and what must come of it in up to four stages."""

    name: str
    factory: Callable[[], Any]
    sample: tuple[int, ...] = VECTOR
    is_tokens: bool = False
    expected: Expected = Expected.EQUAL
    draws: bool = False  # random numbers in forward: comparable only where every stage begins with a module's call
    precision: str = "fp64"
    weight_decay: float = 0.0
    notes: str = ""

    @property
    def model(self) -> str:
        """As `--model` names it."""
        return f"{self.factory.__module__}:{self.factory.__name__}"

    def data(self, samples: int, seed: int = 3) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        generator = Generator().manual_seed(seed)
        labels = torch.randint(CLASSES, (samples,), generator=generator)
        if self.is_tokens:
            return torch.randint(VOCABULARY, (samples, *self.sample), generator=generator), labels
        return torch.randn(samples, *self.sample, generator=generator), labels


TRAITS: dict[str, Trait] = {}
OR_REFUSED = Expected.EQUAL_OR_REFUSED


def trait(name: str, **options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a factory to the table."""

    def add(factory: Callable[[], Any]) -> Callable[[], Any]:
        assert name not in TRAITS
        TRAITS[name] = Trait(name, factory, **options)
        return factory

    return add


def row(name: str, function: Callable[..., Any], factory: Any, **options: Any) -> Any:
    """Add a factory that a function was made into, under the function's name or that of its trait."""
    home, called = sys.modules[function.__module__], function.__name__
    if called == "<lambda>":
        called = name.title().replace(" ", "")
        assert not hasattr(home, called)
        setattr(home, called, factory)
    factory.__name__, factory.__qualname__, factory.__module__ = called, called, home.__name__
    return trait(name, **options)(factory)


def inside(name: str, **options: Any) -> Callable[..., Any]:
    """A trait of the code of every block: `function(block, x)` is its forward."""

    def make(function: Callable[..., Any]) -> Any:
        block = type(function.__name__, (Block,), {"forward": function, "__module__": function.__module__})
        return row(name, function, type("", (Stack,), {"block": lambda self, index: block()}), **options)

    return make


def on_model(name: str, **options: Any) -> Callable[..., Any]:
    """A trait of what the author does to a model."""

    def make(function: Callable[..., Any]) -> Any:
        def factory() -> nn.Module:
            model = Stack()
            function(model)
            return model

        return row(name, function, factory, **options)

    return make


def on_blocks(name: str, **options: Any) -> Callable[..., Any]:
    """A trait of what the author does to each block."""
    return lambda function: row(name, function, lambda: _each_block(function), **options)


def _each_block(function: Callable[..., Any]) -> nn.Module:
    model = Stack()
    for block in model.blocks:
        function(block)
    return model


def overriding(base: type[nn.Module], method: str) -> Callable[..., Callable[..., Any]]:
    """Makes traits of one method: `overriding(Stack, "forward")("name")(function)`."""

    def named(name: str, **options: Any) -> Callable[..., Any]:
        return lambda function: row(name, function, type("", (base,), {method: function}), **options)

    return named


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Four blocks and a head; a trait overrides `block`, `step` or `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block(index) for index in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def block(self, index: int) -> nn.Module:
        return Block()

    def step(self, block: nn.Module, x: Any) -> Any:
        return block(x)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = self.step(block, x)
        return self.head(x)


class Normed(nn.Module):
    """A block of images with BatchNorm."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.norm(self.conv(x)))


class Images(nn.Module):
    """Four blocks of images and a head on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block(index, 3 if index == 0 else 4) for index in range(4))
        self.head = nn.Linear(4, CLASSES)

    def block(self, index: int, channels: int) -> nn.Module:
        return Normed(channels)

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.step(block, x)
        return self.head(x.mean((2, 3)))


def through_blocks(model: Stack, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


forward, image_forward = overriding(Stack, "forward"), overriding(Images, "forward")
step, image_step = overriding(Stack, "step"), overriding(Images, "step")  # (model, block, x), of each block
