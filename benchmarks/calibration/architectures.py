"""The shapes of well-known models, from their published dimensions, without building them.

They are enough to predict a rate that somebody measured on a model that the zoo does not train. `known_shapes` finds
one by its name as people write it. A model is described in the order it runs; branches follow one another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from stagewright.profile.shapes import Convolution, Kind, Shape

CLASSES = 1000


class Net:
    """Collects the shapes of a model; `channels` and `side` are those of the newest activation."""

    def __init__(self, side: int = 224, channels: int = 3) -> None:
        self.side, self.channels = side, channels
        self.shapes: list[Shape] = []

    @property
    def elements(self) -> int:
        return self.channels * self.side * self.side

    def _add(
        self, kind: Kind, inputs: int, outputs: int, operations: float = 0.0, parameters: int = 0, **more: Any
    ) -> Net:
        """The next unit; `more`: other fields of its shape."""
        name, kept = f"{kind}.{len(self.shapes)}", {"saved": float(inputs), "input_gradient": bool(self.shapes)} | more
        shape = Shape(name, kind, operations, inputs, outputs, parameters, live=outputs, live_gradient=outputs, **kept)
        self.shapes.append(shape)
        return self

    def conv(
        self,
        filters: int,
        kernel: int | tuple[int, int] = 3,
        stride: int = 1,
        groups: int = 1,
        *,
        valid: bool = False,
        bias: bool = False,
    ) -> Net:
        """A convolution, padded to keep the side unless it is `valid`."""
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        taps, before, channels = high * wide, self.elements, self.channels
        side = (self.side - max(high, wide)) // stride + 1 if valid else -(-self.side // stride)
        weights = taps * channels * filters // groups
        self.side, self.channels = side, filters
        operations, parameters = 2.0 * weights * side * side, weights + filters * bias
        geometry = Convolution(taps, stride, groups, channels, filters)
        return self._add(Kind.CONVOLUTION, before, self.elements, operations, parameters, convolution=geometry)

    def norm(self) -> Net:
        return self._add(Kind.NORM, self.elements, self.elements, 0.0, 2 * self.channels)

    def act(self, times: int = 1) -> Net:
        """An activation of so many pointwise kernels."""
        for _ in range(times):
            self._add(Kind.POINTWISE, self.elements, self.elements, saved=0.0)
        return self

    def cbr(
        self,
        filters: int,
        kernel: int | tuple[int, int] = 3,
        stride: int = 1,
        groups: int = 1,
        *,
        valid: bool = False,
    ) -> Net:
        """Convolution, normalisation, activation."""
        return self.conv(filters, kernel, stride, groups, valid=valid).norm().act()

    def beside(self, before: int, filters: int, stride: int) -> Net:
        """A projection of what a block took, beside its branch."""
        channels, side = self.channels, self.side
        self.channels, self.side = before, side * stride
        self.conv(filters, 1, stride).norm()
        self.channels, self.side = channels, side
        return self

    def add(self) -> Net:
        """A residual sum."""
        return self._add(Kind.POINTWISE, 2 * self.elements, self.elements, saved=0.0)

    def concat(self, channels: int) -> Net:
        """All branches side by side, copied into one tensor."""
        self.channels = channels
        return self.act()

    def pool(self, stride: int = 2, kernel: int = 2, *, valid: bool = False) -> Net:
        before = self.elements
        self.side = (self.side - kernel) // stride + 1 if valid else -(-self.side // stride)
        return self._add(Kind.POOL, before, self.elements)

    def flat(self) -> Net:
        """The mean over the image."""
        before, self.side = self.elements, 1
        return self._add(Kind.POOL, before, self.elements)

    def linear(self, features: int, tokens: int = 1, inputs: int | None = None) -> Net:
        width = self.channels if inputs is None else inputs
        self.channels, products = features, 2.0 * width * features * tokens
        return self._add(Kind.LINEAR, width * tokens, features * tokens, products, width * features)

    def squeeze(self, reduced: int) -> Net:
        """Squeeze and excitation: a mean, two small products, and a factor for every channel."""
        channels, whole = self.channels, self.elements
        self._add(Kind.POOL, whole, channels).linear(reduced).linear(channels)
        return self._add(Kind.SCALE, whole, whole)

    def layer_norm(self, width: int, tokens: int) -> Net:
        return self._add(Kind.LAYER_NORM, width * tokens, width * tokens, 0.0, 2 * width)

    def pointwise(self, elements: int, inputs: int = 1) -> Net:
        return self._add(Kind.POINTWISE, inputs * elements, elements)

    def attention(self, width: int, tokens: int, heads: int, window: int | None = None) -> Net:
        """Scores, softmax and the weighted sum; each token attends to `window` tokens."""
        seen = tokens if window is None else window
        operations = 4.0 * tokens * seen * width
        return self._add(Kind.ATTENTION, 3 * width * tokens, width * tokens, operations, scores=heads * tokens * seen)

    def transformer(self, width: int, tokens: int, heads: int, window: int | None = None) -> Net:
        """One encoder layer: attention and a two-layer perceptron, each with a norm and a residual sum."""
        self.layer_norm(width, tokens).linear(3 * width, tokens, width)
        self.attention(width, tokens, heads, window).linear(width, tokens, width)
        self.pointwise(width * tokens, 2).layer_norm(width, tokens).linear(4 * width, tokens, width)
        self.pointwise(4 * width * tokens).linear(width, tokens, 4 * width)
        return self.pointwise(width * tokens, 2)


def _resnet(
    depths: Sequence[int], *, basic: bool = False, groups: int = 1, width: int = 64, squeezes: bool = False
) -> Net:
    """Residual networks (v1.5: the 3x3 takes the stride); `width`: of a group's 3x3 at the first resolution."""
    net = Net().cbr(64, 7, 2).pool()
    for level, depth in enumerate(depths):
        inner, outer = (width * groups if groups > 1 else width) << level, (64 if basic else 256) << level
        for block in range(depth):
            stride = 2 if level and not block else 1
            before = net.channels
            if basic:
                net.cbr(outer, 3, stride).conv(outer).norm()
            else:
                net.cbr(inner, 1).cbr(inner, 3, stride, groups).conv(outer, 1).norm()
            if squeezes:
                net.squeeze(outer // 16)
            if before != outer or stride > 1:
                net.beside(before, outer, stride)
            net.add().act()
    return net.flat().linear(CLASSES)


_VGG = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def _vgg(depth: int, *, norm: bool = False) -> Net:
    net = Net()
    for count, filters in zip(_VGG[depth], (64, 128, 256, 512, 512), strict=True):
        for _ in range(count):
            net.conv(filters, bias=True)
            (net.norm() if norm else net).act()
        net.pool()
    net.linear(4096, 1, 512 * 49).side = 1
    return net.act(2).linear(4096).act(2).linear(CLASSES)


def _alexnet() -> Net:
    net = Net().conv(64, 11, 4, bias=True).act().pool(2, 3, valid=True)
    net.conv(192, 5, bias=True).act().pool(2, 3, valid=True)
    for filters in (384, 256, 256):
        net.conv(filters, bias=True).act()
    net.pool(2, 3, valid=True)
    net.linear(4096, 1, 256 * 36).side = 1
    return net.act(2).linear(4096).act(2).linear(CLASSES)


Branch = Sequence[tuple[int, int | tuple[int, int]]]


def _branches(net: Net, branches: Sequence[Branch], extra: int = 0, stride: int = 1) -> Net:
    """Branches of convolutions from one input, then a copy into one tensor; `extra` channels pass a pool."""
    channels, side = net.channels, net.side
    total, after = extra, side
    for branch in branches:
        net.channels, net.side = channels, side
        for index, (filters, kernel) in enumerate(branch):
            net.cbr(filters, kernel, stride if index == len(branch) - 1 else 1)
        total, after = total + net.channels, net.side
    net.channels, net.side = channels, side
    net.pool(stride, 3)
    net.side = after
    return net.concat(total)


def _googlenet() -> Net:
    net = Net().cbr(64, 7, 2).pool().cbr(64, 1).cbr(192).pool()
    for index, (a, b, c, d, e, f) in enumerate(
        (
            *((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
            *((192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64)),
            *((112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128)),
            *((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
        )
    ):
        if index in (2, 7):
            net.pool()
        _branches(net, [[(a, 1)], [(b, 1), (c, 3)], [(d, 1), (e, 5)], [(f, 1)]])
    return net.flat().linear(CLASSES)


def _inception_v3() -> Net:
    net = Net(299)
    net.cbr(32, 3, 2, valid=True).cbr(32, valid=True).cbr(64).pool(2, 3, valid=True)
    net.cbr(80, 1).cbr(192, valid=True).pool(2, 3, valid=True)
    for pooled in (32, 64, 64):
        _branches(net, [[(64, 1)], [(48, 1), (64, 5)], [(64, 1), (96, 3), (96, 3)], [(pooled, 1)]])
    side = (net.side - 3) // 2 + 1
    _branches(net, [[(384, 3)], [(64, 1), (96, 3), (96, 3)]], net.channels, 2)
    net.side = side
    for width in (128, 160, 160, 192):
        long: Branch = [(width, 1), (width, (7, 1)), (width, (1, 7)), (width, (7, 1)), (192, (1, 7))]
        _branches(net, [[(192, 1)], [(width, 1), (width, (1, 7)), (192, (7, 1))], long, [(192, 1)]])
    side = (net.side - 3) // 2 + 1
    last: Branch = [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3)]
    _branches(net, [[(192, 1), (320, 3)], last], net.channels, 2)
    net.side = side
    for _ in range(2):
        wide: Branch = [(448, 1), (384, 3), (768, (1, 3))]  # its last two run side by side, as one twice as wide
        _branches(net, [[(320, 1)], [(384, 1), (768, (1, 3))], wide, [(192, 1)]])
    return net.flat().linear(CLASSES)


def _inception_v4() -> Net:
    net = Net(299)
    net.cbr(32, 3, 2, valid=True).cbr(32, valid=True).cbr(64).cbr(96, 3, 2).concat(160)
    net.cbr(64, 1).cbr(64, (7, 1)).cbr(64, (1, 7)).cbr(96).concat(192).cbr(192, 3, 2).concat(384)
    for _ in range(4):
        _branches(net, [[(96, 1)], [(64, 1), (96, 3)], [(64, 1), (96, 3), (96, 3)], [(96, 1)]])
    _branches(net, [[(384, 3)], [(192, 1), (224, 3), (256, 3)]], net.channels, 2)
    for _ in range(7):
        deep: Branch = [(192, 1), (192, (1, 7)), (224, (7, 1)), (224, (1, 7)), (256, (7, 1))]
        _branches(net, [[(384, 1)], [(192, 1), (224, (1, 7)), (256, (7, 1))], deep, [(128, 1)]])
    _branches(net, [[(192, 1), (192, 3)], [(256, 1), (256, (1, 7)), (320, (7, 1)), (320, 3)]], net.channels, 2)
    for _ in range(3):
        wide: Branch = [(384, 1), (448, (1, 3)), (512, (3, 1)), (512, (1, 3))]
        _branches(net, [[(256, 1)], [(384, 1), (512, (1, 3))], wide, [(256, 1)]])
    return net.flat().linear(CLASSES)


def _densenet(depths: Sequence[int], growth: int, stem: int) -> Net:
    net = Net().cbr(stem, 7, 2).pool()
    for level, depth in enumerate(depths):
        for _ in range(depth):
            channels = net.channels
            net.norm().act().cbr(4 * growth, 1).conv(growth).concat(channels + growth)
        if level < len(depths) - 1:
            net.norm().act().conv(net.channels // 2, 1).pool()
    return net.norm().act().flat().linear(CLASSES)


# expansion, channels, repeats, stride, kernel of a stage of inverted bottlenecks
_MOBILE_V2 = (
    *((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 32, 3, 2, 3), (6, 64, 4, 2, 3)),
    *((6, 96, 3, 1, 3), (6, 160, 3, 2, 3), (6, 320, 1, 1, 3)),
)
_EFFICIENT = (
    *((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3)),
    *((6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)),
)
_EFFICIENT_SCALES = ((1.0, 1.0, 224), (1.0, 1.1, 240), (1.1, 1.2, 260), (1.2, 1.4, 300), (1.4, 1.8, 380))


def _inverted(net: Net, expanded: int, filters: int, stride: int, kernel: int, squeezed: int) -> None:
    before = net.channels
    if expanded != before:
        net.cbr(expanded, 1)
    net.cbr(expanded, kernel, stride, expanded)
    if squeezed:
        net.squeeze(squeezed)
    net.conv(filters, 1).norm()
    if stride == 1 and before == filters:
        net.add()


_MOBILE_V3 = (  # kernel, expanded, channels, squeeze and excitation, stride
    *((3, 16, 16, 0, 1), (3, 64, 24, 0, 2), (3, 72, 24, 0, 1), (5, 72, 40, 1, 2), (5, 120, 40, 1, 1)),
    *((5, 120, 40, 1, 1), (3, 240, 80, 0, 2), (3, 200, 80, 0, 1), (3, 184, 80, 0, 1), (3, 184, 80, 0, 1)),
    *((3, 480, 112, 1, 1), (3, 672, 112, 1, 1), (5, 672, 160, 1, 2), (5, 960, 160, 1, 1), (5, 960, 160, 1, 1)),
)


def _mobilenet_v3() -> Net:
    net = Net().cbr(16, 3, 2)
    for kernel, expanded, filters, squeezes, stride in _MOBILE_V3:
        _inverted(net, expanded, filters, stride, kernel, squeezes * (expanded // 4))
    return net.cbr(960, 1).flat().linear(1280).act().linear(CLASSES)


def _mobile(
    stages: Sequence[Sequence[int]], wide: float = 1.0, deep: float = 1.0, side: int = 224, *, squeezes: bool = False
) -> Net:
    """MobileNet v2, and EfficientNets, which scale such a network in its channels, its blocks and its images."""

    def scaled(filters: int) -> int:
        return max(8, int(filters * wide + 4) // 8 * 8)

    net = Net(side).cbr(scaled(32), 3, 2)
    for expansion, filters, repeats, stride, kernel in stages:
        for block in range(-int(-repeats * deep // 1)):
            before, squeezed = net.channels, max(1, net.channels // 4) if squeezes else 0
            _inverted(net, before * expansion, scaled(filters), 1 if block else stride, kernel, squeezed)
    return net.cbr(scaled(1280), 1).flat().linear(CLASSES)


def _regnet(depths: Sequence[int], widths: Sequence[int], group: int, *, squeezes: bool) -> Net:
    net = Net().cbr(32, 3, 2)
    for depth, width in zip(depths, widths, strict=True):
        for block in range(depth):
            before, stride = net.channels, 1 if block else 2
            net.cbr(width, 1).cbr(width, 3, stride, max(1, width // group))
            if squeezes:
                net.squeeze(max(1, before // 4))
            net.conv(width, 1).norm()
            if not block:
                net.beside(before, width, stride)
            net.add().act()
    return net.flat().linear(CLASSES)


def _convnext(depths: Sequence[int], widths: Sequence[int]) -> Net:
    net = Net().conv(widths[0], 4, 4, bias=True)
    net.layer_norm(widths[0], net.side**2)
    for level, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        if level:
            net.layer_norm(net.channels, net.side**2).conv(width, 2, 2, bias=True)
        for _ in range(depth):
            tokens = net.side**2
            net.conv(width, 7, 1, width, bias=True).layer_norm(width, tokens).linear(4 * width, tokens, width)
            net.pointwise(4 * width * tokens).linear(width, tokens, 4 * width)
            net.pointwise(width * tokens).pointwise(width * tokens, 2)
            net.channels = width
    return net.flat().linear(CLASSES)


def _vit(width: int, depth: int, heads: int, patch: int = 16, side: int = 224) -> Net:
    net = Net(side).conv(width, patch, patch, bias=True)
    tokens = (side // patch) ** 2 + 1
    for _ in range(depth):
        net.transformer(width, tokens, heads)
    return net.layer_norm(width, tokens).linear(CLASSES, 1, width)


def _swin(width: int, depths: Sequence[int], heads: int, window: int = 7) -> Net:
    net = Net().conv(width, 4, 4, bias=True)
    tokens = 56 * 56
    for level, depth in enumerate(depths):
        own = width << level
        if level:
            tokens //= 4
            net.layer_norm(2 * own, tokens).linear(own, tokens, 2 * own)
        for _ in range(depth):
            for _ in range(4):  # rolled, cut into windows, joined and rolled back
                net.pointwise(own * tokens)
            for _ in range(4):  # a bias by position and a mask are added to the scores, in fp32: twice the bytes
                net.pointwise((heads << level) * tokens * window * window, 2)
            net.transformer(own, tokens, heads << level, window * window)
            net.pointwise(own * tokens).pointwise(own * tokens)  # stochastic depth
    return net.layer_norm(width * 8, tokens).linear(CLASSES, 1, width * 8)


def _bert(width: int, depth: int, heads: int, tokens: int = 128) -> Net:
    net = Net(1, width)
    net.pointwise(width * tokens).layer_norm(width, tokens)
    for _ in range(depth):
        net.transformer(width, tokens, heads)
        for elements in (width * tokens, width * tokens, heads * tokens * tokens, heads * tokens * tokens):
            net.pointwise(elements)  # two dropouts; of the scores a mask and another dropout
    predicted = 20  # masked tokens of a sequence of 128
    return net.linear(width, predicted, width).linear(30522, predicted, width)


_50, _101 = (3, 4, 6, 3), (3, 4, 23, 3)  # blocks of a ResNet
_BUILDERS: dict[str, Callable[[], Net]] = {
    "alexnet": _alexnet,
    **dict.fromkeys(("googlenet", "inceptionv1"), _googlenet),
    **dict.fromkeys(("inceptionv3", "inception3"), _inception_v3),
    **dict.fromkeys(("inceptionv4", "inception4"), _inception_v4),
    **{f"vgg{depth}": partial(_vgg, depth) for depth in _VGG},
    **{f"vgg{depth}bn": partial(_vgg, depth, norm=True) for depth in _VGG},
    "resnet18": partial(_resnet, (2, 2, 2, 2), basic=True),
    "resnet34": partial(_resnet, _50, basic=True),
    "resnet50": partial(_resnet, _50),
    "resnet101": partial(_resnet, _101),
    "resnet152": partial(_resnet, (3, 8, 36, 3)),
    **dict.fromkeys(("resnext5032x4d", "resnext50"), partial(_resnet, _50, groups=32, width=4)),
    **dict.fromkeys(("resnext10132x4d", "resnext101"), partial(_resnet, _101, groups=32, width=4)),
    "resnext10132x8d": partial(_resnet, _101, groups=32, width=8),
    "resnet26": partial(_resnet, (2, 2, 2, 2)),
    "resnet200": partial(_resnet, (3, 24, 36, 3)),
    "seresnet50": partial(_resnet, _50, squeezes=True),
    "seresnext5032x4d": partial(_resnet, _50, groups=32, width=4, squeezes=True),
    **dict.fromkeys(("seresnext10132x4d", "seresnext101"), partial(_resnet, _101, groups=32, width=4, squeezes=True)),
    "wideresnet502": partial(_resnet, _50, width=128),
    "wideresnet1012": partial(_resnet, _101, width=128),
    "densenet121": partial(_densenet, (6, 12, 24, 16), 32, 64),
    "densenet169": partial(_densenet, (6, 12, 32, 32), 32, 64),
    "densenet201": partial(_densenet, (6, 12, 48, 32), 32, 64),
    "densenet161": partial(_densenet, (6, 12, 36, 24), 48, 96),
    **dict.fromkeys(("mobilenetv2", "mobilenetv2100"), partial(_mobile, _MOBILE_V2)),
    **dict.fromkeys(("mobilenetv3large", "mobilenetv3large100"), _mobilenet_v3),
    **{
        f"efficientnetb{size}": partial(_mobile, _EFFICIENT, *scales, squeezes=True)
        for size, scales in enumerate(_EFFICIENT_SCALES)
    },
    "regnety032": partial(_regnet, (2, 5, 13, 1), (72, 216, 576, 1512), 24, squeezes=True),
    "regnety016": partial(_regnet, (2, 6, 17, 2), (48, 120, 336, 888), 24, squeezes=True),
    "regnety040": partial(_regnet, (2, 6, 12, 2), (128, 192, 512, 1088), 64, squeezes=True),
    "regnety080": partial(_regnet, (2, 4, 10, 1), (168, 448, 896, 2016), 56, squeezes=True),
    "regnetx032": partial(_regnet, (2, 6, 15, 2), (96, 192, 432, 1008), 48, squeezes=False),
    "regnetx080": partial(_regnet, (2, 5, 15, 1), (80, 240, 720, 1920), 120, squeezes=False),
    "convnexttiny": partial(_convnext, (3, 3, 9, 3), (96, 192, 384, 768)),
    "convnextsmall": partial(_convnext, (3, 3, 27, 3), (96, 192, 384, 768)),
    "convnextbase": partial(_convnext, (3, 3, 27, 3), (128, 256, 512, 1024)),
    "vittiny": partial(_vit, 192, 12, 3),
    "vitsmall": partial(_vit, 384, 12, 6),
    "vitbase": partial(_vit, 768, 12, 12),
    "vitlarge": partial(_vit, 1024, 24, 16),
    "vitbase384": partial(_vit, 768, 12, 12, side=384),
    "vitlarge384": partial(_vit, 1024, 24, 16, side=384),
    "vitbase32": partial(_vit, 768, 12, 12, 32),
    "swintiny": partial(_swin, 96, (2, 2, 6, 2), 3),
    "swinsmall": partial(_swin, 96, (2, 2, 18, 2), 3),
    "swinbase": partial(_swin, 128, (2, 2, 18, 2), 4),
    "bertbase": partial(_bert, 768, 12, 12),
    "bertlarge": partial(_bert, 1024, 24, 16),
    **{f"bertbase{tokens}": partial(_bert, 768, 12, 12, tokens) for tokens in (384, 512)},
    **{f"bertlarge{tokens}": partial(_bert, 1024, 24, 16, tokens) for tokens in (384, 512)},
}
_TOKENS = {"phase 2": "512", "phase2": "512", "squad": "384", "fine-tuning": "384", "512": "512", "384": "384"}
_SPELLINGS = (  # how people write some of them, in order
    (r"\(.*\)|pre-?training.*|phase.*|fine-?tuning.*|squad.*", ""),
    (r"(v1\.?5|v2|v1b|v1)$", ""),
    (r"(in1k|in22k)$", ""),
    (r"patch(16|32)(224)?(384)?$", lambda match: ("32" if match[1] == "32" else "") + (match[3] or "")),
    (r"(patch4(window7)?|p16|16)?(224)?$", ""),
    (r"^(deit|vit)(vit)?b(16)?$", "vitbase"),
    (r"^(deit|vit)(vit)?l(16)?$", "vitlarge"),
    (r"^(deit|vit)(vit)?s(16)?$", "vitsmall"),
    (r"^deit", "vit"),
    (r"^(swin|convnext)t$", r"\1tiny"),
    (r"^(swin|convnext)s$", r"\1small"),
    (r"^(swin|convnext)b$", r"\1base"),
    (r"^tv|^tf", ""),
)


@cache
def known_shapes(name: str) -> tuple[Shape, ...] | None:
    """The shapes of a model by a name as people write it: `ResNet-50 v1.5`, `vit_base_patch16_224`; None if unknown."""
    text = re.sub(r"[^a-z0-9.]", "", re.sub(_SPELLINGS[0][0], "", name.lower()))
    if text in ("bertbase", "bertlarge"):  # the length of its sequences, by the task
        text += _TOKENS.get(next((task for task in _TOKENS if task in name.lower()), ""), "")
    for pattern, replacement in ((r"^$", ""), *_SPELLINGS[1:]):
        if text in _BUILDERS:
            break
        text = re.sub(pattern, replacement, text)
    build = _BUILDERS.get(text.replace(".", ""))
    return None if build is None else tuple(build().shapes)
