"""The reference trainer against torch.optim, against recurrences written out by hand, and against b2sum."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.reference import Group, Result, Setup, stage_seed, train

torch.set_num_threads(1)


def lr(p: int) -> float:
    return 0.2 / (p + 1)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-12) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


# --- No lag: one process with gradient accumulation ------------------------------------------------------------------


class Odd(nn.Module):
    """Two tied layers, a frozen one, one that is never used and one used by some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return self.head(hidden + self.sometimes(hidden) if x[0, 0] > 0 else hidden)


def odd_stage(name: str) -> int:
    return int(name.startswith(("head", "unused")))


def odd_data() -> tuple[Tensor, Tensor]:
    """Samples 0-7 do not use `sometimes`; of samples 8-15 two of the four microbatches do."""
    generator = torch.Generator().manual_seed(5)
    images, labels = torch.randn(20, 4, generator=generator), torch.randint(3, (20,), generator=generator)
    images[:8, 0] = -images[:8, 0].abs()
    images[[8, 10, 12, 14], 0] = torch.tensor([0.3, -0.2, 0.4, -0.1])
    return images, labels


PLAIN = Setup(replicas=(3, 2), versions=(1, 1), batch=8, microbatches=4, steps=7, seed=11, lr=lr)
EPOCHS_OF_TWO_BATCHES = [range(8), range(8, 16)] * 3 + [range(8)]

OPTIMIZERS: dict[str, tuple[Setup, Callable[..., torch.optim.Optimizer], dict[str, object]]] = {
    "sgd": (
        replace(PLAIN, nesterov=True, weight_decay=0.03),
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.03},
    ),
    "sgd without nesterov": (replace(PLAIN, momentum=0.5), torch.optim.SGD, {"momentum": 0.5}),
    "adamw": (
        replace(PLAIN, optimizer="adamw", weight_decay=0.03, betas=(0.8, 0.95), eps=1e-6),
        torch.optim.AdamW,
        {"weight_decay": 0.03, "betas": (0.8, 0.95), "eps": 1e-6},
    ),
    "rmsprop": (
        replace(PLAIN, optimizer="rmsprop", momentum=0.7, weight_decay=0.03, betas=(0.5, 0.9), eps=0.01),
        torch.optim.RMSprop,
        {"momentum": 0.7, "weight_decay": 0.03, "alpha": 0.9, "eps": 0.01},
    ),
    "adamw by default": (replace(PLAIN, optimizer="adamw"), torch.optim.AdamW, {"weight_decay": 0.0}),
}


def plain_loop(
    setup: Setup,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    options: dict[str, object],
    batches: list[range],
    norms: list[float] | None = None,
    average: Callable[[nn.Module], object] = lambda model: None,
) -> tuple[list[float], nn.Module]:
    """Gradient accumulation as anyone would write it; `average` sees the model before and after each update."""
    torch.manual_seed(setup.seed)
    model = Odd().double()
    average(model)
    optimizer = make_optimizer(model.parameters(), lr=lr(0), **options)
    images, labels = odd_data()
    losses = []
    for p, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = lr(p)
        optimizer.zero_grad()
        total = 0.0
        for start in range(0, 8, 2):
            samples = list(batch)[start : start + 2]
            outputs = model(images[samples].double())
            loss = cross_entropy(outputs, labels[samples], label_smoothing=setup.label_smoothing) / 4
            loss.backward()
            total += loss.item()
        if setup.clip is not None:
            assert norms is not None
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), setup.clip)))
        optimizer.step()
        average(model)
        losses.append(total)
    return losses, model


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_without_lag_equals_gradient_accumulation(name: str, label_smoothing: float) -> None:
    setup, make_optimizer, options = OPTIMIZERS[name]
    setup = replace(setup, label_smoothing=label_smoothing)
    result = train(Odd, *odd_data(), odd_stage, (None, None), setup)
    losses, model = plain_loop(setup, make_optimizer, options, EPOCHS_OF_TWO_BATCHES)
    assert result.losses == pytest.approx(losses, rel=0, abs=1e-12)
    assert_same(result.weights, model.state_dict())


