"""Probing finds the shapes at every cut and leaves the model as it was."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagewright.model.call import Inputs
from stagewright.model.chain import Chain
from stagewright.model.loss import Measured
from stagewright.model.pieces import whole_piece
from stagewright.model.probe import Given, probe
from tests import models
from tests.parity import build

_AUTOCAST = partial(torch.autocast, "cpu", torch.bfloat16)


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


class Using(nn.Module):
    """Does something with its input."""

    def __init__(self, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self._use = use
        self.convolution = nn.Conv2d(3, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self._use(self.convolution, image)


def without_autocast(convolve: nn.Module, image: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return convolve(image)  # type: ignore[no-any-return]


def by_type(convolve: nn.Module, image: Tensor) -> Tensor:
    return convolve(image) * (1 if image.dtype == torch.float32 else 2)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("use", "context", "are_casts"),
    [
        (lambda convolve, image: convolve(image), _AUTOCAST, True),
        (lambda convolve, image: convolve(image) + convolve(image).mean(), _AUTOCAST, True),
        (lambda convolve, image: convolve(image) * image.shape[1], _AUTOCAST, True),
        (lambda convolve, image: convolve(image), nullcontext, False),
        (lambda convolve, image: convolve(image) + image.mean(), _AUTOCAST, False),
        (lambda convolve, image: convolve(image) + image[:1], _AUTOCAST, False),
        (lambda convolve, image: convolve(2 * image), _AUTOCAST, False),
        (lambda convolve, image: convolve(image.float()), _AUTOCAST, False),
        (without_autocast, _AUTOCAST, False),
        (by_type, _AUTOCAST, False),
    ],
)
def test_inputs_of_which_only_casts_are_used_are_found(
    use: Callable[[nn.Module, Tensor], Tensor], context: Any, are_casts: bool
) -> None:
    piece = whole_piece(Using(use))
    given = Given(Inputs.of(torch.rand(2, 3, 4, 4)))
    assert probe([piece], given, context, training=True, watches_inputs=True).casts_inputs is are_casts
    assert probe([piece], given, context, training=False, watches_inputs=True).casts_inputs is are_casts


def test_an_input_that_a_later_stage_uses_is_no_cast() -> None:
    """Of the next stage another rank computes, which gets what the first stage got."""
    chain = Chain(Using(lambda convolve, image: convolve(convolve(image))), torch.rand(2, 3, 4, 4), context=_AUTOCAST)
    given = Given(Inputs.of(torch.rand(2, 3, 4, 4)))
    assert probe(chain.cut(chain.units[1:2]), given, _AUTOCAST, training=True, watches_inputs=True).casts_inputs
    twice = Using(lambda convolve, image: convolve(convolve(image) + convolve(image)))
    chain = Chain(twice, torch.rand(2, 3, 4, 4), context=_AUTOCAST)
    first = chain.cut(chain.units[1:2])
    assert any(value.field for value in probe(first, given, _AUTOCAST, training=True, watches_inputs=True).cuts[0])
    assert not probe(first, given, _AUTOCAST, training=True, watches_inputs=True).casts_inputs


def test_an_input_that_the_loss_reads_is_no_cast() -> None:
    image = torch.rand(2, 3, 4, 4)
    given = Given(Inputs.of(image), ("image",), {"image": image})

    def measure(output: Tensor, fields: Any) -> Measured:
        return Measured((output - fields["image"]).square().mean())

    pieces = [whole_piece(Using(lambda convolve, image: convolve(image)))]
    assert probe(pieces, given, _AUTOCAST, training=True, watches_inputs=True).casts_inputs
    assert not probe(pieces, given, _AUTOCAST, training=True, measure=measure, watches_inputs=True).casts_inputs
