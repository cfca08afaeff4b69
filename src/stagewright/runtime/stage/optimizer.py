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
    """Updates flat master weights from a flat gradient."""

    def __init__(self, config: OptimizerConfig, master: Tensor, rates: Rates) -> None:
        self._master = master
        self._config = config
        self._rates = rates
        if config.name == "sgd":
            self._torch: torch.optim.Optimizer = torch.optim.SGD(
                [master], config.lr, config.momentum, 0.0, config.weight_decay, config.nesterov, fused=True
            )
            if config.momentum:  # otherwise fused SGD starts from uninitialised memory
                self._torch.state[master]["momentum_buffer"] = torch.zeros_like(master)
        else:
            self._torch = torch.optim.AdamW(
                [master], config.lr, (config.beta1, config.beta2), config.eps, config.weight_decay, fused=True
            )
            moments = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
            self._torch.state[master].update(moments, step=torch.zeros((), device=master.device))

    @property
    def state(self) -> dict[str, Tensor]:
        """The live state, to be saved or restored in place: flat tensors like the master, and scalars."""
        return dict(self._torch.state[self._master])

    def step(self, update: int, gradient: Tensor, found_inf: Tensor | None = None) -> None:
        """Update the master; if `found_inf` is 1, nothing changes, not even the count of steps."""
        self._master.grad = gradient
        self._torch.found_inf = found_inf  # type: ignore[attr-defined]
        self._torch.param_groups[0]["lr"] = self._rates.of(update)
        self._torch.step()
        self._master.grad = None

    def extrapolate(self, weights: Tensor, version: int, updates: int) -> None:
        """Write the master, which is at `version`, extrapolated by `updates` updates along its momentum.

        The momentum continues at the learning rate of the next update; future gradients and weight decay are unknown.
        Without --predict, this copies the master.
        """
        config, state = self._config, self.state
        if not (config.predict and updates):
            weights.copy_(self._master)
        elif config.name == "adamw":
            steps = state["step"].double().clamp_(min=1)
            mean = state["exp_avg"] / (1 - config.beta1**steps)
            root = (state["exp_avg_sq"] / (1 - config.beta2**steps)).sqrt_().add_(config.eps)
            torch.addcdiv(self._master, mean, root, value=-self._rates.of(version) * updates, out=weights)
        elif not config.momentum:
            weights.copy_(self._master)
        else:
            distance = momentum_distance(config, updates) * self._rates.of(version)
            torch.add(self._master, state["momentum_buffer"], alpha=-distance, out=weights)


def momentum_distance(config: OptimizerConfig, updates: int) -> float:
    """How far `updates` updates without a gradient move the weights, in learning rates times the present momentum."""
    first = config.momentum**2 if config.nesterov else config.momentum
    return float(sum(first * config.momentum**number for number in range(updates)))