GROUPS: dict[str, tuple[Setup, Callable[..., torch.optim.Optimizer], dict[str, object], dict[str, object]]] = {
    "sgd": (
        replace(
            PLAIN, groups={"head.bias": Group(), "first.weight": Group(0.25, {"momentum": 0.0})}, weight_decay=0.03
        ),
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 0.03},
        {"momentum": 0.0},
    ),
    "adamw": (
        replace(
            PLAIN,
            optimizer="adamw",
            groups={"first.weight": Group(0.25, {"weight_decay": 0.5, "betas": (0.7, 0.8)})},
        ),
        torch.optim.AdamW,
        {"weight_decay": 0.0},
        {"weight_decay": 0.5, "betas": (0.7, 0.8)},
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_equal_the_parameter_groups_of_torch(name: str) -> None:
    setup, make_optimizer, options, own = GROUPS[name]
    result = train(Odd, *odd_data(), odd_stage, (None, None), setup)

    def make(parameters: object, **given: object) -> torch.optim.Optimizer:
        first, *others = parameters  # type: ignore[misc]
        optimizer = make_optimizer([{"params": others}, {"params": [first], **own}], **given)
        optimizer.register_step_pre_hook(
            lambda stepped, *_: stepped.param_groups[1].update(lr=0.25 * stepped.param_groups[0]["lr"])
        )
        return optimizer

    losses, model = plain_loop(setup, make, options, EPOCHS_OF_TWO_BATCHES)
    assert next(name for name, _ in model.named_parameters()) == "first.weight"
    assert result.losses == pytest.approx(losses, rel=0, abs=1e-12)
    assert_same(result.weights, model.state_dict())
    with pytest.raises(AssertionError):
        assert_same(train(Odd, *odd_data(), odd_stage, (None, None), replace(setup, groups={})).weights, result.weights)


def test_frozen_weights_stay_and_tied_weights_move_together() -> None:
    setup = replace(PLAIN, weight_decay=0.5)
    result = train(Odd, *odd_data(), odd_stage, (None, None), setup)
    torch.manual_seed(setup.seed)
    start = Odd().double().state_dict()
    moved = {name for name in start if not torch.equal(start[name], result.weights[name])}
    assert moved == {name for name in start if not name.startswith(("frozen", "unused"))}
    assert torch.equal(result.weights["first.weight"], result.weights["second.weight"])


def test_the_callers_order_decides_the_batches() -> None:
    result = train(Odd, *odd_data(), odd_stage, (None, None), PLAIN, order=lambda p: torch.arange(p, p + 8))
    losses, model = plain_loop(PLAIN, torch.optim.SGD, {"momentum": 0.9}, [range(p, p + 8) for p in range(7)])
    assert result.losses == pytest.approx(losses, rel=0, abs=1e-12)
    assert_same(result.weights, model.state_dict())


def test_clipping_without_lag_equals_torch_over_all_stages() -> None:
    setup = replace(PLAIN, clip=0.3)
    result = train(Odd, *odd_data(), odd_stage, (None, None), setup)
    norms: list[float] = []
    losses, model = plain_loop(setup, torch.optim.SGD, {"momentum": 0.9}, EPOCHS_OF_TWO_BATCHES, norms)
    assert min(norms) < 0.3 < max(norms)  # some batches are clipped, some are not
    assert result.losses == pytest.approx(losses, rel=0, abs=1e-12)
    assert_same(result.weights, model.state_dict())


def test_averaged_weights_without_lag_equal_torchs() -> None:
    """torch's average takes the first weights that it sees as they are, here the initial ones."""
    averaged: list[AveragedModel] = []

    def average(model: nn.Module) -> None:
        if not averaged:
            averaged.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7)))
        averaged[0].update_parameters(model)

    setup = replace(PLAIN, ema=0.7)
    result = train(Odd, *odd_data(), odd_stage, (None, None), setup)
    _, model = plain_loop(setup, torch.optim.SGD, {"momentum": 0.9}, EPOCHS_OF_TWO_BATCHES, average=average)
    assert_same(result.weights, model.state_dict())
    assert_same(result.averages, averaged[0].module.state_dict())
    assert not torch.allclose(result.averages["head.weight"], result.weights["head.weight"], rtol=1e-3)


def test_the_result_is_a_state_dict_and_the_random_state_is_unchanged() -> None:
    before = torch.get_rng_state()
    result = train(Normed, *normed_data(), normed_stage, (None, None), NORMED)
    assert torch.equal(before, torch.get_rng_state())
    Normed().double().load_state_dict(result.weights | result.buffers, strict=True)


