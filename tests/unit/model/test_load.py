"""Building models by name, and replacing poolings that are not deterministic."""

import pytest
import torch
from torch import nn

from stagewright.model.load import build_model, make_deterministic


def test_a_list_of_modules_is_a_chain() -> None:
    assert isinstance(build_model("tests.models:listed", seed=0), nn.Sequential)


@pytest.mark.parametrize("name", ["resnet8", "tests.models:residual"])
def test_the_seed_determines_the_weights_and_the_random_state_is_kept(name: str) -> None:
    before = torch.get_rng_state()
    first, again, other = (build_model(name, seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("size", [1, 3, (2, 4), (None, 3)])
@pytest.mark.parametrize("side", [12, 13])
def test_deterministic_pooling_equals_adaptive_pooling(size: object, side: int) -> None:
    features = torch.randn(2, 5, 12, side, dtype=torch.float64)
    plain = nn.AdaptiveAvgPool2d(size)  # type: ignore[arg-type]
    replaced = make_deterministic(nn.Sequential(nn.Sequential(plain)))
    assert type(replaced[0][0]) is not nn.AdaptiveAvgPool2d  # type: ignore[index]
    torch.testing.assert_close(replaced(features), plain(features))
