"""Losses: what they return, and which targets of a text count."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stagewright.model.loss import Loss, LossOptions


def half(outputs: Tensor, sample: Any) -> tuple[Tensor, Tensor]:
    return outputs.sum(), torch.tensor(3)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_users_loss_in_half_precision_is_widened(kind: torch.dtype) -> None:
    measured = Loss(LossOptions(f"{__name__}:half"))(torch.ones(4, dtype=kind), {})
    assert measured.total.dtype == torch.float32 and measured.count is not None
    assert measured.count.dtype == torch.float64 and float(measured.count) == 3


def test_next_tokens_are_targets_labels_or_the_tokens_themselves() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 7, generator=generator, dtype=torch.float64)
    tokens = torch.randint(7, (2, 4), generator=generator)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    loss = Loss(LossOptions("next-token"))

    def expected(chosen: Tensor, targets: Tensor) -> tuple[float, float]:
        total = functional.cross_entropy(chosen.flatten(0, 1), targets.flatten(), reduction="sum")
        return float(total), float((targets != -100).sum())

    for sample, wanted in (
        ({"input_ids": tokens, "targets": tokens}, expected(logits, tokens)),
        ({"input_ids": tokens}, expected(logits[:, :-1], tokens[:, 1:])),
        ({"input_ids": tokens, "labels": tokens.flip(0)}, expected(logits[:, :-1], tokens.flip(0)[:, 1:])),
        (
            {"input_ids": tokens, "attention_mask": mask},
            expected(logits[:, :-1], tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)),
        ),
    ):
        measured = loss(logits, sample)
        assert measured.count is not None
        assert (float(measured.total), float(measured.count)) == pytest.approx(wanted, rel=1e-12)