# --- Lag: a product of two numbers, recurrences by hand --------------------------------------------------------------
#
# logits are [a*b*x, 0] and the label is 0, so with q = 1 / (1 + exp(a*b*x))
#     loss = log(1 + exp(-a*b*x))        dloss/da = -q*b*x        dloss/db = -q*a*x

A0, B0 = 0.7, -0.4


class Product(nn.Module):
    """Stage 0 multiplies by a, stage 1 by b."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(A0))
        self.b = nn.Parameter(torch.tensor(B0))

    def forward(self, x: Tensor) -> Tensor:
        logit = x * self.a * self.b
        return torch.stack([logit, torch.zeros_like(logit)], dim=1)


def product() -> nn.Module:
    model = Product().double()
    model.a.data.fill_(A0)
    model.b.data.fill_(B0)
    return model


def train_product(setup: Setup, inputs: list[float]) -> Result:
    images = torch.tensor(inputs, dtype=torch.float64)
    labels = torch.zeros(len(inputs), dtype=torch.long)
    return train(product, images, labels, {"a": 0, "b": 1}.__getitem__, (None, None), setup)


def loss_and_slopes(a: float, b: float, x: float) -> tuple[float, float, float]:
    q = 1 / (1 + math.exp(a * b * x))
    return math.log(1 + math.exp(-a * b * x)), -q * b * x, -q * a * x


@pytest.mark.parametrize("clip", [None, 0.25])
def test_a_stage_with_two_versions_lags_one_update(clip: float | None) -> None:
    def clipped(g: float) -> float:
        return g if clip is None else g * min(1.0, clip / (abs(g) + 1e-6))

    setup = Setup((2, 1), (2, 1), 1, 1, 4, momentum=0.5, weight_decay=0.1, clip=clip, lr=lambda p: [1, 2, 3, 4][p])
    result = train_product(setup, [1.0, -2.0, 3.0, 0.5])

    loss0, ga, gb = loss_and_slopes(A0, B0, 1.0)  # batch 0: versions 0 and 0
    va, vb = clipped(ga) + 0.1 * A0, clipped(gb) + 0.1 * B0
    a1, b1 = A0 - 1 * va, B0 - 1 * vb
    loss1, ga, gb = loss_and_slopes(A0, b1, -2.0)  # batch 1: versions 0 and 1; decay is of the newest
    va, vb = 0.5 * va + clipped(ga) + 0.1 * a1, 0.5 * vb + clipped(gb) + 0.1 * b1
    a2, b2 = a1 - 2 * va, b1 - 2 * vb
    loss2, ga, gb = loss_and_slopes(a1, b2, 3.0)  # batch 2: versions 1 and 2
    va, vb = 0.5 * va + clipped(ga) + 0.1 * a2, 0.5 * vb + clipped(gb) + 0.1 * b2
    a3, b3 = a2 - 3 * va, b2 - 3 * vb
    loss3, ga, gb = loss_and_slopes(a2, b3, 0.5)  # batch 3: versions 2 and 3
    va, vb = 0.5 * va + clipped(ga) + 0.1 * a3, 0.5 * vb + clipped(gb) + 0.1 * b3
    a4, b4 = a3 - 4 * va, b3 - 4 * vb

    assert result.losses == pytest.approx([loss0, loss1, loss2, loss3], rel=0, abs=1e-12)
    assert result.weights["a"].item() == pytest.approx(a4, rel=0, abs=1e-12)
    assert result.weights["b"].item() == pytest.approx(b4, rel=0, abs=1e-12)


def test_an_extrapolated_stage_uses_the_weights_ahead_along_its_momentum() -> None:
    rates = [1.0, 2.0, 3.0, 4.0, 5.0]
    setup = Setup((1, 1), (3, 1), 1, 1, 4, momentum=0.5, predict=True, lr=lambda p: rates[p])
    result = train_product(setup, [1.0, -2.0, 3.0, 0.5])

    loss0, ga, gb = loss_and_slopes(A0, B0, 1.0)  # batches 0, 1 and 2: version 0, which has no momentum
    va, vb = ga, gb
    a1, b1 = A0 - 1 * va, B0 - 1 * vb
    seen = a1 - 2 * (0.5 + 0.25) * va  # version 1, used two updates later; update 1 has rate 2
    loss1, ga, gb = loss_and_slopes(A0, b1, -2.0)
    va, vb = 0.5 * va + ga, 0.5 * vb + gb
    a2, b2 = a1 - 2 * va, b1 - 2 * vb
    loss2, ga, gb = loss_and_slopes(A0, b2, 3.0)
    va, vb = 0.5 * va + ga, 0.5 * vb + gb
    a3, b3 = a2 - 3 * va, b2 - 3 * vb
    loss3, ga, gb = loss_and_slopes(seen, b3, 0.5)  # batch 3: version 1
    va, vb = 0.5 * va + ga, 0.5 * vb + gb
    a4, b4 = a3 - 4 * va, b3 - 4 * vb

    assert result.losses == pytest.approx([loss0, loss1, loss2, loss3], rel=0, abs=1e-12)
    assert result.weights["a"].item() == pytest.approx(a4, rel=0, abs=1e-12)
    assert result.weights["b"].item() == pytest.approx(b4, rel=0, abs=1e-12)


def test_every_microbatch_of_a_batch_sees_the_same_version() -> None:
    setup = Setup((1, 3), (2, 1), 2, 2, 2, momentum=0.0, lr=lambda p: 1.0)
    result = train_product(setup, [1.0, -2.0, 3.0, 0.5])

    first, second = loss_and_slopes(A0, B0, 1.0), loss_and_slopes(A0, B0, -2.0)
    a1, b1 = A0 - (first[1] + second[1]) / 2, B0 - (first[2] + second[2]) / 2
    third, fourth = loss_and_slopes(A0, b1, 3.0), loss_and_slopes(A0, b1, 0.5)
    a2, b2 = a1 - (third[1] + fourth[1]) / 2, b1 - (third[2] + fourth[2]) / 2

    assert result.losses == pytest.approx([(first[0] + second[0]) / 2, (third[0] + fourth[0]) / 2], abs=1e-12)
    assert result.weights["a"].item() == pytest.approx(a2, rel=0, abs=1e-12)
    assert result.weights["b"].item() == pytest.approx(b2, rel=0, abs=1e-12)


# --- PipeDream: rounds instead of batches ----------------------------------------------------------------------------


INPUTS = [1.0, -2.0, 3.0, 0.5, -1.5, 2.5]
ROUNDS_MU = 0.5


def rounds_setup(replicas: tuple[int, int], versions: tuple[int, int]) -> Setup:
    """Two batches of three microbatches of one sample, the first at learning rate 1, the second at 2; decay 1/8."""
    return Setup(replicas, versions, 3, 3, 2, pipedream=True, momentum=ROUNDS_MU, ema=0.125, lr=lambda p: [1.0, 2.0][p])


def test_pipedream_with_two_replicas_feeding_one() -> None:
    result = train_product(rounds_setup((2, 1), (2, 1)), INPUTS)

    loss0, ga0, gb0 = loss_and_slopes(A0, B0, 1.0)
    vb = gb0
    b1 = B0 - 1 * vb
    loss1, ga1, gb1 = loss_and_slopes(A0, b1, -2.0)
    vb = ROUNDS_MU * vb + gb1
    b2 = b1 - 1 * vb
    va = (ga0 + ga1) / 2
    a1 = A0 - 1 * va
    loss2, ga2, gb2 = loss_and_slopes(A0, b2, 3.0)  # round 1 of stage 0: still version 0
    vb = ROUNDS_MU * vb + gb2
    b3 = b2 - 1 * vb
    loss3, ga3, gb3 = loss_and_slopes(A0, b3, 0.5)
    vb = ROUNDS_MU * vb + gb3
    b4 = b3 - 2 * vb
    va = ROUNDS_MU * va + (ga2 + ga3) / 2
    a2 = a1 - 1 * va  # the round began with microbatch 2, of batch 0
    loss4, ga4, gb4 = loss_and_slopes(a1, b4, -1.5)  # round 2 of stage 0: version 1
    vb = ROUNDS_MU * vb + gb4
    b5 = b4 - 2 * vb
    loss5, ga5, gb5 = loss_and_slopes(a1, b5, 2.5)
    vb = ROUNDS_MU * vb + gb5
    b6 = b5 - 2 * vb
    va = ROUNDS_MU * va + (ga4 + ga5) / 2
    a3 = a2 - 2 * va

    assert result.losses == pytest.approx([(loss0 + loss1 + loss2) / 3, (loss3 + loss4 + loss5) / 3], abs=1e-12)
    assert result.weights["a"].item() == pytest.approx(a3, rel=0, abs=1e-12)
    assert result.weights["b"].item() == pytest.approx(b6, rel=0, abs=1e-12)
    of_a = average_of([A0, a1, a2, a3], 0.25)  # 1/8 to the power of two microbatches of three
    assert result.averages["a"].item() == pytest.approx(of_a, rel=0, abs=1e-12)
    assert result.averages["b"].item() == pytest.approx(average_of([B0, b1, b2, b3, b4, b5, b6], 0.5), rel=0, abs=1e-12)


def average_of(values: list[float], decay: float) -> float:
    average, *later = values
    for value in later:
        average = decay * average + (1 - decay) * value
    return average


def test_pipedream_with_one_replica_feeding_two() -> None:
    result = train_product(rounds_setup((1, 2), (3, 1)), INPUTS)

    loss0, ga0, gb0 = loss_and_slopes(A0, B0, 1.0)
    va = ga0
    a1 = A0 - 1 * va
    loss1, ga1, gb1 = loss_and_slopes(A0, B0, -2.0)  # stage 1 is in its round 0
    va = ROUNDS_MU * va + ga1
    a2 = a1 - 1 * va
    vb = (gb0 + gb1) / 2
    b1 = B0 - 1 * vb
    loss2, ga2, gb2 = loss_and_slopes(A0, b1, 3.0)  # stage 0 lags two
    va = ROUNDS_MU * va + ga2
    a3 = a2 - 1 * va
    loss3, ga3, gb3 = loss_and_slopes(a1, b1, 0.5)
    va = ROUNDS_MU * va + ga3
    a4 = a3 - 2 * va
    vb = ROUNDS_MU * vb + (gb2 + gb3) / 2
    b2 = b1 - 1 * vb
    loss4, ga4, gb4 = loss_and_slopes(a2, b2, -1.5)
    va = ROUNDS_MU * va + ga4
    a5 = a4 - 2 * va
    loss5, ga5, gb5 = loss_and_slopes(a3, b2, 2.5)
    va = ROUNDS_MU * va + ga5
    a6 = a5 - 2 * va
    vb = ROUNDS_MU * vb + (gb4 + gb5) / 2
    b3 = b2 - 2 * vb

    assert result.losses == pytest.approx([(loss0 + loss1 + loss2) / 3, (loss3 + loss4 + loss5) / 3], abs=1e-12)
    assert result.weights["a"].item() == pytest.approx(a6, rel=0, abs=1e-12)
    assert result.weights["b"].item() == pytest.approx(b3, rel=0, abs=1e-12)


def test_pipedream_stops_at_a_multiple_of_lcm() -> None:
    with pytest.raises(ValueError, match=r"6 microbatches are no multiple of lcm\(4, 1\)"):
        rounds_setup((4, 1), (2, 1))


# --- BatchNorm -------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """BatchNorm right on the input (stage 0) and after a layer (stage 1), beside a buffer that is no statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.layer = nn.Linear(2, 3)
        self.late_norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        return self.late_norm(self.layer(self.norm(x))) + self.mask


