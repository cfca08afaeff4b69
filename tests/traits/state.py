"""Traits of buffers and other state that forward changes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from benchmarks.models.own import Codebook
from tests.traits.trait import CLASSES, OR_REFUSED, SEQUENCE, WIDTH, Block, Stack, step, through_blocks, trait


class _Stateful(Block):
    """A block with a running mean of its own."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def move(self, mean: Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.move(x.detach().mean(0))
        return super().forward(x - 0.1 * self.seen)


@trait("buffer changed in place")
class BufferInPlace(Stack):
    class Moving(_Stateful):
        def move(self, mean: Tensor) -> None:
            self.seen.mul_(0.9).add_(mean, alpha=0.1)

    def block(self, index: int) -> nn.Module:
        return self.Moving()


@trait("buffer assigned")
class BufferAssigned(Stack):
    class Moving(_Stateful):
        def move(self, mean: Tensor) -> None:
            self.seen = 0.9 * self.seen + 0.1 * mean

    def block(self, index: int) -> nn.Module:
        return self.Moving()


@trait("buffer added to with +=")
class BufferAugmented(Stack):
    class Moving(_Stateful):
        def move(self, mean: Tensor) -> None:
            self.seen += 0.1 * mean

    def block(self, index: int) -> nn.Module:
        return self.Moving()


@trait("buffer copied into")
class BufferCopied(Stack):
    class Moving(_Stateful):
        def move(self, mean: Tensor) -> None:
            with torch.no_grad():
                self.seen.copy_(torch.lerp(self.seen, mean, 0.1))
                self.seen[0] = 0.5

    def block(self, index: int) -> nn.Module:
        return self.Moving()


@trait("buffer's data replaced", expected=OR_REFUSED)
class BufferData(Stack):
    class Moving(_Stateful):
        def move(self, mean: Tensor) -> None:
            self.seen.data = 0.9 * self.seen.data + 0.1 * mean

    def block(self, index: int) -> nn.Module:
        return self.Moving()


@trait("counter buffer")
class CounterBuffer(Stack):
    """Each forward counts itself, and the count is read."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return super().forward(x) * (1 + 0.1 * self.steps)


@trait("counter buffer that code reads", expected=OR_REFUSED)
class CounterBranch(Stack):
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        if self.steps > 4:
            x = 0.5 * x
        return super().forward(x)


@trait("counter attribute", expected=OR_REFUSED)
class CounterAttribute(Stack):
    """A warm-up over forwards, counted in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return super().forward(x) * min(1.0, self.steps / 8)


@trait("counter attribute of a block", expected=OR_REFUSED)
class CounterInside(Stack):
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.steps += 1
            return super().forward(x) * min(1.0, self.steps / 8)

    def block(self, index: int) -> nn.Module:
        return self.Counting()


@trait("tensor attribute that is no buffer", expected=OR_REFUSED)
class TensorAttribute(Stack):
    class Moving(Block):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.zeros(1)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen = 0.9 * self.seen + 0.1 * x.detach().mean().float()
            return super().forward(x) - self.seen.to(x.dtype)

    def block(self, index: int) -> nn.Module:
        return self.Moving()


@trait("buffer that every block reads")
class SharedBuffer(Stack):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return self.head(x)


@trait("buffer that every block changes", expected=OR_REFUSED)
class SharedMovingBuffer(Stack):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) - 0.1 * self.seen
            if self.training:
                self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return self.head(x)


@trait("codebook with moving means", sample=SEQUENCE)
class Quantized(Stack):
    class Coded(Block):
        def __init__(self) -> None:
            super().__init__()
            self.codebook = Codebook(6, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.codebook(super().forward(x))

    def block(self, index: int) -> nn.Module:
        return self.Coded() if index == 1 else Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(through_blocks(self, x).mean(1))


@trait("moving average of weights", expected=OR_REFUSED)
class WeightAverage(Stack):
    """Evaluation uses an average of the weights that training keeps as a buffer."""

    class Averaging(Block):
        average: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", self.linear.weight.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return x + torch.tanh(linear(x, self.average, self.linear.bias))
            with torch.no_grad():
                self.average.lerp_(self.linear.weight, 0.1)
            return super().forward(x)

    def block(self, index: int) -> nn.Module:
        return self.Averaging()


@trait("memory shared by blocks", expected=OR_REFUSED)
class SideChannel(nn.Module):
    """A block leaves its output in a dict that a later one reads."""

    class Writing(Block):
        def __init__(self, memory: dict[str, Tensor]) -> None:
            super().__init__()
            self.memory = memory

        def forward(self, x: Tensor) -> Tensor:
            self.memory["x"] = super().forward(x)
            return self.memory["x"]

    class Reading(Writing):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.memory["x"]

    def __init__(self) -> None:
        super().__init__()
        memory: dict[str, Tensor] = {}
        self.layers = nn.Sequential(self.Writing(memory), Block(), Block(), self.Reading(memory))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


@trait("table that the first forward fills", sample=SEQUENCE)
class CachedTable(Stack):
    """Positions by length, kept in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length not in self.tables:
            self.tables[length] = torch.linspace(-1, 1, length, dtype=x.dtype)[:, None]
        for block in self.blocks:
            x = block(x) + self.tables[length]
        return self.head(x.mean(1))


@step("output kept as an attribute")
def kept_output(self, block, x):
    x = block(x)
    self.last = x.detach()
    return x
