"""Traits of parameters: where they are kept, who uses them, of which type they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.traits.trait import (
    CLASSES,
    OR_REFUSED,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Block,
    Stack,
    forward,
    step,
    through_blocks,
    trait,
)


@trait("parameters in a list", notes="not registered: no optimizer sees them")
class ListedParameters(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [nn.Parameter(torch.full((WIDTH,), 0.9)) for _ in range(4)]

    def forward(self, x: Tensor) -> Tensor:
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale.to(x.dtype)
        return self.head(x)


@trait("modules in a list", expected=OR_REFUSED, precision="fp32", notes="not registered, and never converted")
class ListedModules(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]

    def forward(self, x: Tensor) -> Tensor:
        for block, layer in zip(self.blocks, self.hidden, strict=True):
            x = block(x) + layer(x)
        return self.head(x)


@trait("ParameterList and ParameterDict")
class ParameterContainers(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.full((WIDTH,), 0.9) for _ in range(4))
        self.shifts = nn.ParameterDict({f"shift{index}": torch.zeros(WIDTH) for index in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x) * self.scales[index] + self.shifts[f"shift{index}"]
        return self.head(x)


@trait("unused parameters with decay", weight_decay=0.1)
class UnusedParameters(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)
        self.blocks[1].unused = nn.Parameter(torch.ones(4))


@trait("parameters used in training alone", weight_decay=0.1)
class TrainingParameters(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = through_blocks(self, x)
        return self.head(x * self.scale if self.training else x)


@trait("frozen layers")
def frozen_layers() -> nn.Module:
    model = Stack()
    model.blocks[0].requires_grad_(False)
    model.blocks[2].linear.bias.requires_grad_(False)  # type: ignore[union-attr]
    return model


@trait("one parameter in every block", expected=OR_REFUSED)
class SharedParameter(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return self.head(x)


@forward("one block four times", expected=OR_REFUSED)
def repeated_block(self, x):
    for _ in range(4):
        x = self.blocks[0](x)
    return self.head(self.blocks[3](self.blocks[2](self.blocks[1](x))))


step("a block called twice in a row")(lambda self, block, x: block(block(x)))


@trait("weights tied across the model", sample=TOKENS, is_tokens=True, expected=OR_REFUSED)
class TiedHead(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = through_blocks(self, self.embed(ids).mean(1))
        return self.head(x) + self.out(x)[:, :CLASSES]


@trait("sparse gradients", sample=TOKENS, is_tokens=True)
class SparseGradients(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.embed(ids).mean(1))


@trait("an embedding with padding", sample=TOKENS, is_tokens=True)
class Padded(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)

    def forward(self, ids: Tensor) -> Tensor:
        kept = (ids != 0).to(self.embed.weight.dtype).unsqueeze(-1)
        return super().forward((self.embed(ids) * kept).sum(1))


@trait("parameters that forward changes", sample=TOKENS, is_tokens=True, expected=OR_REFUSED)
class Renormed(Stack):
    """`max_norm` scales weights down in place, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, max_norm=2.0)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.embed(ids).mean(1))


@trait("complex parameters", precision="fp32", expected=OR_REFUSED)
class Complex(Stack):
    class Spectral(Block):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH))

    def block(self, index: int) -> nn.Module:
        return self.Spectral()


@trait("parameters of several types", precision="fp32", expected=OR_REFUSED)
class MixedTypes(Stack):
    class Wide(Block):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.linear.weight.dtype)).to(torch.float32)

    def block(self, index: int) -> nn.Module:
        return self.Wide((torch.float32, torch.float64, torch.bfloat16, torch.float32)[index])


@trait("whole numbers as a frozen parameter")
class IntegerParameter(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, self.order])


@trait("lazy modules", expected=OR_REFUSED)
class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh()) for _ in range(4)))
        self.head = nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


@trait("a last layer of zeros")
def zero_head() -> nn.Module:
    model = Stack()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return model


@trait("residual branches of zeros")
class ZeroBranches(Stack):
    """Swapping or dropping blocks changes nothing at first."""

    class Zeroed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.scale * torch.tanh(self.linear(x))

    def block(self, index: int) -> nn.Module:
        return self.Zeroed()


@trait("a zero gate around noise", draws=True)
class ZeroGatedNoise(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = through_blocks(self, x)
        return self.head(x + self.gate * torch.randn_like(x) if self.training else x)