def normed_stage(name: str) -> int:
    return int(name.startswith("late_norm"))


def normed_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(36, 2, generator=generator, dtype=torch.float64), torch.arange(36) % 2


NORMED = Setup(replicas=(2, 1), versions=(1, 1), batch=12, microbatches=3, steps=3, lr=lr)


def test_each_replica_updates_its_own_statistics_and_the_result_averages_them() -> None:
    result = train(Normed, *normed_data(), normed_stage, (None, None), NORMED)
    pieces = normed_data()[0].split(4)  # microbatches 0..8: replica 0 takes five of them, replica 1 four
    means, variances = [], []
    for replica, numbers in [(0, (0, 2, 4, 6, 8)), (1, (1, 3, 5, 7))]:
        mean, variance = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
        for i in numbers:
            mean = 0.9 * mean + 0.1 * pieces[i].mean(0)
            variance = 0.9 * variance + 0.1 * pieces[i].var(0)
        own = result.replica_buffers[0, replica]
        torch.testing.assert_close(own["norm.running_mean"], mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(own["norm.running_var"], variance, rtol=0, atol=1e-12)
        assert own["norm.num_batches_tracked"].item() == len(numbers)
        means.append(mean)
        variances.append(variance)
    mean, variance = (5 * means[0] + 4 * means[1]) / 9, (5 * variances[0] + 4 * variances[1]) / 9
    torch.testing.assert_close(result.buffers["norm.running_mean"], mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.buffers["norm.running_var"], variance, rtol=0, atol=1e-12)
    assert result.buffers["norm.num_batches_tracked"].item() == 9
    assert result.buffers["mask"].tolist() == [0.0, 0.0, -math.inf]


def test_statistics_of_a_single_replica_equal_one_process() -> None:
    result = train(Normed, *normed_data(), normed_stage, (None, None), NORMED)
    torch.manual_seed(NORMED.seed)
    model = Normed().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr(0), momentum=0.9)
    images, labels = normed_data()
    for p in range(3):
        optimizer.param_groups[0]["lr"] = lr(p)
        optimizer.zero_grad()
        for start in range(12 * p, 12 * p + 12, 4):
            (cross_entropy(model(images[start : start + 4]), labels[start : start + 4]) / 3).backward()
        optimizer.step()
    expected = {f"late_norm.{name}": buffer for name, buffer in model.late_norm.named_buffers()}
    assert_same(result.replica_buffers[1, 0], expected)
    assert_same({name: result.buffers[name] for name in expected}, expected)


