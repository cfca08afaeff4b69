"""How much learning rate a lag bears, against weights that are moved step by step."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from stagewright.cli.main import main
from stagewright.config.sections import OptimizerConfig, ScheduleConfig
from stagewright.plan.stability import Motion, stability_warning, stable_limit
from stagewright.runtime.stage.optimizer import ScheduledRates, Weights, make_optimizer
from tests.marks import daily


def weights_of(motion: Motion, product: float) -> Iterator[float]:
    """A weight on a parabola of curvature `product`, moved at rate 1 by torch's rule for SGD, its gradients late.

    With prediction a gradient is taken where the velocity of then would bring the weight in `lag` updates.
    """
    mu = motion.momentum
    seen: deque[float] = deque([1.0] * (motion.lag + 1))  # by each update: the first ones, the weight of the start
    weight, velocity = 1.0, 0.0
    while True:
        gradient = product * seen.popleft()
        velocity = mu * velocity + gradient
        weight -= gradient + mu * velocity if motion.is_nesterov else velocity
        yield weight
        ahead, left = weight, velocity
        for _ in range(motion.lag if motion.is_extrapolated else 0):
            left *= mu
            ahead -= mu * left if motion.is_nesterov else left
        seen.append(ahead)


def settles(motion: Motion, product: float) -> bool:
    """Whether the weight comes to rest."""
    weight = 1.0
    for weight in islice(weights_of(motion, product), 40_000):
        if abs(weight) > 1e3:
            return False
    return abs(weight) < 1e-3


@pytest.mark.parametrize(
    "motion",
    [
        *(Motion(0.9, lag) for lag in (0, 1, 3)),
        *(Motion(0.9, lag, is_extrapolated=True) for lag in (1, 3)),
        Motion(0.5, 2),
        Motion(0.0, 2, is_extrapolated=True),
        Motion(0.8, 1, is_nesterov=True),
        *(Motion(0.9, lag, is_extrapolated=True, is_nesterov=True) for lag in (0, 1, 3, 7)),
        Motion(0.5, 1, is_extrapolated=True, is_nesterov=True),
    ],
    ids=str,
)
def test_weights_converge_just_below_the_limit_and_diverge_just_above(motion: Motion) -> None:
    limit = stable_limit(motion)
    assert settles(motion, 0.97 * limit)
    assert not settles(motion, 1.03 * limit)


@pytest.mark.parametrize("is_nesterov", [False, True])
@pytest.mark.parametrize("is_extrapolated", [False, True])
@pytest.mark.parametrize("lag", [1, 3])
def test_training_follows_the_linear_rule(lag: int, is_extrapolated: bool, is_nesterov: bool) -> None:
    config = OptimizerConfig(lr=1.0, momentum=0.9, nesterov=is_nesterov, predict=is_extrapolated)
    master = torch.ones(1, dtype=torch.float64)
    optimizer = make_optimizer(config, Weights(master), ScheduledRates(1.0, ScheduleConfig(), 20))
    seen = deque([master.clone() for _ in range(lag + 1)])
    moved = []
    for update in range(20):
        optimizer.step(update, 0.1 * seen.popleft())
        moved.append(master.item())
        seen.append(master.clone())
        if is_extrapolated:
            optimizer.extrapolate(seen[-1], update + 1, lag)
    expected = islice(weights_of(Motion(0.9, lag, is_extrapolated, is_nesterov), 0.1), 20)
    assert moved == pytest.approx(list(expected), rel=1e-9)


def test_limits_at_momentum_0_9() -> None:
    assert [round(stable_limit(Motion(0.9, lag)), 3) for lag in (0, 1, 3, 7)] == [3.8, 0.1, 0.035, 0.016]
    both = [Motion(0.9, lag, is_extrapolated=True, is_nesterov=True) for lag in (1, 3, 7)]
    assert [round(stable_limit(motion), 3) for motion in both] == [0.299, 0.072, 0.024]
    assert round(stable_limit(Motion(0.5, 1, is_extrapolated=True, is_nesterov=True)), 3) == 0.539


@pytest.mark.parametrize(
    ("motion", "rate", "expected"),
    [
        (
            Motion(0.9, 3),
            0.4,
            "at momentum 0.9 and lag 3 learning rate x curvature is stable up to 0.035 (without lag 3.8); --lr 0.4 "
            "passes that where the loss curves by more than 0.087; try --predict (up to 0.069), or --staleness 1 "
            "with more --microbatches (up to 0.1), or --momentum 0.45 --lr 2.2 (1.2 x the curvature)",
        ),
        (
            Motion(0.9, 1),
            0.4,
            "at momentum 0.9 and lag 1 learning rate x curvature is stable up to 0.1 (without lag 3.8); --lr 0.4 "
            "passes that where the loss curves by more than 0.25; try --predict (up to 0.25), or --lr 0.1",
        ),
        (
            Motion(0.0, 2),  # no momentum to predict by, nor to halve
            1.2,
            "at momentum 0 and lag 2 learning rate x curvature is stable up to 0.62 (without lag 2); --lr 1.2 passes "
            "that where the loss curves by more than 0.52; try --staleness 1 with more --microbatches (up to 1), or "
            "--lr 0.61",
        ),
    ],
    ids=["lag 3", "lag 1", "no momentum"],
)
def test_warning_has_the_limit_and_the_remedies(motion: Motion, rate: float, expected: str) -> None:
    assert stability_warning(motion, rate) == expected


@pytest.mark.parametrize("is_nesterov", [False, True])
@pytest.mark.parametrize("is_extrapolated", [False, True])
@pytest.mark.parametrize("lag", [1, 2, 3, 7])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.95])
def test_following_the_advice_removes_the_warning(
    momentum: float, lag: int, is_extrapolated: bool, is_nesterov: bool
) -> None:
    motion = Motion(momentum, lag, is_extrapolated, is_nesterov)
    advice = re.search(r"or --lr (\S+)$|try --lr (\S+)$", stability_warning(motion, 50.0) or "")
    if advice is not None:  # half the momentum is offered instead where it bears more
        assert stability_warning(motion, float(advice[1] or advice[2])) is None


def test_warning_offers_only_remedies_that_apply() -> None:
    assert "--predict" not in (stability_warning(Motion(0.9, 3, is_extrapolated=True), 0.4) or "--predict")
    assert "--momentum" not in (stability_warning(Motion(1.0, 1), 0.1) or "--momentum")  # settles at no rate
    refused = stability_warning(Motion(0.9, 3), 0.4, takes_staleness=False)
    assert refused is not None and "--staleness" not in refused and "--predict (up to 0.069), or --momentum" in refused


def test_no_warning_for_a_stable_rate_or_without_lag() -> None:
    assert stability_warning(Motion(0.9, 1), 0.09) is None
    assert stability_warning(Motion(0.9, 0), 3.0) is None
    assert stability_warning(Motion(0.9, 0), 5.0) is None


@pytest.mark.parametrize("given", daily([("--predict", "--nesterov"), ("--nesterov",)], 2))
def test_plan_takes_the_optimizer_options(given: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    plan = ("plan", "vgg-small", "--cluster", "titan-v-8", "--batch", "64", "--mode", "stale", "--staleness", "1")
    main([*plan, "--lr", "0.3", "--momentum", "0.8", "--json", *given])
    motion = Motion(0.8, 1, "--predict" in given, "--nesterov" in given)
    assert json.loads(capsys.readouterr().out)["stable_limit"] == stable_limit(motion)
