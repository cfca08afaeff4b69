"""MobileNetV2, with torchvision's parameter names and initialization, so that its weight files load."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

RGB = 3
_STEM, _LAST = 32, 1280
# Expansion, width, depth and the stride of the first block, for each group of blocks.
_GROUPS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class MobileNetV2(nn.Module):
    """Inverted residual blocks between two convolutions, a pool and one fully connected layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*_features())
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(_LAST, classes))
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out")
            elif isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.01)
                nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))
        return logits


def _features() -> Iterator[nn.Module]:
    yield _normed(RGB, _STEM, 3, stride=2)
    channels = _STEM
    for expansion, width, depth, stride in _GROUPS:
        for index in range(depth):
            yield InvertedResidual(channels, width, stride if index == 0 else 1, expansion)
            channels = width
    yield _normed(channels, _LAST, 1)


class InvertedResidual(nn.Module):
    """Widens by a 1x1 convolution, filters every channel by itself, and narrows again without an activation.

    The input is added where the shape stays the same.
    """

    def __init__(self, channels: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels * expansion
        widen = [_normed(channels, wide, 1)] if expansion > 1 else []
        filters = _normed(wide, wide, 3, stride, groups=wide)
        self.conv = nn.Sequential(*widen, filters, nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))
        self.is_residual = stride == 1 and channels == width

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.is_residual else out


def _normed(channels: int, width: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels, width, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU6(inplace=True))
