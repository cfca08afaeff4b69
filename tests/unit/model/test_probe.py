"""Probing finds the shapes at every cut and leaves the model as it was."""

from contextlib import nullcontext

import pytest
import torch

from stagewright.model.call import Inputs
from stagewright.model.cut import Chain
from stagewright.model.probe import Given, probe
from tests import models
from tests.parity import build


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_residual_cut_has_both_branches(training: bool) -> None:
    chain = Chain(models.residual(), models.make_data("residual", 4)[0])
    shapes = set()
    for cut in chain.units[1:]:
        found = probe(
            chain.cut([cut]), Given(Inputs.of(models.make_data("residual", 4)[0])), nullcontext, training=training
        )
        (values,) = found.cuts
        assert found.samples == 4 and all(value.shape[0] == 4 for value in values if value.dtype is not None)
        shapes.add(len(values))
    assert shapes == {1, 2}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("model", "cut"), [("normed", "third"), ("dropping", "third"), ("cumulative", "third"), ("gated", "gate")]
)
def test_probing_changes_neither_statistics_nor_random_state(model: str, cut: str, training: bool) -> None:
    module = build(model).double()
    pieces = (chain := Chain(module, models.make_data(model, 4)[0].double())).cut(chain.by_names([cut]))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    modes = [part.training for part in module.modules()]
    random_state = torch.get_rng_state()
    probe(pieces, Given(Inputs.of(models.make_data(model, 4)[0].double())), nullcontext, training=training)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [part.training for part in module.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
