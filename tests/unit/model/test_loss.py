"""Losses: what they return, and which targets of a text count."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stagewright import objects
from stagewright.config.losses import LOSSES
from stagewright.errors import UserError
from stagewright.model.loss import Loss, LossError, LossOptions

# What every built-in loss makes of outputs and targets, by hand: the mean, over those targets that count.
_LOGITS = torch.tensor([[0.0, 0.0], [0.0, math.log(3)]])
_NUMBERS = torch.tensor([[1.0, -2.0], [0.0, 3.0]])
BY_HAND: dict[str, tuple[Any, dict[str, Tensor], float]] = {
    "cross-entropy": (_LOGITS, {"label": torch.tensor([0, 1])}, (math.log(2) + math.log(4 / 3)) / 2),
    "next-token": (_LOGITS[None], {"targets": torch.tensor([[-100, 0]])}, math.log(4)),
    "binary": (_LOGITS, {"label": torch.tensor([[1, -100], [-100, 1]])}, (math.log(2) + math.log(4 / 3)) / 2),
    "mse": (_NUMBERS, {"target": torch.zeros(2, 2)}, (1 + 4 + 9) / 4),
    "l1": (_NUMBERS, {"target": torch.zeros(2, 2)}, (1 + 2 + 3) / 4),
    "soft": (_LOGITS[1:], {"target": torch.tensor([[0.5, 0.5]])}, (math.log(4) + math.log(4 / 3)) / 2),
    "model": ({"loss": torch.tensor(2.0), "logits": _LOGITS}, {}, 2.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_its_number_by_hand(name: str) -> None:
    assert name in BY_HAND, f"{name}: add its number to BY_HAND"
    outputs, sample, expected = BY_HAND[name]
    measured = Loss(LossOptions(name, ignore_index=-100))(outputs, sample)
    count = 1.0 if measured.count is None else float(measured.count)
    assert float(measured.total) / count == pytest.approx(expected, rel=1e-6)


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
        ({"input_ids": tokens.to(torch.uint8)}, expected(logits[:, :-1], tokens[:, 1:])),
        ({"input_ids": tokens, "labels": tokens.flip(0)}, expected(logits[:, :-1], tokens.flip(0)[:, 1:])),
        (
            {"input_ids": tokens, "attention_mask": mask},
            expected(logits[:, :-1], tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)),
        ),
    ):
        measured = loss(logits, sample)
        assert measured.count is not None
        assert (float(measured.total), float(measured.count)) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"labels": torch.tensor([1, 2])}, "'labels' is [2]"),  # of the next sample
        ({"labels": torch.ones(2, 4)}, "'labels' is float32"),
        ({"labels": torch.ones(2, 4).bool()}, "'labels' is bool"),
        ({"input_ids": torch.ones(2, 4).long(), "attention_mask": torch.ones(4)}, "'attention_mask' is [4]"),
        ({"image": torch.ones(2, 4)}, "needs a field targets, labels or input_ids"),
    ],
)
def test_rejects_what_has_no_next_token(sample: dict[str, Tensor], words: str) -> None:
    with pytest.raises(LossError, match=re.escape(words)):
        Loss(LossOptions("next-token"))(torch.ones(2, 4), sample)


def test_a_users_loss_gets_the_target_of_pairs_and_all_fields_of_named_samples() -> None:
    got: list[Any] = []

    def mine(outputs: Tensor, given: Any) -> Tensor:
        got.append((outputs.dtype, given))
        return outputs.mean()

    outputs, target, name = torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor([1, 2]), objects.put(mine)
    for is_paired in (True, False):
        Loss(LossOptions(name, is_paired=is_paired))(outputs, {"input": outputs, "target": target})
    objects.remove(name)
    assert got[0] == (torch.float32, target) and list(got[1][1]) == ["input", "target"]


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5]), label_smoothing=0.1, ignore_index=2),
        nn.MultiMarginLoss(weight=torch.tensor([1.0, 3.0, 0.5])),
    ],
    ids=lambda criterion: type(criterion).__name__,
)
def test_a_criterion_computes_as_torch_does_in_the_type_of_the_outputs(criterion: nn.Module) -> None:
    name = objects.put(criterion)
    logits = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([1, 0, 2, 2, 1, 1])
    measured = Loss(LossOptions(name, is_paired=True))(logits, {"input": logits, "target": target})
    objects.remove(name)
    count = 1.0 if measured.count is None else float(measured.count)
    assert float(measured.total) / count == pytest.approx(float(criterion.double()(logits, target)), rel=1e-12)
    assert (measured.count is None) == isinstance(criterion, nn.MultiMarginLoss)


def test_means_over_elements_count_alike_and_others_may_not() -> None:
    for criterion, counts_alike in ((nn.MSELoss(), True), (nn.MSELoss(reduction="sum"), False), (half, False)):
        name = objects.put(criterion)
        assert Loss(LossOptions(name, is_paired=True)).counts_alike == counts_alike
        objects.remove(name)


def test_a_criterion_with_parameters_is_refused() -> None:
    name = objects.put(nn.Linear(2, 1))
    with pytest.raises(UserError, match="'weight', which no stage would train"):
        Loss(LossOptions(name, is_paired=True))
    objects.remove(name)


def test_an_error_has_the_name_that_the_script_knows() -> None:
    def mine(outputs: Tensor, target: Tensor) -> Tensor:
        return outputs

    loss = Loss(LossOptions(objects.put(mine), is_paired=True))
    with pytest.raises(LossError, match=r"^--loss mine returns a loss of shape \[2, 3\]"):
        loss(torch.ones(2, 3), {"input": torch.ones(2), "target": torch.ones(2)})
