"""Modules whose backward gives other bits each time on a GPU, replaced by ones that repeat theirs."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d


class GridPool(nn.AdaptiveAvgPool2d):
    """Adaptive pooling by plain pooling, where the grid divides the image."""

    def forward(self, features: Tensor) -> Tensor:
        grid = self.output_size if isinstance(self.output_size, tuple) else (self.output_size,) * 2
        sides = [(side, cells or side) for side, cells in zip(features.shape[2:], grid, strict=True)]
        if any(side % cells for side, cells in sides):
            return super().forward(features)
        return avg_pool2d(features, [side // cells for side, cells in sides])


def make_repeatable(model: nn.Module) -> nn.Module:
    """The same model; torch itself names whatever else can't repeat its bits."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.AdaptiveAvgPool2d:
                setattr(module, name, GridPool(child.output_size))
    return model
