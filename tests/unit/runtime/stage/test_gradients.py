"""Gradients are clipped by their norm as torch clips them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stagewright.runtime.stage.gradients import clip_factor, norm_of


@pytest.mark.parametrize("norm", [0.0, 0.1, 0.3, 0.5, 40.0])
def test_clipping_equals_torch_and_never_enlarges_a_gradient(norm: float) -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    weight.grad = norm * torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64) / 3
    gradient = weight.grad.clone()
    assert norm_of(gradient) == pytest.approx(norm)
    nn.utils.clip_grad_norm_([weight], 0.3)
    clipped = gradient * clip_factor(norm_of(gradient), 0.3)
    assert torch.allclose(clipped, weight.grad, rtol=1e-12) and norm_of(clipped) <= norm_of(gradient)
