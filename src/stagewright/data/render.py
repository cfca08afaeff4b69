"""Draws a view of an image into its place in a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from stagewright.data.augment import Jitter, View
from stagewright.data.decode import Pixels

_GREY = (0.299, 0.587, 0.114)


def render(image: Pixels, view: View, target: Tensor) -> None:
    """Fill `target`, uint8 [side, side, RGB], with a view of an image."""
    box = torch.from_numpy(image[view.top : view.top + view.height, view.left : view.left + view.width])
    if view.is_mirrored:
        box = _mirrored(box)
    side = len(target)
    if (view.rows, view.columns, view.down, view.right) == (side, side, 0, 0):
        _resize(box, target)
    else:
        resized = box
        if (view.rows, view.columns) != (view.height, view.width):
            resized = torch.empty(view.rows, view.columns, 3, dtype=torch.uint8)
            _resize(box, resized)
        _copy_window(resized, view, target)
    if view.jitter is not None:
        target.copy_(jittered(target, view.jitter))
    if view.hole is not None:
        view.hole.blacken(target)


def _resize(box: Tensor, target: Tensor) -> None:
    """Antialiased bilinear, written straight into `target`."""
    if box.shape == target.shape:
        target.copy_(box)
    else:
        size = list(target.shape[:2])
        torch.ops.aten._upsample_bilinear2d_aa.out(_planes(box), size, False, None, None, out=_planes(target))


def _planes(pixels: Tensor) -> Tensor:
    """[rows, columns, RGB] as the batch of one that torch's image operations take, without a copy."""
    return pixels.permute(2, 0, 1).unsqueeze(0)


def _mirrored(box: Tensor) -> Tensor:
    return _planes(box).flip(3).squeeze(0).permute(1, 2, 0)  # torch mirrors this layout several times faster


def _copy_window(resized: Tensor, view: View, target: Tensor) -> None:
    """A square of the resized image; black where it reaches beyond."""
    side, (rows, columns) = len(target), resized.shape[:2]
    top, left = max(view.down, 0), max(view.right, 0)
    bottom, right = min(view.down + side, rows), min(view.right + side, columns)
    if (bottom - top, right - left) != (side, side):
        target.zero_()
    target[top - view.down : bottom - view.down, left - view.right : right - view.right] = resized[
        top:bottom, left:right
    ]


def jittered(pixels: Tensor, jitter: Jitter) -> Tensor:
    """Brightness, contrast against the mean grey, saturation against each pixel's grey; rounded once, at the end."""
    weights = torch.tensor(_GREY, device=pixels.device)
    colours = (pixels.float() * jitter.brightness).clamp_(0, 255)
    mean = (colours @ weights).mean()
    colours = (colours * jitter.contrast + mean * (1 - jitter.contrast)).clamp_(0, 255)
    grey = (colours @ weights).unsqueeze(2)
    colours = (colours * jitter.saturation + grey * (1 - jitter.saturation)).clamp_(0, 255)
    return colours.round_().to(torch.uint8)
