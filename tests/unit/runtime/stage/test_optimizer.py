"""The learning rate depends on the batch number alone; optimizers are torch's, on flat buffers."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import stagewright
from stagewright.config.learning_rate import learning_rate
from stagewright.config.optimizers import OPTIMIZERS, titles
from stagewright.config.sections import OptimizerConfig, ScheduleConfig, options
from stagewright.runtime.stage.optimizer import ScheduledRates, Weights, class_of, make_optimizer
from tests import reference
from tests.parity import SETTINGS
from tests.unit.test_reference import OPTIMIZERS as COMPARED

DOCS = Path(stagewright.__file__).parents[2] / "docs"


def rates(schedule: ScheduleConfig, batches: int = 10) -> list[float]:
    return [learning_rate(1.0, schedule, batch, batches) for batch in range(batches)]


def test_the_rate_is_constant_after_warm_up() -> None:
    assert rates(ScheduleConfig()) == [1.0] * 10
    assert rates(ScheduleConfig(warmup=4))[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_step_schedule_falls_at_its_batches() -> None:
    assert rates(ScheduleConfig(kind="step", steps="3,7", gamma=0.5)) == [1.0] * 3 + [0.5] * 4 + [0.25] * 3


def test_polynomial_and_cosine_schedules_end_where_they_should() -> None:
    assert rates(ScheduleConfig(kind="poly", power=1.0))[5] == 0.5
    cosine = rates(ScheduleConfig(kind="cosine", final=0.1))
    assert cosine[0] == 1.0 and math.isclose(cosine[5], 0.55)
    assert math.isclose(learning_rate(1.0, ScheduleConfig(kind="cosine", final=0.1), 10, 10), 0.1)


def test_a_polynomial_schedule_ends_at_its_final_rate() -> None:
    schedule = ScheduleConfig(kind="poly", power=2.0, final=0.2)
    assert math.isclose(rates(schedule)[5], 0.2 + 0.8 * 0.25)
    assert math.isclose(learning_rate(1.0, schedule, 10, 10), 0.2)


def test_the_curve_spans_the_batches_after_warm_up() -> None:
    polynomial = rates(ScheduleConfig(kind="poly", power=1.0, warmup=2))
    assert polynomial[2:] == [1 - batch / 8 for batch in range(8)]
    cosine = rates(ScheduleConfig(kind="cosine", warmup=2))
    assert cosine[2] == 1.0 and math.isclose(cosine[6], 0.5)
    assert math.isclose(cosine[9], (1 + math.cos(math.pi * 7 / 8)) / 2)


@pytest.mark.parametrize("anneal", ["cosine", "linear"])
@pytest.mark.parametrize(
    ("batches", "peak"), [(10, 0.3), (20, 0.25), (7, 0.0), (7, 0.05), (9, 1.0), (1, 0.3), (2, 0.9)]
)
def test_one_cycle_has_the_rates_of_torch(batches: int, peak: float, anneal: Literal["cosine", "linear"]) -> None:
    schedule = ScheduleConfig(kind="one-cycle", peak=peak, start_div=20.0, final_div=50.0, anneal=anneal)
    stock = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        stock, 1.0, batches, pct_start=peak, anneal_strategy=anneal[:6].replace("cosine", "cos"), cycle_momentum=False,
        div_factor=20.0, final_div_factor=50.0,
    )  # fmt: skip
    found = rates(schedule, batches)
    for batch in range(batches):
        assert found[batch] == pytest.approx(stock.param_groups[0]["lr"], rel=1e-12), batch
        stock.step()
        if batch < batches - 1:
            scheduler.step()
    assert learning_rate(1.0, schedule, batches + 3, batches) == pytest.approx(found[-1])  # rounds that end later


def test_one_cycle_that_peaks_at_once_begins_at_the_peak() -> None:
    assert rates(ScheduleConfig(kind="one-cycle", peak=0.1))[0] == 1.0  # torch divides by zero


@pytest.mark.parametrize(
    "options",
    [*SETTINGS.values(), {"weight_decay": 0.1}, {"momentum": 0.0}, {"name": "rmsprop", "momentum": 0.0}],
    ids=str,
)
def test_an_optimizer_moves_a_tensor_as_the_reference_does(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config, master = OptimizerConfig(**{"beta2": 0.95, **options, "lr": 0.5}), torch.randn(50, dtype=torch.float64)
    weight, moments = master.clone(), reference.Moments(0, torch.zeros(50), torch.zeros(50))
    settings = {name: getattr(config, name) for name in ("momentum", "nesterov", "weight_decay", "eps")}
    betas = (config.beta1, config.beta2)
    setup = reference.Setup((1,), (1,), 1, 1, 5, optimizer=config.name, betas=betas, lr=lambda batch: 0.0, **settings)
    optimizer = make_optimizer(config, Weights(master), ScheduledRates(0.5, ScheduleConfig(warmup=5), 5))
    for step in range(5):
        gradient = torch.randn(50, dtype=torch.float64)
        optimizer.step(step, gradient.clone())
        weight, moments = reference.OPTIMIZERS[config.name](setup, 0.1 * (step + 1), weight, gradient, moments)
    torch.testing.assert_close(master, weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_overflowed_changes_nothing(name: str) -> None:
    master = torch.randn(50)
    optimizer = make_optimizer(
        OptimizerConfig(name, weight_decay=0.1), Weights(master), ScheduledRates(0.5, ScheduleConfig(), 5)
    )
    optimizer.step(0, torch.randn(50), torch.zeros(()))
    before = {"master": master.clone()} | {name: tensor.clone() for name, tensor in optimizer.state.items()}
    optimizer.step(1, torch.full((50,), torch.inf), torch.ones(()))
    torch.testing.assert_close({"master": master} | optimizer.state, before, rtol=0, atol=0)
    optimizer.step(2, torch.randn(50))
    assert not torch.equal(master, before["master"])


def test_a_gradient_is_released_after_its_step() -> None:
    master = torch.randn(50)
    make_optimizer(OptimizerConfig(), Weights(master), ScheduledRates(0.5, ScheduleConfig(), 5)).step(
        0, torch.randn(50)
    )
    assert master.grad is None


@pytest.mark.parametrize(
    ("config", "extrapolates"),
    [
        (OptimizerConfig(predict=True), True),
        (OptimizerConfig(name="adamw", predict=True, momentum=0.0), True),
        (OptimizerConfig(momentum=0.0, predict=True), False),
        (OptimizerConfig(name="rmsprop", momentum=0.0, predict=True), False),
        (OptimizerConfig(), False),
        (OptimizerConfig(name="adamw"), False),
    ],
)
def test_extrapolates_only_when_asked_and_along_a_momentum(config: OptimizerConfig, extrapolates: bool) -> None:
    weights, rates = Weights(torch.randn(50)), ScheduledRates(0.5, ScheduleConfig(), 5)
    assert make_optimizer(config, weights, rates).extrapolates is extrapolates


def test_every_optimizer_of_the_register_has_a_class_a_reference_and_settings_to_train_with() -> None:
    """What a new entry of `config/optimizers` still lacks: its update in tests/reference.py, a row of SETTINGS."""
    (option,) = [option for option in options("optimizer") if option.flag == "--optimizer"]
    for name, facts in OPTIMIZERS.items():
        assert issubclass(class_of(facts), torch.optim.Optimizer), f"{name}: {facts.kind} is no optimizer of torch"
        assert name in reference.OPTIMIZERS, f"{name}: write its update in tests/reference.py"
        compared = {kind for _, kind, _ in COMPARED.values()}
        assert class_of(facts) in compared or not facts.kind.startswith("torch."), f"{name}: compare it with torch's"
        assert name in SETTINGS, f"{name}: add it to SETTINGS"
        unknown = set(facts.options) - {each.name for each in fields(OptimizerConfig)}
        assert not unknown, f"{name}: OptimizerConfig has no option {unknown}"
        assert name in option.help


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_is_what_its_entry_says(name: str) -> None:
    """Otherwise it is neither planned nor in checkpoints."""
    facts, rates = OPTIMIZERS[name], ScheduledRates(0.5, ScheduleConfig(), 5)
    optimizer = make_optimizer(OptimizerConfig(name), Weights(torch.randn(50)), rates)
    optimizer.step(0, torch.randn(50))
    (state,) = optimizer.inner.state.values()
    assert state.keys() == {*facts.state, *(["step"] if facts.counts_steps else [])}, f"{name}: `state`, `counts_steps`"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_documentation_has_every_optimizer(name: str) -> None:
    assert f"`{name}`" in (DOCS / "training.md").read_text(), f"{name}: docs/training.md"
    _, _, ruled = (DOCS / "design.md").read_text().partition("`--predict` needs a rule: ")
    assert (OPTIMIZERS[name].title in ruled.split(" have one")[0]) == bool(OPTIMIZERS[name].extrapolation), (
        f"{name}: docs/design.md"
    )


@pytest.mark.parametrize("option", ["momentum", "beta1", "beta2"])
def test_the_documentation_has_what_groups_may_set(option: str) -> None:
    assert f"`{option}` ({titles(option)})" in (DOCS / "models.md").read_text()
