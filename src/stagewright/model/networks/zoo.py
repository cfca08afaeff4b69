"""Every model by its name, and AlexNet, VGG and ResNet themselves.

Those of images have torchvision's parameter names and initialization, so that torchvision's weight files load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from stagewright.errors import UserError, did_you_mean
from stagewright.model.networks.convnext import ConvNeXt
from stagewright.model.networks.language import BERT, GPT
from stagewright.model.networks.mobilenet import MobileNetV2
from stagewright.model.networks.vit import VisionTransformer

RGB = 3
Blocks = tuple[tuple[int, ...], ...]


class ConvNet(nn.Module):
    """Convolutions, a pool to a fixed grid so that any image size fits, and a fully connected classifier."""

    def __init__(self, features: nn.Sequential, grid: int, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.avgpool = nn.AdaptiveAvgPool2d((grid, grid))
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))
        return logits


class AlexNet(ConvNet):
    """AlexNet in one column, with the default initialization of PyTorch's layers."""

    def __init__(self, classes: int) -> None:
        features = nn.Sequential(
            *_rectified(nn.Conv2d(RGB, 64, 11, stride=4, padding=2)),
            nn.MaxPool2d(3, stride=2),
            *_rectified(nn.Conv2d(64, 192, 5, padding=2)),
            nn.MaxPool2d(3, stride=2),
            *_rectified(nn.Conv2d(192, 384, 3, padding=1)),
            *_rectified(nn.Conv2d(384, 256, 3, padding=1)),
            *_rectified(nn.Conv2d(256, 256, 3, padding=1)),
            nn.MaxPool2d(3, stride=2),
        )
        classifier = nn.Sequential(
            nn.Dropout(),
            *_rectified(nn.Linear(256 * 6 * 6, 4096)),
            nn.Dropout(),
            *_rectified(nn.Linear(4096, 4096)),
            nn.Linear(4096, classes),
        )
        super().__init__(features, 6, classifier)


class VGG(ConvNet):
    """Blocks of 3x3 convolutions, each given by its widths and followed by a pool."""

    def __init__(self, blocks: Blocks, classes: int, *, norm: bool = False, grid: int = 7, hidden: int = 4096) -> None:
        features = nn.Sequential(*_vgg_layers(blocks, norm))
        classifier = nn.Sequential(
            *_rectified(nn.Linear(blocks[-1][-1] * grid * grid, hidden)),
            nn.Dropout(),
            *_rectified(nn.Linear(hidden, hidden)),
            nn.Dropout(),
            nn.Linear(hidden, classes),
        )
        super().__init__(features, grid, classifier)
        _initialize_convolutions(features)
        for layer in classifier:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.01)
                nn.init.zeros_(layer.bias)


def _vgg_layers(blocks: Blocks, norm: bool) -> Iterator[nn.Module]:
    channels = RGB
    for widths in blocks:
        for width in widths:
            convolution = nn.Conv2d(channels, width, 3, padding=1)
            yield from _rectified(convolution, nn.BatchNorm2d(width)) if norm else _rectified(convolution)
            channels = width
        yield nn.MaxPool2d(2)


def _rectified(*layers: nn.Module) -> tuple[nn.Module, ...]:
    return (*layers, nn.ReLU(inplace=True))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion: ClassVar[int] = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out: Tensor = self.relu(residual + self.downsample(x))
        return out


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 ones, beside a shortcut; the 3x3 takes the stride (v1.5)."""

    expansion: ClassVar[int] = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = width * self.expansion
        self.conv1 = _convolution(channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, wide, 1)
        self.bn3 = nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(channels, wide, stride)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.relu(self.bn1(self.conv1(x)))
        residual = self.relu(self.bn2(self.conv2(residual)))
        residual = self.bn3(self.conv3(residual))
        out: Tensor = self.relu(residual + self.downsample(x))
        return out


Residual = type[BasicBlock | Bottleneck]


class Stem(Enum):
    """How a residual network begins: one for large images reduces the resolution by four."""

    LARGE = "a wide convolution and a pool"
    SMALL = "a convolution, and a pool that does nothing"
    PLAIN = "a convolution"


class ResNet(nn.Module):
    """A stem, layers of residual blocks, and one fully connected layer.

    Each layer but the first is at half the resolution of the one before it, and twice as wide.
    """

    def __init__(
        self, block: Residual, depths: tuple[int, ...], classes: int, *, width: int = 64, stem: Stem = Stem.LARGE
    ) -> None:
        super().__init__()
        is_large, channels = stem is Stem.LARGE, width
        self.conv1 = _convolution(RGB, width, 7, stride=2) if is_large else _convolution(RGB, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        if stem is not Stem.PLAIN:
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if is_large else nn.Identity()
        for number, depth in enumerate(depths, start=1):
            blocks = _residual_blocks(block, depth, channels, width, stride=1 if number == 1 else 2)
            self.add_module(f"layer{number}", nn.Sequential(*blocks))
            channels, width = width * block.expansion, 2 * width
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, classes)
        _initialize_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        features = self.relu(self.bn1(self.conv1(images)))
        for name, part in self.named_children():
            if name.startswith(("maxpool", "layer")):
                features = part(features)
        logits: Tensor = self.fc(torch.flatten(self.avgpool(features), 1))
        return logits


def _residual_blocks(block: Residual, depth: int, channels: int, width: int, stride: int) -> Iterator[nn.Module]:
    yield block(channels, width, stride)
    for _ in range(depth - 1):
        yield block(width * block.expansion, width, stride=1)


def _convolution(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(channels: int, width: int, stride: int) -> nn.Sequential:
    """The identity, without parameters, if the shape stays the same; a projection if it changes."""
    if stride == 1 and channels == width:
        return nn.Sequential()
    return nn.Sequential(_convolution(channels, width, 1, stride), nn.BatchNorm2d(width))


def _initialize_convolutions(module: nn.Module) -> None:
    """Draw every convolution's weights again, with the variance that preserves gradients through a ReLU."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d) and not layer.weight.is_meta:  # without storage there is nothing to draw
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