def test_a_replica_without_microbatches_has_no_weight_in_the_mean() -> None:
    setup = replace(NORMED, replicas=(4, 1), steps=1)
    result = train(Normed, *normed_data(), normed_stage, (None, None), setup)
    assert result.replica_buffers[0, 3]["norm.running_mean"].tolist() == [0.0, 0.0]
    expected = sum(0.1 * piece.mean(0) for piece in normed_data()[0].split(4)[:3]) / 3
    torch.testing.assert_close(result.buffers["norm.running_mean"], expected, rtol=0, atol=1e-12)


# --- Randomness ------------------------------------------------------------------------------------------------------


class Noise(nn.Module):
    """Draws one number a call and writes it down."""

    def __init__(self, drawn: list[float]) -> None:
        super().__init__()
        self.drawn = drawn

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(torch.rand(()).item())
        return x


class Noisy(nn.Module):
    """Stage 0 is `early` twice, stage 1 begins at `late`, and `after` draws within it."""

    def __init__(self, drawn: list[float]) -> None:
        super().__init__()
        self.early, self.late, self.after = Noise(drawn), Noise(drawn), Noise(drawn)
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.after(self.late(self.early(self.early(x)))))


def test_the_seed_equals_b2sum() -> None:
    # printf 7/5/1 | b2sum | cut -c1-16
    assert stage_seed(7, 5, 1) == int.from_bytes(bytes.fromhex("eda6edc0477fc40b"), "little")


