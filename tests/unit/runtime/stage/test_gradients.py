"""Gradients of updates: accumulated in flat buffers, summed bucket by bucket, unscaled, and clipped as by torch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from stagewright.runtime.comm.transport import Collective, Pending, Solo
from stagewright.runtime.stage.gradients import GradientBuffers, GradientOptions, Norms, clip_factor, make_buckets
from stagewright.runtime.stage.versions import VersionRing


class Sum:
    """A sum over two replicas, which is complete once the test says so."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.at_start = tensor.clone()
        self.is_done = False

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        assert self.is_done


class Sums:
    """A collective that records what it is asked to sum."""

    def __init__(self) -> None:
        self.started: list[Sum] = []

    def sum(self, tensor: Tensor) -> Pending:
        self.started.append(Sum(tensor))
        return self.started[-1]


class Setup:
    """A small model with its weights and gradients; by default every parameter is a bucket of its own."""

    def __init__(
        self, collective: Collective | None = None, *, versions: int = 2, buffers: int = 1, **options: float | None
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        self.names = [name for name, _ in self.model.named_parameters()]
        self.ring = VersionRing([self.model], set(self.names), versions)
        chosen = GradientOptions(**{"bucket_bytes": 0, **options})  # type: ignore[arg-type]
        self.gradients = GradientBuffers(self.ring.parameters, self.ring.master, buffers, collective or Solo(), chosen)

    def backward(self, update: int, *, overlap: bool = False, scale: float | None = None) -> dict[str, Tensor]:
        """Run a microbatch; returns its own gradient."""
        slot = self.ring.use(update)
        loss = self.model(torch.randn(5, 4)).square().sum() * (scale or 1.0)
        own = torch.autograd.grad(loss, slot.leaves, retain_graph=True)
        factor = None if scale is None else torch.full((1,), scale)
        with self.gradients.accumulating(update, slot.leaves, overlap=overlap, loss_scale=factor):
            loss.backward()
        return dict(zip(self.names, own, strict=True))

    def named(self, update: int) -> dict[str, Tensor]:
        """A copy of the gradient as it is now."""
        flat = self.gradients.finish(update)
        return {name: tensor.clone() for name, tensor in self.ring.named(flat).items()}


def added(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum((part[name] for part in parts[1:]), parts[0][name]) for name in parts[0]}


@pytest.mark.parametrize("overlap", [False, True])
def test_microbatches_add_up_and_nothing_is_left_of_an_earlier_update(overlap: bool) -> None:
    setup = Setup()
    for update in range(3):
        parts = [setup.backward(update, overlap=overlap) for _ in range(3)]
        torch.testing.assert_close(setup.named(update), added(parts), rtol=0, atol=0)
        setup.gradients.release(update)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_parameter_without_a_gradient_gets_zeros(overlap: bool) -> None:
    setup, sums = Setup(collective := Sums()), collective.started
    setup.backward(0)
    setup.gradients.reduce(0)
    setup.gradients.release(0)
    sums.clear()
    slot = setup.ring.use(1)
    with setup.gradients.accumulating(1, slot.leaves, overlap=overlap):
        setup.model[2](torch.randn(5, 3)).sum().backward()
    setup.gradients.reduce(1)
    assert [bool(part.at_start.any()) for part in sums] == [True, True, False, False]


def test_each_bucket_is_summed_during_backward_once_it_holds_the_whole_round() -> None:
    setup = Setup(collective := Sums())
    first = setup.backward(0)
    assert collective.started == []
    parts = added([first, setup.backward(0, overlap=True)])
    assert len(collective.started) == 4
    setup.gradients.reduce(0)
    assert len(collective.started) == 4, "a bucket was summed twice"
    for name, part in zip(reversed(setup.names), collective.started, strict=True):
        torch.testing.assert_close(part.at_start, parts[name].flatten(), rtol=0, atol=0)


def test_buckets_start_in_the_order_of_the_parameters_even_if_gradients_arrive_in_another() -> None:
    setup = Setup(collective := Sums())
    slot = setup.ring.use(0)
    started: list[int] = []
    with setup.gradients.accumulating(0, slot.leaves, overlap=True):
        for leaf in slot.leaves:
            (leaf * 2).sum().backward()
            started.append(len(collective.started))
    assert started == [0, 0, 0, 4]
    assert [part.tensor.numel() for part in collective.started] == [2, 6, 3, 12]


def test_a_bucket_waits_for_all_its_parameters() -> None:
    setup = Setup(collective := Sums(), bucket_bytes=2**20)
    slot = setup.ring.use(0)
    with setup.gradients.accumulating(0, slot.leaves, overlap=True):
        for leaf in slot.leaves:
            assert collective.started == []
            (leaf * 2).sum().backward()
        (whole,) = collective.started
    assert torch.equal(whole.tensor, setup.gradients.finish(0))


def test_without_overlap_sums_start_at_reduce() -> None:
    setup = Setup(collective := Sums())
    setup.backward(0)
    assert collective.started == []
    setup.gradients.reduce(0)
    assert len(collective.started) == 4


def test_a_replica_without_a_microbatch_joins_with_zeros() -> None:
    setup = Setup(collective := Sums())
    setup.backward(0)
    setup.gradients.release(0)
    setup.gradients.reduce(1)
    assert len(collective.started) == 4 and not any(part.at_start.any() for part in collective.started)


def test_a_bucket_is_full_once_it_has_its_bytes() -> None:
    model = nn.Sequential(*(nn.Linear(4, 1, bias=False) for _ in range(5)))
    parameters = VersionRing([model], {name for name, _ in model.named_parameters()}, 1).parameters
    assert make_buckets(parameters, 4, 32) == [(4, 3), (2, 1), (0,)]
    assert make_buckets(parameters, 4, 33) == [(4, 3, 2), (1, 0)]


def test_an_update_is_pending_until_every_bucket_is_summed() -> None:
    setup = Setup(collective := Sums())
    setup.backward(0, overlap=True)
    for part in collective.started:
        assert not setup.gradients.pending(0).is_completed()
        part.is_done = True
    assert setup.gradients.pending(0).is_completed()


def test_two_updates_in_flight_have_a_buffer_each() -> None:
    setup = Setup(collective := Sums(), buffers=2)
    first = setup.backward(0)
    setup.gradients.reduce(0)
    collective.started[0].is_done = True
    second = setup.backward(1)
    torch.testing.assert_close((setup.named(0), setup.named(1)), (first, second), rtol=0, atol=0)
    with pytest.raises(AssertionError, match="update 2 would overwrite the gradient of update 0"):
        setup.backward(2)


def test_unscaling_divides_once_by_the_scale_of_the_first_microbatch() -> None:
    setup = Setup()
    parts = [setup.backward(0, scale=1024.0) for _ in range(2)]
    scale = setup.gradients.loss_scale(0)
    assert scale is not None and scale.item() == 1024.0
    assert setup.gradients.unscale(0) == 0.0
    expected = {name: tensor / 1024.0 for name, tensor in added(parts).items()}
    torch.testing.assert_close(setup.named(0), expected, rtol=0, atol=0)
    with pytest.raises(AssertionError, match="update 0 has no loss scale"):
        setup.gradients.unscale(0)


def test_the_loss_scale_outlives_the_message_that_brought_it() -> None:
    setup = Setup()
    slot, message = setup.ring.use(0), torch.full((1,), 8.0)
    with setup.gradients.accumulating(0, slot.leaves, overlap=False, loss_scale=message):
        setup.model(torch.randn(5, 4)).sum().backward()
    message.fill_(3.0)
    assert setup.gradients.loss_scale(0) == 8.0


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_unscaling_finds_a_value_that_is_not_finite(value: float) -> None:
    setup = Setup()
    setup.backward(0, scale=8.0)
    setup.gradients.finish(0)[7] = value
    assert setup.gradients.unscale(0) == 1.0


@pytest.mark.parametrize("norm", [0.0, 0.1, 0.3, 0.5, 40.0])
def test_clipping_equals_torch_and_never_enlarges_a_gradient(norm: float) -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    weight.grad = norm * torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64) / 3
    gradient = weight.grad.clone()
    nn.utils.clip_grad_norm_([weight], 0.3)
    clipped = gradient * clip_factor(torch.linalg.vector_norm(gradient), 0.3)
    assert torch.allclose(clipped, weight.grad, rtol=1e-12) and clipped.norm() <= gradient.norm()


