"""ConvNeXt, with torchvision's parameter names and initialization, so that its weight files load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

RGB = 3
_EPS = 1e-6
_LAYER_SCALE = 1e-6  # of every block's layer scale, at first


class ConvNeXt(nn.Module):
    """A stem that reduces the resolution by four, groups of blocks, each at half the resolution, and a classifier.

    `drop` is the probability with which the last block is skipped for a sample; that of the others rises to it from 0.
    """

    def __init__(self, widths: Sequence[int], depths: Sequence[int], drop: float, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*_features(widths, depths, drop))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.classifier = nn.Sequential(LayerNorm2d(widths[-1]), nn.Flatten(1), nn.Linear(widths[-1], classes))
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.avgpool(self.features(images)))
        return logits


def _features(widths: Sequence[int], depths: Sequence[int], drop: float) -> Iterator[nn.Module]:
    yield nn.Sequential(nn.Conv2d(RGB, widths[0], 4, stride=4), LayerNorm2d(widths[0]))
    before, last = 0, sum(depths) - 1
    for group, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        if group > 0:
            channels = widths[group - 1]
            yield nn.Sequential(LayerNorm2d(channels), nn.Conv2d(channels, width, 2, stride=2))
        yield nn.Sequential(*(Block(width, drop * index / last) for index in range(before, before + depth)))
        before += depth


class Block(nn.Module):
    """A 7x7 convolution of every channel by itself, then a perceptron of every pixel; scaled, beside a shortcut."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 7, padding=3, groups=width),
            Permute(0, 2, 3, 1),
            nn.LayerNorm(width, eps=_EPS),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            Permute(0, 3, 1, 2),
        )
        self.layer_scale = nn.Parameter(torch.full((width, 1, 1), _LAYER_SCALE))
        self.stochastic_depth = StochasticDepth(drop)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.stochastic_depth(self.layer_scale * self.block(x))
        return out


class StochasticDepth(nn.Module):
    """In training, sets a sample to zero with a probability, and scales the others up by as much."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0:
            return x
        return x * dropout(torch.ones_like(x[:, :1, :1, :1]), self.probability)


class LayerNorm2d(nn.LayerNorm):
    """A norm over the channels of every pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=_EPS)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Permute(nn.Module):
    """Reorders dimensions."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.order)
