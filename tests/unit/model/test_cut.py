"""Cutting a model: the pieces compute what the whole model computes, and an invalid cut is a one-line error."""

from pathlib import Path

import pytest
import torch

from stagewright.model.cut import Chain
from tests import models
from tests.parity import Case, build, make_job


@pytest.mark.parametrize("model", ["plain", "residual", "branching", "gated"])
def test_the_pieces_compute_what_the_whole_model_computes(model: str) -> None:
    module = build(model).eval()
    chain, inputs = Chain(module, models.make_data(model, 4)[0]), models.make_data(model, 4)[0]
    expected = module(inputs.clone())
    for cut in chain.units[1:]:
        first, second = chain.cut([cut])
        assert torch.equal(second.evaluation(*first.evaluation(inputs.clone())), expected)


def test_shares_put_boundaries_at_the_floor_of_their_prefix() -> None:
    chain = Chain(models.plain(), models.make_data("plain", 4)[0])
    units = len(chain.units)
    assert chain.by_shares([1, 1]) == (chain.units[units // 2],)
    assert chain.by_shares([1, 2, 1]) == (chain.units[units // 4], chain.units[units * 3 // 4])
    uneven = next(total for total in range(2, units) if units % total)
    assert chain.by_shares([1, uneven - 1]) == (chain.units[units // uneven],)
    with pytest.raises(ValueError, match="shares 0:1: each must be at least 1"):
        chain.by_shares([0, 1])


@pytest.mark.parametrize(
    ("model", "cut", "words"),
    [
        ("tied", "third", ["third.weight", "second.weight", "stage 0", "stage 1", "move the cut"]),
        ("reused", "second_1", ["second.weight", "stage 0", "stage 1"]),
        ("alias", "relu", ["view", "first", "cut before 'relu'", "in place"]),
        ("untraceable", "head", ["_Untraceable", "can't be cut", "reads values"]),
        ("gated", "gate.conv", ["gate.conv", "no such unit"]),
        ("plain", "spam", ["spam", "no such unit"]),
        ("plain", "first", ["stage 0", "without units"]),
    ],
)
def test_an_invalid_cut_is_a_one_line_error(model: str, cut: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError) as raised:
        make_job(Case(model, "0:0-1.0:2", cut), tmp_path)
    message = str(raised.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_an_untraceable_model_is_an_error_without_a_named_cut_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="_Untraceable can't be cut") as raised:
        make_job(Case("untraceable", "0:0-1.0:2"), tmp_path)
    assert "\n" not in str(raised.value)
