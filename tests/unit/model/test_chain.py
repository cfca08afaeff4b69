"""Cutting a model: the pieces compute what the whole model computes, and an invalid cut is a one-line error."""

from pathlib import Path

import pytest
import torch
from torch import nn

from stagewright.cluster.catalog import shipped
from stagewright.errors import UserError
from stagewright.model.call import Form
from stagewright.model.chain import Chain, tied_parameters
from stagewright.profile.analytic import analytic_table
from stagewright.profile.trace import meta_example, trace_shapes
from tests import models
from tests.parity import Case, build, make_job
from tests.traits import TRAITS


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
        ("normed_twice", "third_3", ["third.1.running_mean", "both sides"]),
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


def test_running_statistics_that_the_code_reads_stay_with_their_layer() -> None:
    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.middle, self.last = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.last(self.middle(self.norm(rows)) - self.norm.running_mean)

    chain = Chain(Centered(), torch.randn(4, 4))
    assert set(chain.impossible) == {"middle", "sub"}
    with pytest.raises(UserError, match=r"'norm\.running_mean' would be used on both sides"):
        chain.cut(["middle"])
    assert len(chain.cut(["last"])) == 2


def test_an_untraceable_model_is_an_error_without_a_named_cut_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="_Untraceable can't be cut") as raised:
        make_job(Case("untraceable", "0:0-1.0:2"), tmp_path)
    assert "\n" not in str(raised.value)


def test_the_planner_never_sees_a_unit_that_no_stage_can_begin_with() -> None:
    chain = Chain(models.alias(), models.make_data("alias", 4)[0])
    assert list(chain.impossible) == ["relu"]
    with torch.device("meta"):
        twin = Chain(models.alias(), meta_example(Form.image(8)))
    table = analytic_table(trace_shapes(twin), shipped().device("cpu"), "fp32", 4, shipped().system("stagewright"))
    names = [unit.name for unit in table.of_stages().units]
    assert names == [unit for unit in chain.units if unit not in chain.impossible]
    assert table.of_stages().seconds == pytest.approx(table.seconds)
    assert set(chain.by_shares([1] * len(names))) == set(names[1:])


def test_a_cut_by_a_modules_name_begins_where_its_call_begins() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x * 2)

    chain = Chain(torch.nn.Sequential(Block(), Block()), torch.zeros(1, 4))
    assert chain.by_names(["1"]) == ("mul_1",) and chain.by_names(["1.layer"]) == ("1.layer",)


@pytest.mark.parametrize(
    ("model", "cuts", "tied"),
    [
        ("language", ("second",), {("embed.weight", "head.weight"): (0, 1)}),
        ("language", ("first", "second", "head"), {("embed.weight", "head.weight"): (0, 3)}),
        ("chained", ("first", "head"), {("embed.weight", "head.weight"): (0, 2), ("gain.weight",): (0, 1)}),
        ("tied", ("third",), {("second.weight", "third.weight"): (0, 1)}),
        ("tied", ("second",), {}),
        ("reused", ("second_1",), {("second.weight",): (0, 1), ("second.bias",): (0, 1)}),
        ("plain", ("third",), {}),
    ],
)
def test_a_chain_names_the_parameters_that_several_stages_use(
    model: str, cuts: tuple[str, ...], tied: dict[tuple[str, ...], tuple[int, ...]]
) -> None:
    chain = Chain(getattr(models, model)(), models.make_data(model, 4)[0])
    found = chain.tied(cuts)
    assert {names: homes for names, homes, _ in found} == tied
    assert [size for *_, size in found] == [chain.model.get_parameter(names[0]).numel() for names, *_ in found]
    assert set(tied_parameters(chain.model, chain.cut(cuts))) == set(found)


def test_a_frozen_parameter_is_no_tie() -> None:
    model = models.language()
    model.get_parameter("embed.weight").requires_grad_(False)
    assert Chain(model, models.make_data("language", 4)[0]).tied(("second",)) == ()


def test_stages_that_run_one_module_have_copies_of_it_with_its_parameters() -> None:
    chain = Chain(models.reused(), models.make_data("reused", 4)[0])
    first, second = (piece.training.get_submodule("second") for piece in chain.cut(("second_1",)))
    assert first is not second
    assert first.weight is second.weight


def test_a_parameter_that_a_change_in_place_reads_may_be_on_both_sides_of_a_cut() -> None:
    trait = TRAITS["moving average of weights"]
    assert Chain(trait.factory(), trait.data(2)[0]).impossible == {}


def test_the_chain_of_another_build_knows_its_ties_without_a_recording() -> None:
    chain = Chain(models.language(), models.make_data("language", 4)[0])
    other = chain.on(models.language().double())
    assert other.trace is chain.trace and other.tied(("second",)) == chain.tied(("second",)) != ()