def test_each_stage_seeds_once_per_microbatch_at_its_start() -> None:
    drawn: list[float] = []
    setup = Setup(replicas=(2, 3), versions=(2, 1), batch=4, microbatches=2, steps=3, seed=7, lr=lr)
    images, labels = torch.ones(4, 2), torch.zeros(4, dtype=torch.long)
    train(lambda: Noisy(drawn), images, labels, lambda name: 1, ("early", "late"), setup)
    expected = []
    for i in range(6):
        for stage in (0, 1):
            generator = torch.Generator().manual_seed(stage_seed(7, i, stage))
            expected += [torch.rand((), generator=generator).item() for _ in range(2)]
    assert drawn == expected


def test_dropout_follows_the_seeds() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.head = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.drop(x))

    setup = Setup(replicas=(1,), versions=(1,), batch=4, microbatches=2, steps=2, seed=7, lr=lr)
    images, labels = torch.linspace(-1, 1, 48).view(8, 6), torch.arange(8) % 2
    result = train(Dropping, images, labels, lambda name: 0, ("drop",), setup)

    torch.manual_seed(7)
    model = Dropping().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr(0), momentum=0.9)
    for p in range(2):
        optimizer.param_groups[0]["lr"] = lr(p)
        optimizer.zero_grad()
        for i in (2 * p, 2 * p + 1):
            torch.manual_seed(stage_seed(7, i, 0))
            (cross_entropy(model(images[2 * i : 2 * i + 2].double()), labels[2 * i : 2 * i + 2]) / 2).backward()
        optimizer.step()
    assert_same(result.weights, model.state_dict())