def test_a_finished_gradient_is_multiplied_by_the_factor_then_clipped_by_its_own_norm() -> None:
    setup = Setup(factor=0.5, clip=0.3)
    parts = setup.backward(0)
    norm = torch.cat([part.flatten() for part in parts.values()]).double().norm().item()
    assert setup.gradients.norm(0).item() == pytest.approx(norm) and norm > 0.6
    expected = {name: part * (0.3 / norm) for name, part in parts.items()}
    torch.testing.assert_close(setup.named(0), expected, rtol=1e-5, atol=0)
    small = Setup(factor=0.5, clip=1e6)
    parts = small.backward(0)
    torch.testing.assert_close(small.named(0), {name: part * 0.5 for name, part in parts.items()}, rtol=0, atol=0)


def test_a_given_norm_is_clipped_by_instead_of_its_own() -> None:
    setup = Setup(clip=1.0)
    parts = setup.backward(0)
    finished = setup.ring.named(setup.gradients.finish(0, torch.tensor(4.0, dtype=torch.float64)))
    torch.testing.assert_close(dict(finished), {name: part / 4 for name, part in parts.items()}, rtol=1e-6, atol=0)


def test_norms_are_squared_and_belong_to_one_update() -> None:
    norms = Norms(3, collective := Sums())
    norms.exchange({1: torch.tensor(3.0), 2: torch.tensor(2.0)}, 7)
    assert norms.squares(7).tolist() == [0.0, 9.0, 4.0] and norms.pending(7) is collective.started[0]
    with pytest.raises(KeyError):
        norms.squares(6)


