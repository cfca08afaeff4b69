"""Optimizers of flat master weights, and the learning rate as a function of the batch number."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stagewright.config.sections import OptimizerConfig, ScheduleConfig


def learning_rate(base: float, schedule: ScheduleConfig, batch: int, batches: int) -> float:
    """The learning rate of one batch in a run of `batches`."""
    if batch < schedule.warmup:
        return base * (batch + 1) / schedule.warmup
    progress = min(1.0, (batch - schedule.warmup) / max(1, batches - schedule.warmup))
    if schedule.kind == "step":
        falls = sum(batch >= int(step) for step in schedule.steps.split(",") if step.strip())
        return float(base * schedule.gamma**falls)
    if schedule.kind == "poly":
        return float(schedule.final + (base - schedule.final) * (1 - progress) ** schedule.power)
    if schedule.kind == "cosine":
        return schedule.final + (base - schedule.final) * (1 + math.cos(math.pi * progress)) / 2
    return base


@dataclass(frozen=True, slots=True)
class Rates:
    """The learning rate of each update of a stage."""

    base: float
    schedule: ScheduleConfig
    batches: int
    round: int = 1  # microbatches per update
    microbatches: int = 1  # per batch

    def of(self, update: int) -> float:
        return learning_rate(self.base, self.schedule, update * self.round // self.microbatches, self.batches)


class Optimizer:
    """Updates flat master weights from a flat gradient; a subclass for each optimizer makes `inner`, torch's own."""

    def __init__(self, config: OptimizerConfig, master: Tensor, rates: Rates, inner: torch.optim.Optimizer) -> None:
        self.config = config
        self.master = master
        self.rates = rates
        self._inner = inner

    @property
    def state(self) -> dict[str, Tensor]:
        """The live state, to be saved or restored in place: flat tensors like the master, and scalars."""
        return dict(self._inner.state[self.master])

    def step(self, update: int, gradient: Tensor, found_inf: Tensor | None = None) -> None:
        """Update the master; if `found_inf` is 1, nothing changes, not even the count of steps."""
        self.master.grad = gradient
        self._inner.found_inf = found_inf  # type: ignore[attr-defined]
        self._inner.param_groups[0]["lr"] = self.rates.of(update)
        self._inner.step()
        self.master.grad = None

    @property
    def extrapolates(self) -> bool:
        """Whether stale weights are extrapolated: with --predict, if there is a momentum to extrapolate along."""
        return self.config.predict

    def extrapolate(self, weights: Tensor, version: int, updates: int) -> None:
        """Write the master, which is at `version`, extrapolated by `updates` updates along its momentum.

        The momentum continues at the learning rate of the next update; future gradients and weight decay are unknown.
        """
        raise NotImplementedError


class Sgd(Optimizer):
    """SGD with momentum, or Nesterov's."""

    def __init__(self, config: OptimizerConfig, master: Tensor, rates: Rates) -> None:
        inner = torch.optim.SGD(
            [master], config.lr, config.momentum, 0.0, config.weight_decay, config.nesterov, fused=True
        )
        if config.momentum:  # otherwise fused SGD starts from uninitialised memory
            inner.state[master]["momentum_buffer"] = torch.zeros_like(master)
        super().__init__(config, master, rates, inner)

    @property
    def extrapolates(self) -> bool:
        return self.config.predict and self.config.momentum > 0

    def extrapolate(self, weights: Tensor, version: int, updates: int) -> None:
        distance = momentum_distance(self.config, updates) * self.rates.of(version)
        torch.add(self.master, self.state["momentum_buffer"], alpha=-distance, out=weights)


class AdamW(Optimizer):
    """AdamW, whose momentum is the mean of the gradients over the root of the mean of their squares."""

    def __init__(self, config: OptimizerConfig, master: Tensor, rates: Rates) -> None:
        inner = torch.optim.AdamW(
            [master], config.lr, (config.beta1, config.beta2), config.eps, config.weight_decay, fused=True
        )
        moments = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
        inner.state[master].update(moments, step=torch.zeros((), device=master.device))
        super().__init__(config, master, rates, inner)

    def extrapolate(self, weights: Tensor, version: int, updates: int) -> None:
        config, state = self.config, self.state
        steps = state["step"].double().clamp_(min=1)
        mean = state["exp_avg"] / (1 - config.beta1**steps)
        root = (state["exp_avg_sq"] / (1 - config.beta2**steps)).sqrt_().add_(config.eps)
        torch.addcdiv(self.master, mean, root, value=-self.rates.of(version) * updates, out=weights)


OPTIMIZERS = {"sgd": Sgd, "adamw": AdamW}


def make_optimizer(config: OptimizerConfig, master: Tensor, rates: Rates) -> Optimizer:
    """The optimizer that the options name."""
    return OPTIMIZERS[config.name](config, master, rates)


def momentum_distance(config: OptimizerConfig, updates: int) -> float:
    """How far `updates` updates without a gradient move the weights, in learning rates times the present momentum."""
    first = config.momentum**2 if config.nesterov else config.momentum
    return float(sum(first * config.momentum**number for number in range(updates)))
