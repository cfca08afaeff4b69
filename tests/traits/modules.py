"""Traits of how modules are written and called."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.traits.trait import CLASSES, OR_REFUSED, WIDTH, Block, Stack, forward, step, trait


@trait("scripted blocks")
class Scripted(Stack):
    def block(self, index: int) -> nn.Module:
        return torch.jit.script(Block())


@trait("activations by partial and lambda")
class Partials(Stack):
    class Activated(Block):
        def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.activation = activation

        def forward(self, x: Tensor) -> Tensor:
            return self.activation(super().forward(x))

    def block(self, index: int) -> nn.Module:
        choices = (functools.partial(torch.clamp, min=-1.0), lambda x: x * x.sigmoid(), torch.sin, Tensor.tanh)
        return self.Activated(choices[index])


@trait("a model that can't be copied", expected=OR_REFUSED)
class NoCopies(Stack):
    def __deepcopy__(self, memo: dict[int, Any]) -> NoCopies:
        raise TypeError("this model can't be copied")


@trait("a lock and a generator as attributes", expected=OR_REFUSED)
class Unpicklable(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.numbers: Iterator[int] = (number for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return super().forward(x)


@trait("forward replaced on the instance")
def replaced_forward() -> nn.Module:
    model = Stack()
    for block in model.blocks:
        block.forward = functools.partial(_scaled_forward, block.forward)  # type: ignore[method-assign]
    return model


def _scaled_forward(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return 0.8 * forward(x)


@trait("__call__ overridden")
class OwnCall(Stack):
    class Called(Block):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return 0.8 * super().__call__(*args, **kwargs)

    def block(self, index: int) -> nn.Module:
        return self.Called()


@trait("a method beside forward")
class OtherMethod(Stack):
    class Encoder(Block):
        def encode(self, x: Tensor) -> Tensor:
            return x + torch.sin(self.linear(x))

    def block(self, index: int) -> nn.Module:
        return self.Encoder()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.encode(x)  # type: ignore[operator]
        return self.head(x)


@trait("one block inside another's forward")
class Wrapped(nn.Module):
    """Each block calls the next."""

    class Outer(Block):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * x + self.inner(super().forward(x))

    def __init__(self) -> None:
        super().__init__()
        self.outer = self.Outer(self.Outer(self.Outer(Block())))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.outer(x))


@forward("autocast inside forward")
def autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = self.blocks[0](x.float()).to(x.dtype) if x.dtype == torch.float32 else self.blocks[0](x)
        x = self.blocks[1](x)
    return self.head(self.blocks[3](self.blocks[2](x)))


@step("autocast inside forward in fp32", precision="fp32")
def autocast32(self, block, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = block(x)
    return x.float()


@forward("a default type set inside forward", expected=OR_REFUSED)
def default_type(self, x):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for block in self.blocks:
            x = block(x) + torch.full((WIDTH,), 0.1).to(x.dtype) / torch.ones(()).element_size()
    finally:
        torch.set_default_dtype(before)
    return self.head(x)


@step("functional_call inside forward", expected=OR_REFUSED)
def inner_call(self, block, x):
    moved = {name: 0.9 * parameter for name, parameter in block.named_parameters()}
    return torch.func.functional_call(block, moved, (x,))


step("vmap inside forward", expected=OR_REFUSED)(
    lambda self, block, x: torch.vmap(lambda row, block=block: block(row) * row.norm())(x)
)