def test_gradients_have_the_strides_of_their_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    stride = model[0].weight.stride()
    ring = VersionRing([model], {"0.weight", "0.bias"}, 1)
    gradients = GradientBuffers(ring.parameters, ring.master, 1, Solo(), GradientOptions(0))
    slot = ring.use(0)
    with gradients.accumulating(0, slot.leaves, overlap=False):
        model(torch.randn(2, 3, 5, 5)).sum().backward()
    assert slot.leaves[0].grad is not None and slot.leaves[0].grad.stride() == stride != (27, 9, 3, 1)


def test_a_parameter_is_left_alone_where_no_replica_reached_it() -> None:
    setup = Setup(collective := Sums(), is_conditional=True)
    with setup.gradients.accumulating(0, setup.ring.use(0).leaves, overlap=False):
        setup.model[2](torch.randn(5, 3)).sum().backward()
    setup.gradients.reduce(0)
    flags = collective.started[-1].tensor
    assert flags.tolist() == [0, 0, 1, 1]
    assert setup.gradients.unreached(0) == [0, 1]
    flags[1] += 1  # the other replica has reached it
    assert setup.gradients.unreached(0) == [0]


def test_a_missing_gradient_is_an_error_where_what_runs_is_fixed() -> None:
    setup = Setup(Sums())
    with setup.gradients.accumulating(0, setup.ring.use(0).leaves, overlap=False):
        setup.model[2](torch.randn(5, 3)).sum().backward()
    setup.gradients.reduce(0)
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        setup.gradients.unreached(0)


def test_homes_exchange_the_norm_by_which_they_clip() -> None:
    """Where a loss is a total, its count is that of the stage's own round, and no other factor applies."""
    for options in ({"factor": 0.5}, {"factor": 0.5, "divisor": 10.0, "figures": 1}):
        setup = Setup(**options)
        setup.backward(0)
        if "divisor" in options:
            setup.gradients.figures(0)[0] = 4.0
        exchanged = setup.gradients.norm(0) * setup.gradients.factor
        assert torch.linalg.vector_norm(setup.gradients.finish(0)).item() == pytest.approx(float(exchanged))
