"""Small models, each with one trait that makes it hard to cut or to train; children are in execution order.

A factory is a `--model tests.models:NAME`. A stage of a cut at children holds the children from one cut to the next.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, relu

from stagewright.model.networks import zoo
from stagewright.model.networks.vit import EncoderBlock

CLASSES = 7
SIDE = 8
_FEW_TOKENS = 4
_FLAT = 4 * (SIDE // 2) ** 2


def _conv(inputs: int, outputs: int, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=bias)


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = _conv(3, 4)
        self.second = _conv(4, 4)
        self.third = _conv(4, 4, stride=2)
        self.head = nn.Linear(_FLAT, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(self.third(torch.tanh(self.second(relu(self.first(x))))))
        return self.head(x.flatten(1))


def plain() -> nn.Module:
    return _Plain()


class _Steep(_Plain):
    """Gradients are much larger, and vary more between batches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 64.0


def steep() -> nn.Module:
    return _Steep()


def frozen_middle() -> nn.Module:
    model = _Plain()
    model.second.requires_grad_(False)
    return model


def frozen_first() -> nn.Module:
    model = _Plain()
    model.first.requires_grad_(False)
    return model


def tied() -> nn.Module:
    """One weight in `second` and `third`: a cut at `third` separates them, other cuts do not."""
    model = _Plain()
    model.third.weight = model.second.weight
    return model


def tied_steep() -> nn.Module:
    model = _Steep()
    model.third.weight = model.second.weight
    return model


class _Reused(nn.Module):
    """One module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _conv(3, 4)
        self.second = _conv(4, 4)
        self.head = nn.Linear(4 * SIDE**2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(torch.tanh(self.second(x))))
        return self.head(x.flatten(1))


def reused() -> nn.Module:
    return _Reused()


def _normed_block(inputs: int, outputs: int, stride: int = 1, momentum: float | None = 0.1) -> nn.Sequential:
    norm = nn.BatchNorm2d(outputs, momentum=momentum)
    return nn.Sequential(_conv(inputs, outputs, stride, bias=False), norm, nn.ReLU())


class _Normed(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first = _normed_block(3, 4)
        self.second = _normed_block(4, 5)
        self.third = _normed_block(5, 4, 2, momentum)
        self.head = nn.Linear(_FLAT, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.third(self.second(self.first(x))).flatten(1))


def normed() -> nn.Module:
    return _Normed()


class _Layered(nn.Module):
    """Like blocks between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv(3, 4)
        self.blocks = nn.Sequential(*(_normed_block(4, 4) for _ in range(2)))
        self.last = nn.Sequential(_conv(4, 4, 2), nn.ReLU())
        self.head = nn.Linear(_FLAT, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.blocks(torch.tanh(self.stem(x)))).flatten(1))


def layered() -> nn.Module:
    return _Layered()


def cumulative() -> nn.Module:
    """BatchNorm whose statistics are plain means, by the count of batches it keeps."""
    return _Normed(momentum=None)


