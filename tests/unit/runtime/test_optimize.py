"""The learning rate is a function of the batch number; optimizers are torch's, over flat buffers."""

from __future__ import annotations

import math

import pytest
import torch

from stagewright.config import OptimizerConfig, ScheduleConfig
from stagewright.runtime.optimize import Optimizer, Rates, learning_rate


def rates(schedule: ScheduleConfig, batches: int = 10) -> list[float]:
    return [learning_rate(1.0, schedule, batch, batches) for batch in range(batches)]


def test_constant_and_warm_up() -> None:
    assert rates(ScheduleConfig()) == [1.0] * 10
    assert rates(ScheduleConfig(warmup=4))[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_steps_fall_at_their_batches() -> None:
    assert rates(ScheduleConfig(kind="step", steps="3,7", gamma=0.5)) == [1.0] * 3 + [0.5] * 4 + [0.25] * 3


def test_polynomial_and_cosine_end_where_they_should() -> None:
    assert rates(ScheduleConfig(kind="poly", power=1.0))[5] == 0.5
    cosine = rates(ScheduleConfig(kind="cosine", final=0.1))
    assert cosine[0] == 1.0 and math.isclose(cosine[5], 0.55)
    assert math.isclose(learning_rate(1.0, ScheduleConfig(kind="cosine", final=0.1), 10, 10), 0.1)


def test_the_curve_begins_after_warm_up() -> None:
    assert rates(ScheduleConfig(kind="poly", power=1.0, warmup=2))[2] == 1.0


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(weight_decay=0.1),
        OptimizerConfig(nesterov=True),
        OptimizerConfig(momentum=0.0),
        OptimizerConfig(name="adamw", weight_decay=0.1, beta1=0.8, beta2=0.95, eps=1e-6),
    ],
    ids=lambda config: f"{config.name} {config.momentum} {config.nesterov}",
)
def test_an_optimizer_moves_as_stock_torch_does(config: OptimizerConfig) -> None:
    torch.manual_seed(0)
    master = torch.randn(50, dtype=torch.float64)
    plain = master.clone().requires_grad_()
    stock: torch.optim.Optimizer = torch.optim.AdamW(
        [plain], betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=config.weight_decay
    )
    if config.name == "sgd":
        stock = torch.optim.SGD(
            [plain], momentum=config.momentum, nesterov=config.nesterov, weight_decay=config.weight_decay
        )
    rates = Rates(0.5, ScheduleConfig(warmup=5), 5)
    optimizer = Optimizer(config, master, rates)
    for step in range(5):
        gradient = torch.randn(50, dtype=torch.float64)
        optimizer.step(step, gradient.clone())
        plain.grad = gradient.clone()
        stock.param_groups[0]["lr"] = 0.1 * (step + 1)
        stock.step()
    torch.testing.assert_close(master, plain.detach(), rtol=1e-12, atol=1e-12)
