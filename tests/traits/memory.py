"""Traits of tensors that share memory, are changed in place or have a layout of their own."""

from __future__ import annotations

import torch

from tests.traits.trait import IMAGE, OR_REFUSED, WIDTH, Stack, forward, image_forward, image_step, step


@step("in-place changes of activations")
def in_place(self, block, x):
    x = block(x)
    x += 0.1
    x.mul_(0.9).clamp_(-2, 2)
    return x


@forward("parts of activations changed in place")
def part_in_place(self, x):
    for index, block in enumerate(self.blocks):
        x = block(x)
        x = x.clone()
        x[:, index] = 0.0
        x[:, 6:] += 1.0
    return self.head(x)


@forward("the input changed in place")
def input_in_place(self, x):
    x.mul_(0.5)
    return Stack.forward(self, x)


@forward("views that later blocks read")
def views(self, x):
    left, right = x.chunk(2, 1)
    for block in self.blocks:
        x = block(torch.cat([right, left], 1))
        left, right = x[:, : WIDTH // 2], x[:, WIDTH // 2 :]
    return self.head(torch.cat([left, right.flip(1)], 1))


@step("a view changed in place behind its base", expected=OR_REFUSED)
def view_in_place(self, block, x):
    x = block(x)
    half = x[:, : WIDTH // 2]
    half.mul_(0.5)
    return x


@image_forward("channels_last", sample=IMAGE)
def channels_last(self, x):
    x = x.contiguous(memory_format=torch.channels_last)
    for block in self.blocks:
        x = block(x)
    return self.head(x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4).mean(1))


@image_step("views of channels_last", sample=IMAGE, expected=OR_REFUSED)
def channels_last_views(self, block, x):
    x = block(x).contiguous(memory_format=torch.channels_last)
    return x.permute(0, 2, 3, 1).view(x.shape[0], -1, 4).transpose(1, 2).reshape(x.shape)


@image_step("branch on the layout", sample=IMAGE, expected=OR_REFUSED)
def layout_branch(self, block, x):
    x = block(x).to(memory_format=torch.channels_last)
    return 0.5 * x if x.is_contiguous(memory_format=torch.channels_last) else 3 * x


@forward("expanded tensors")
def expanded(self, x):
    shift = x.mean(1, keepdim=True).expand(-1, WIDTH)
    for block in self.blocks:
        x = block(x) + shift
    return self.head(x)