class _NormedTwice(_Normed):
    """One module with running statistics is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.third = _normed_block(5, 5, 1)
        self.head = nn.Linear(5 * SIDE**2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.third(self.third(self.second(self.first(x)))).flatten(1))


def normed_twice() -> nn.Module:
    return _NormedTwice()


class _Dropping(nn.Module):
    """Dropout in every block, once in forward code that checks `self.training`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(_conv(3, 4), nn.Dropout2d(0.2))
        self.second = nn.Sequential(_conv(4, 4, stride=2), nn.ReLU())
        self.third = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(_FLAT, 10))
        self.head = nn.Sequential(nn.ReLU(), nn.Dropout(0.4), nn.Linear(10, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = dropout(self.second(self.first(x)), 0.2, self.training)
        return self.head(self.third(x))


def dropping() -> nn.Module:
    return _Dropping()


class _Residual(nn.Module):
    """The output of `first` skips `second` and `third`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _conv(3, 4, stride=2)
        self.second = _conv(4, 4)
        self.third = _conv(4, 4)
        self.head = nn.Linear(_FLAT, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        skipped = relu(self.first(x))
        x = self.third(relu(self.second(skipped)))
        return self.head((skipped + x).flatten(1))


def residual() -> nn.Module:
    return _Residual()


class _NormedResidual(nn.Module):
    """A trunk of convolutions with norms, and a block beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _normed_block(3, 4, 2)
        self.block = nn.Sequential(_normed_block(4, 6), _normed_block(6, 4))
        self.head = nn.Linear(_FLAT, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((x + self.block(x)).flatten(1))


def normed_residual() -> nn.Module:
    return _NormedResidual()


class _Embed(nn.Module):
    """An image as the vectors of its patches, behind one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), -1, -1), self.patches(x).flatten(2).transpose(1, 2)], 1)


class _Attention(nn.Module):
    """A small vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = _Embed()
        self.block = EncoderBlock(2, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x))[:, 0])


def attention() -> nn.Module:
    return _Attention()


class _Branching(nn.Module):
    """Two branches from one stem, joined by cat; the number of samples is read before the cut and used after it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv(3, 4, stride=2)
        self.left = _conv(4, 2)
        self.right = _conv(4, 3)
        self.head = nn.Linear(5 * (SIDE // 2) ** 2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        samples = x.size(0)
        joined = torch.cat([self.left(x), torch.tanh(self.right(x))], 1)
        return self.head(joined.view(samples, -1))


def branching() -> nn.Module:
    return _Branching()


class _InPlace(nn.Module):
    """`relu` changes the output of `first` in place, and its result is used twice; the input is changed too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _conv(3, 4, stride=2)
        self.relu = nn.ReLU(inplace=True)
        self.second = _conv(4, 4)
        self.head = nn.Linear(_FLAT, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.mul_(0.5))
        x = self.relu(x)
        return self.head((x + self.second(x)).flatten(1))


def in_place() -> nn.Module:
    return _InPlace()


class _Alias(nn.Module):
    """`relu` changes in place a tensor of which `early` is an earlier view."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _conv(3, 4, stride=2)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(_FLAT, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        early = x.view(x.shape[0], -1)
        return self.head(self.relu(x).flatten(1) + early)


def alias() -> nn.Module:
    return _Alias()


class _Gate(nn.Module):
    """The computation depends on the data, so it can't be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = _conv(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            x = 2 * x
        return torch.tanh(self.conv(x))


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = _conv(3, 4, stride=2)
        self.gate = _Gate()
        self.head = nn.Linear(_FLAT, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gate(self.first(x)).flatten(1))


def gated() -> nn.Module:
    """Untraceable in one child, which stays whole."""
    return _Gated()


class _Untraceable(_Gated):
    def forward(self, x: Tensor) -> Tensor:
        if x[0].mean() > 0:
            x = -x
        return super().forward(x)


def untraceable() -> nn.Module:
    """Untraceable in its own forward, so it can't be cut."""
    return _Untraceable()


class _Sometimes(_Gated):
    """`gate` runs where the first value of a microbatch is positive, or where it is not."""

    def __init__(self, is_positive: bool) -> None:
        super().__init__()
        self.is_positive = is_positive

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if bool(x.flatten()[0] > 0) is self.is_positive:
            hidden = self.gate(hidden)
        return self.head(hidden.flatten(1))


def sometimes() -> nn.Module:
    return _Sometimes(True)


def other_times() -> nn.Module:
    return _Sometimes(False)


def _parts() -> list[nn.Module]:
    return [_conv(3, 4), nn.ReLU(), _conv(4, 4, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(_FLAT, CLASSES)]


def sequential() -> nn.Module:
    return nn.Sequential(*_parts())


def listed() -> list[nn.Module]:
    """A list of modules instead of a module; the last but one can't be traced."""
    first, activation, *rest = _parts()
    return [first, activation, _Gate(), *rest]


class _Tokens(nn.Module):
    """Integer inputs, and a mask of them that crosses the cut with the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        kept = (ids > 2).unsqueeze(-1)
        x = torch.tanh(self.embed(ids))
        x = torch.tanh(self.mix(x)) * kept
        return self.head(x.mean(1))


def tokens() -> nn.Module:
    return _Tokens()


class _Language(nn.Module):
    """Predicts a token at every place; the embedding's weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 6)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + torch.tanh(self.first(x))
        x = x + torch.tanh(self.second(x.cumsum(1)))
        return self.head(x).transpose(1, 2)


def language() -> nn.Module:
    return _Language()


class _TiedTwice(_Language):
    """`second` has the weight of `first` as well: ties of the first and last stage, and of those between."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight = self.first.weight


def tied_twice() -> nn.Module:
    return _TiedTwice()


class _Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.9, 1.1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class _Chained(nn.Module):
    """Ties that overlap: one weight of `embed` and `head`, and `gain`, which runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 6)
        self.gain = _Gain()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.gain(self.embed(ids))
        x = x + self.gain(torch.tanh(self.first(x)))
        x = x + self.gain(torch.tanh(self.second(x.cumsum(1))))
        return self.head(x).transpose(1, 2)


def chained() -> nn.Module:
    return _Chained()


class _Unrecorded(nn.Module):
    """Reads values, so it is cut between blocks; whether either end uses `gain` depends on the first token there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 6)
        self.gain = nn.Parameter(torch.linspace(0.9, 1.1, 6))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, CLASSES)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        is_used = bool(ids[0, 0] < _FEW_TOKENS)
        x = x * self.gain if is_used else x
        for block in self.blocks:
            x = x + block(x)
        x = x * self.gain if is_used else x
        return self.head(x).transpose(1, 2)


def unrecorded() -> nn.Module:
    return _Unrecorded()


class _HalfTied(_Language):
    """The gradient reaches the shared weight from its last use alone."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).detach()
        x = torch.tanh(self.second(x + torch.tanh(self.first(x))))
        return self.head(x).transpose(1, 2)


def half_tied() -> nn.Module:
    return _HalfTied()


class _Unused(_Plain):
    """A layer that forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


def unused() -> nn.Module:
    return _Unused()


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 5)
        self.lstm = nn.LSTM(5, 4, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(torch.tanh(self.encode(x)))
        return self.head(hidden[:, -1])


def recurrent() -> nn.Module:
    return _Recurrent()


class _Dense(nn.Module):
    """A label for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _conv(3, 4)
        self.head = _conv(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)))


def dense() -> nn.Module:
    return _Dense()


def make_data(model: str, samples: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs and labels for the model of that name."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (samples, SIDE, SIDE) if model == "dense" else (samples,), generator=generator)
    if model in ("language", "tied_twice", "chained", "half_tied", "unrecorded"):
        ids = torch.randint(CLASSES, (samples, 6), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if model == "tokens":
        return torch.randint(11, (samples, 5), generator=generator), labels
    shape = (5, 4) if model == "recurrent" else (3, SIDE, SIDE)
    return torch.randn(samples, *shape, generator=generator), labels


def _still(name: str) -> nn.Module:
    """A zoo model without dropout, whose masks would depend on the precision."""
    model = zoo.build(name, 10)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def still_alexnet() -> nn.Module:
    return _still("alexnet")


def still_vgg16() -> nn.Module:
    return _still("vgg16")


def still_resnet50() -> nn.Module:
    return _still("resnet50")


def learner() -> nn.Sequential:
    """Four layers for small images, one per stage where there are four."""
    widths = (3 * 8 * 8, 96, 96, 96)
    layers: list[nn.Module] = []
    for before, width in pairwise(widths):
        layers += [nn.Linear(before, width), nn.Tanh()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], 10))
