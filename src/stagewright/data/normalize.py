"""From bytes to what a model takes: subtract a mean, divide by a deviation, on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class Normalization:
    """Mean and deviation of each channel, on the scale of 0 to 255."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8 [samples, side, side, RGB] as numbers [samples, RGB, side, side]."""
        mean, std = (torch.tensor(values, dtype=dtype, device=images.device) for values in (self.mean, self.std))
        shape = (1, _CHANNELS, 1, 1)
        numbers = torch.empty(len(images), _CHANNELS, *images.shape[1:3], dtype=dtype, device=images.device)
        return torch.sub(images.permute(0, 3, 1, 2), mean.view(shape), out=numbers).div_(std.view(shape))


NORMALIZATIONS: Mapping[str, Normalization] = {
    "imagenet": Normalization(
        tuple(255 * share for share in (0.485, 0.456, 0.406)), tuple(255 * share for share in (0.229, 0.224, 0.225))
    ),
    "published": Normalization((123.68, 116.779, 103.939), (58.393, 57.12, 57.375)),
}


def parse_normalization(text: str) -> Normalization:
    """A name, or `mean,mean,mean/std,std,std` on the scale of 0 to 255."""
    if text in NORMALIZATIONS:
        return NORMALIZATIONS[text]
    try:
        mean, std = (tuple(float(number) for number in half.split(",")) for half in text.split("/"))
    except ValueError:
        mean = std = ()
    if len(mean) != _CHANNELS or len(std) != _CHANNELS or min(std) <= 0:
        raise ValueError(
            f"--normalize '{text}' is none of {', '.join(NORMALIZATIONS)}, nor three means and three deviations above "
            "0 such as 125,123,114/63,62,67"
        )
    return Normalization(mean, std)