@dataclass(frozen=True, slots=True)
class Entry:
    """How to build a model for a number of classes, and its default image side and number of classes.

    A model of text takes that many tokens instead of an image; GPT's classes are its vocabulary.
    """

    build: Callable[[int], nn.Module]
    image: int = 224
    classes: int = 1000
    tokens: int | None = None
    channels: int = RGB
    normalize: str = "imagenet"  # its images, as --normalize says it
    has_classes: bool = True  # they can be chosen


VGG_BLOCKS: Mapping[str, Blocks] = {
    "vgg11": ((64,) * 1, (128,) * 1, (256,) * 2, (512,) * 2, (512,) * 2),
    "vgg13": ((64,) * 2, (128,) * 2, (256,) * 2, (512,) * 2, (512,) * 2),
    "vgg16": ((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3),
    "vgg19": ((64,) * 2, (128,) * 2, (256,) * 4, (512,) * 4, (512,) * 4),
}
ZOO: Mapping[str, Entry] = {
    "alexnet": Entry(AlexNet),
    **{name: Entry(partial(VGG, blocks)) for name, blocks in VGG_BLOCKS.items()},
    **{f"{name}_bn": Entry(partial(VGG, blocks, norm=True)) for name, blocks in VGG_BLOCKS.items()},
    "resnet18": Entry(partial(ResNet, BasicBlock, (2, 2, 2, 2))),
    "resnet34": Entry(partial(ResNet, BasicBlock, (3, 4, 6, 3))),
    "resnet50": Entry(partial(ResNet, Bottleneck, (3, 4, 6, 3))),
    "resnet101": Entry(partial(ResNet, Bottleneck, (3, 4, 23, 3))),
    "resnet152": Entry(partial(ResNet, Bottleneck, (3, 8, 36, 3))),
    "mobilenet_v2": Entry(MobileNetV2),
    "convnext_tiny": Entry(partial(ConvNeXt, (96, 192, 384, 768), (3, 3, 9, 3), 0.1)),
    "vit_b_16": Entry(partial(VisionTransformer, 224, 16, 12, 12, 768)),
    "vit_tiny_16": Entry(partial(VisionTransformer, 224, 16, 12, 3, 192)),
    "resnet8": Entry(partial(ResNet, BasicBlock, (1, 1, 1), width=16, stem=Stem.PLAIN), image=32, classes=10),
    "resnet20": Entry(partial(ResNet, BasicBlock, (3, 3, 3), width=16, stem=Stem.PLAIN), image=32, classes=10),
    "resnet18-small": Entry(partial(ResNet, BasicBlock, (2, 2, 2, 2), stem=Stem.SMALL), image=32, classes=10),
    "vgg16-small": Entry(partial(VGG, VGG_BLOCKS["vgg16"], norm=True, grid=1, hidden=512), image=32, classes=10),
    "vgg-small": Entry(partial(VGG, ((32,), (64,), (128,)), grid=4, hidden=2048), image=32, classes=10),
    "gpt2": Entry(partial(GPT, 1024, 12, 12, 768), classes=50257, tokens=1024),
    "gpt-mini": Entry(partial(GPT, 256, 6, 6, 192), classes=256, tokens=256),
    "gpt-micro": Entry(partial(GPT, 64, 3, 4, 96), classes=256, tokens=64),
    "bert-base": Entry(partial(BERT, 30522, 512, 12, 12, 768), classes=2, tokens=512),
    "bert-mini": Entry(partial(BERT, 256, 256, 4, 4, 128), classes=2, tokens=256),
    "vit-tiny": Entry(partial(VisionTransformer, 32, 4, 12, 3, 192), image=32, classes=10),
}


def build(name: str, classes: int | None = None) -> nn.Module:
    """The named model with new weights, for its default number of classes unless another is given."""
    if name not in ZOO:
        raise UserError(
            f"unknown model '{name}'; {did_you_mean(name, ZOO)} (others: timm:NAME, torchvision:NAME, hf:CONFIG, or "
            "your own as package.module:factory)"
        )
    entry = ZOO[name]
    return entry.build(entry.classes if classes is None else classes)
