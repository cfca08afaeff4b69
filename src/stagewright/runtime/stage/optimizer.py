"""Optimizers of flat master weights, and the learning rate as a function of the batch number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stagewright.config.sections import OptimizerConfig, ScheduleConfig
from stagewright.runtime.stage.versions import Parameter


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


@dataclass(frozen=True, slots=True)
class Weights:
    """The flat weights that an optimizer updates: whole, or parameter by parameter.

    By parameter where it may leave some alone, and where parameters are tied: a kernel may round the end of a tensor
    in another way than its middle, so homes have the same bits only if the tied parameter is a tensor of its own.
    """

    master: Tensor
    parts: tuple[Parameter, ...] | None = None

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors that torch's optimizer sees of a flat buffer."""
        return [flat] if self.parts is None else [part.real_view(flat) for part in self.parts]

    def scalars(self, flat: Tensor) -> list[Tensor]:
        """One number per tensor that torch's optimizer sees, kept in the first element of each."""
        return [flat] if self.parts is None else [flat[part.offset] for part in self.parts]


class Optimizer:
    """Updates flat master weights from a flat gradient; a subclass for each optimizer makes `inner`, torch's own.

    The state is flat too, like the master, and torch's optimizer sees views of it, so that checkpoints hold it by name.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        weights: Weights,
        rates: Rates,
        inner: torch.optim.Optimizer,
        state: dict[str, Tensor],
    ) -> None:
        self.config = config
        self.master = weights.master
        self.rates = rates
        self.state = state  # live, to be saved or restored in place: flat tensors like the master, and scalars
        self._weights = weights
        self._inner = inner

    def step(
        self, update: int, gradient: Tensor, found_inf: Tensor | None = None, unreached: Sequence[int] = ()
    ) -> None:
        """Update the master, but for the parameters in `unreached`; if `found_inf` is 1, nothing changes at all."""
        (group,) = self._inner.param_groups
        for parameter, view in zip(group["params"], self._weights.views(gradient), strict=True):
            parameter.grad = view
        assert self._weights.parts is not None or not unreached, "a flat update leaves no parameter alone"
        for index in unreached:
            group["params"][index].grad = None
        self._inner.found_inf = found_inf  # type: ignore[attr-defined]
        group["lr"] = self.rates.of(update)
        self._inner.step()
        for parameter in group["params"]:
            parameter.grad = None

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

    def __init__(self, config: OptimizerConfig, weights: Weights, rates: Rates) -> None:
        parameters = weights.views(weights.master)
        inner = torch.optim.SGD(
            parameters, config.lr, config.momentum, 0.0, config.weight_decay, config.nesterov, fused=True
        )
        state = {}
        if config.momentum:  # otherwise fused SGD starts from uninitialised memory
            state["momentum_buffer"] = torch.zeros_like(weights.master)
            for parameter, view in zip(parameters, weights.views(state["momentum_buffer"]), strict=True):
                inner.state[parameter]["momentum_buffer"] = view
        super().__init__(config, weights, rates, inner, state)

    @property
    def extrapolates(self) -> bool:
        return self.config.predict and self.config.momentum > 0

    def extrapolate(self, weights: Tensor, version: int, updates: int) -> None:
        distance = momentum_distance(self.config, updates) * self.rates.of(version)
        flats = (self.master, self.state["momentum_buffer"], weights)
        for master, momentum, target in zip(*map(self._weights.views, flats), strict=True):
            torch.add(master, momentum, alpha=-distance, out=target)


class AdamW(Optimizer):
    """AdamW, whose momentum is the mean of the gradients over the root of the mean of their squares.

    It counts the steps of each parameter it sees: of the whole master one number, else one in each parameter's place.
    """

    def __init__(self, config: OptimizerConfig, weights: Weights, rates: Rates) -> None:
        parameters, master = weights.views(weights.master), weights.master
        inner = torch.optim.AdamW(
            parameters, config.lr, (config.beta1, config.beta2), config.eps, config.weight_decay, fused=True
        )
        is_whole = weights.parts is None
        steps = torch.zeros((), device=master.device) if is_whole else torch.zeros(len(master), device=master.device)
        state = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
        moments = zip(*(weights.views(flat) for flat in state.values()), strict=True)
        for parameter, (mean, square), step in zip(parameters, moments, weights.scalars(steps), strict=True):
            inner.state[parameter].update(exp_avg=mean, exp_avg_sq=square, step=step)
        super().__init__(config, weights, rates, inner, state | {"step" if is_whole else "steps": steps})

    def extrapolate(self, weights: Tensor, version: int, updates: int) -> None:
        flats = (self.master, weights, self.state["exp_avg"], self.state["exp_avg_sq"])
        steps = self._weights.scalars(self.state["step" if self._weights.parts is None else "steps"])
        distance = self.rates.of(version) * updates
        for master, target, average, square, step in zip(*map(self._weights.views, flats), steps, strict=True):
            self._extrapolate(master, target, average, square, step.double().clamp(min=1), distance)

    def _extrapolate(
        self, master: Tensor, weights: Tensor, average: Tensor, square: Tensor, steps: Tensor, distance: float
    ) -> None:
        mean = average / (1 - self.config.beta1**steps)
        root = (square / (1 - self.config.beta2**steps)).sqrt_().add_(self.config.eps)
        torch.addcdiv(master, mean, root, value=-distance, out=weights)


OPTIMIZERS = {"sgd": Sgd, "adamw": AdamW}


def make_optimizer(config: OptimizerConfig, weights: Weights, rates: Rates) -> Optimizer:
    """The optimizer that the options name."""
    return OPTIMIZERS[config.name](config, weights, rates)


def momentum_distance(config: OptimizerConfig, updates: int) -> float:
    """How far `updates` updates without a gradient move the weights, in learning rates times the present momentum."""
    first = config.momentum**2 if config.nesterov else config.momentum
    return float(sum(first * config.momentum**number for number in range(updates)))
