"""The version ring puts views of flat buffers into ordinary modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stagewright.runtime.stage.versions import VersionRing


def make(versions: int, model: nn.Module | None = None) -> tuple[nn.Module, VersionRing]:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    return model, VersionRing([model], {name for name, _ in model.named_parameters()}, versions)


def test_one_version_trains_the_master_in_place() -> None:
    model, ring = make(1)
    before = ring.master.clone()
    with torch.no_grad():
        ring.master.add_(1.0)
    assert torch.equal(model[0].weight, ring.named(before)["0.weight"] + 1)


def test_the_authors_own_parameters_become_views_of_the_master_wherever_they_are_held() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    held = list(model.parameters())
    ring = VersionRing([model], {name for name, _ in model.named_parameters()}, 1, keeps_objects=True)
    with torch.no_grad():
        ring.master.fill_(2.0)
    assert all(
        own is before and bool((before == 2.0).all()) for own, before in zip(model.parameters(), held, strict=True)
    )
    assert all(leaf is before for leaf, before in zip(ring.use(0).leaves, held, strict=True))


def test_complex_parameters_lie_in_the_master_as_pairs_of_real_numbers() -> None:
    model = nn.ParameterDict({"filter": nn.Parameter(torch.tensor([[1 + 2j, 3 - 4j]], dtype=torch.complex64))})
    ring = VersionRing([model], {"filter"}, 2)
    assert ring.master.dtype == torch.float32 and ring.master.tolist()[:4] == [1.0, 2.0, 3.0, -4.0]
    assert torch.equal(model["filter"], torch.tensor([[1 + 2j, 3 - 4j]], dtype=torch.complex64))


def test_a_stage_without_parameters_has_its_buffers_on_the_device_of_the_run() -> None:
    ring = VersionRing([nn.Flatten()], set(), 2, device=torch.device("meta"))
    assert ring.master.device.type == "meta" and ring.master.numel() == 0


def test_a_version_keeps_its_weights_until_its_slot_is_refilled() -> None:
    model, ring = make(2)
    x = torch.randn(5, 4)
    ring.use(0)
    first = model(x).detach()
    with torch.no_grad():
        ring.master.mul_(2.0)
    ring.refill(2, 1)  # overwrites the slot of update 0
    ring.use(1)
    assert torch.equal(model(x), first)
    assert ring.use(2).version == 1
    assert not torch.equal(model(x), first)
    ring.refill(3, 2)
    assert ring.use(3).version == 2
    assert not torch.equal(model(x), first)


@pytest.mark.parametrize(
    "fill", [lambda flat: flat.copy_(torch.ones_like(flat)), lambda flat: torch.add(flat, 1.0, out=flat)]
)
def test_overwriting_a_version_in_use_raises(fill: Callable[[Tensor], None]) -> None:
    model, ring = make(2)
    ring.use(0)
    loss = model(torch.randn(5, 4)).sum()
    ring.refill(2, 1, fill)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_keep_their_strides() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    stride = model[0].weight.stride()
    _, ring = make(2, model)
    assert ring.use(0).leaves[0].stride() == stride


def test_tied_parameters_share_one_view() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    _, ring = make(2, model)
    assert len(ring.parameters) == 1 and set(ring.named(ring.master)) == {"0.weight", "1.weight"}
    ring.use(1)
    assert model[0].weight is model[1].weight


def test_recurrent_layers_use_the_swapped_in_version() -> None:
    model, ring = make(2, nn.LSTM(4, 3))
    x = torch.randn(2, 1, 4)
    ring.use(0)
    first = model(x)[0]
    with torch.no_grad():
        ring.master.mul_(3.0)
    ring.refill(2, 1)
    ring.use(2)
    assert not torch.equal(model(x)[0], first)
