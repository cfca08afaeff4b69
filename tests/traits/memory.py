"""Traits of tensors that share memory, are changed in place or have a layout of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.traits.trait import IMAGE, OR_REFUSED, WIDTH, Images, Stack, trait


@trait("in-place changes of activations")
class InPlace(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 0.1
            x.mul_(0.9).clamp_(-2, 2)
        return self.head(x)


@trait("parts of activations changed in place")
class PartInPlace(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            x = x.clone()
            x[:, index] = 0.0
            x[:, 6:] += 1.0
        return self.head(x)


@trait("the input changed in place")
class InputInPlace(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)


@trait("views that later blocks read")
class Views(Stack):
    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        for block in self.blocks:
            x = block(torch.cat([right, left], 1))
            left, right = x[:, : WIDTH // 2], x[:, WIDTH // 2 :]
        return self.head(torch.cat([left, right.flip(1)], 1))


@trait("a view changed in place behind its base", expected=OR_REFUSED)
class ViewInPlace(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            half = x[:, : WIDTH // 2]
            half.mul_(0.5)
        return self.head(x)


@trait("channels_last", sample=IMAGE)
class ChannelsLast(Images):
    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        for block in self.blocks:
            x = block(x)
        return self.head(x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4).mean(1))


@trait("views of channels_last", sample=IMAGE, expected=OR_REFUSED)
class ChannelsLastViews(Images):
    """`view` works on this layout alone, so that a boundary must keep it."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).contiguous(memory_format=torch.channels_last)
            x = x.permute(0, 2, 3, 1).view(x.shape[0], -1, 4).transpose(1, 2).reshape(x.shape)
        return self.head(x.mean((2, 3)))


@trait("branch on the layout", sample=IMAGE, expected=OR_REFUSED)
class LayoutBranch(Images):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).to(memory_format=torch.channels_last)
            x = 0.5 * x if x.is_contiguous(memory_format=torch.channels_last) else 3 * x
        return self.head(x.mean((2, 3)))


@trait("expanded tensors")
class Expanded(Stack):
    def forward(self, x: Tensor) -> Tensor:
        shift = x.mean(1, keepdim=True).expand(-1, WIDTH)
        for block in self.blocks:
            x = block(x) + shift
        return self.head(x)