def test_a_start_that_is_never_called_is_an_error() -> None:
    setup = Setup(replicas=(2, 1), versions=(1, 1), batch=12, microbatches=3, steps=1, lr=lr)

    class Spare(Normed):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Identity()

    with pytest.raises(AssertionError, match="never started on microbatch 0"):
        train(Spare, *normed_data(), normed_stage, (None, "spare"), setup)


def test_token_ids_stay_integers() -> None:
    def tokens_model() -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))

    setup = Setup(replicas=(1,), versions=(1,), batch=2, microbatches=1, steps=1, lr=lr)
    tokens, labels = torch.tensor([[0, 1], [4, 2]]), torch.tensor([0, 2])
    result = train(tokens_model, tokens, labels, lambda name: 0, (None,), setup)
    torch.manual_seed(0)
    start = tokens_model().double()
    assert result.losses == pytest.approx([cross_entropy(start(tokens), labels).item()], abs=1e-12)
    assert torch.equal(result.weights["0.weight"][3], start[0].weight[3])  # token 3 was not seen: a zero gradient


# --- Ties: one parameter in several stages ---------------------------------------------------------------------------


class Bow(nn.Module):
    """The first and the last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.middle = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("clip", [None, 0.05, 0.4])
def test_a_tied_weight_is_updated_by_the_sum_of_its_homes_and_clipped_by_the_smallest_factor(
    clip: float | None,
) -> None:
    stages = {"first.bias": 0, "middle.weight": 1, "middle.bias": 1, "last.bias": 2}
    lags = {0: 2, 1: 3, 2: 2}
    ties = (("first.weight", (0, 2)),)
    setup = Setup((2, 1, 1), (2, 3, 2), 8, 4, 6, seed=3, clip=clip, momentum=0.0, ties=ties, lr=lr)
    generator = torch.Generator().manual_seed(8)
    images, labels = torch.randn(16, 3, generator=generator), torch.randint(3, (16,), generator=generator)
    children = ["first", "middle", "last"]
    found = train(Bow, images, labels, lambda name: children.index(name.partition(".")[0]), children, setup)

    torch.manual_seed(3)
    model = Bow().double()
    history = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    for p in range(6):
        rows = slice(p % 2 * 8, p % 2 * 8 + 8)
        used = {name: history[max(0, p + 1 - lags[stages.get(name, 0)])][name] for name in history[0]}
        leaves = {name: w.clone().requires_grad_() for name, w in used.items()}
        hidden = torch.tanh(images[rows].double() @ leaves["first.weight"].T + leaves["first.bias"])
        hidden = torch.tanh(hidden @ leaves["middle.weight"].T + leaves["middle.bias"])
        logits = hidden @ leaves["first.weight"].T + leaves["last.bias"]
        made = torch.autograd.grad(cross_entropy(logits, labels[rows]), list(leaves.values()))
        gradient = dict(zip(leaves, made, strict=True))
        of_stage = {
            s: [n for n in gradient if stages.get(n) == s or (n == "first.weight" and s != 1)] for s in range(3)
        }
        norms = {s: math.sqrt(sum(float(gradient[n].square().sum()) for n in names)) for s, names in of_stage.items()}
        factors = {s: 1.0 if clip is None else min(1.0, clip / (norm + 1e-6)) for s, norm in norms.items()}
        own = {name: factors[stages[name]] for name in stages} | {"first.weight": min(factors[0], factors[2])}
        history.append({name: w - lr(p) * own[name] * gradient[name] for name, w in history[-1].items()})
        if clip == 0.05:
            assert factors[0] != factors[2]
    assert_same(found.weights, history[-1] | {"last.weight": history[-1]["first.weight"]})


def test_the_homes_of_a_tie_have_one_lag_and_one_round() -> None:
    with pytest.raises(ValueError, match="other versions"):
        replace(PLAIN, versions=(2, 1), ties=(("w", (0, 1)),))
    with pytest.raises(ValueError, match="other rounds"):
        replace(PLAIN, pipedream=True, steps=6, ties=(("w", (0, 1)),))
