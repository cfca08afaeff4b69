"""Optimizers of flat master weights, and the learning rate as a function of the batch number."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stagewright.config.groups import Group
from stagewright.config.sections import OptimizerConfig, ScheduleConfig
from stagewright.errors import UserError
from stagewright.runtime.stage.own_optimizer import (
    Factory,
    Find,
    build_own,
    compare_factory,
    load_named_state,
    named_state,
    numbers_of,
)
from stagewright.runtime.stage.versions import Parameter

COUNTS = "optimizer/steps"  # a kind of a checkpoint's files
ParamGroup = dict[str, Any]  # of torch's optimizers: parameters, and how they move


def learning_rate(base: float, schedule: ScheduleConfig, batch: int, batches: int, share: float = 1.0) -> float:
    """The learning rate of one batch in a run of `batches`; `share`: of the final rate, where a group has another."""
    if schedule.kind == "one-cycle":
        return _one_cycle(base, schedule, batch, batches)
    if batch < schedule.warmup:
        return base * (batch + 1) / schedule.warmup
    progress = min(1.0, (batch - schedule.warmup) / max(1, batches - schedule.warmup))
    final = schedule.final * share
    if schedule.kind == "step":
        falls = sum(batch >= int(step) for step in schedule.steps.split(",") if step.strip())
        return float(base * schedule.gamma**falls)
    if schedule.kind == "poly":
        return float(final + (base - final) * (1 - progress) ** schedule.power)
    if schedule.kind == "cosine":
        return final + (base - final) * (1 + math.cos(math.pi * progress)) / 2
    return base


def _one_cycle(peak: float, schedule: ScheduleConfig, batch: int, batches: int) -> float:
    """The rate of torch's OneCycleLR, which counts batches from 0 and peaks at a fraction of one; momentum stays."""
    top, last = schedule.peak * batches - 1, batches - 1
    batch, start = min(batch, last), peak / schedule.start_div
    begin, end, low, high = (0.0, top, start, peak) if batch <= top else (top, last, peak, start / schedule.final_div)
    progress = (batch - begin) / (end - begin) if end > begin else 1.0
    if schedule.anneal == "linear":
        return low + (high - low) * progress
    return high + (low - high) / 2 * (1 + math.cos(math.pi * progress))


class Hyperparameters(Protocol):
    """How the parameters of each of torch's groups move in an update."""

    def apply(self, update: int, groups: Sequence[ParamGroup]) -> None:
        """Set `lr`, and whatever else changes, in each group; the same for the same update, whenever it is asked."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The learning rate of each update of a stage: the schedule multiplies the rate of every group alike.

    Without a base rate, which a user's factory has not, all groups end at the schedule's final rate.
    """

    base: float | None
    schedule: ScheduleConfig
    batches: int
    round: int = 1  # microbatches per update
    microbatches: int = 1  # per batch

    def apply(self, update: int, groups: Sequence[ParamGroup]) -> None:
        batch = update * self.round // self.microbatches
        for group in groups:
            initial = group.setdefault("initial_lr", float(group["lr"]))  # the name that torch's schedulers give it
            share = initial / self.base if self.base else 1.0
            group["lr"] = learning_rate(initial, self.schedule, batch, self.batches, share)


@dataclass(frozen=True, slots=True)
class Weights:
    """The flat weights that an optimizer updates: whole, or parameter by parameter.

    By parameter where it may leave some alone, where they are in several groups, for a user's optimizer, and where some
    are tied: a kernel may round the end of a tensor in another way than its middle, so homes have the same bits only if
    the tied parameter is a tensor of its own.
    """

    master: Tensor
    parts: tuple[Parameter, ...] | None = None

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors that torch's optimizer sees of a flat buffer."""
        return [flat] if self.parts is None else [part.real_view(flat) for part in self.parts]


class Optimizer:
    """Updates flat master weights from a flat gradient; a subclass for each optimizer makes `inner`, torch's own.

    The state is flat too, like the master, and torch's optimizer sees views of it, so that checkpoints hold it by name.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        weights: Weights,
        rates: Hyperparameters,
        parameters: Sequence[Tensor],
        inner: torch.optim.Optimizer,
        state: dict[str, Tensor],
    ) -> None:
        self.config = config
        self.master = weights.master
        self.rates = rates
        self.state = state  # live, to be saved or restored in place: flat tensors like the master, and scalars
        self.counts: Tensor | None = None  # steps of each parameter, where they are counted one by one
        self._weights = weights
        self._parameters = parameters  # what torch's optimizer sees of the master, in the order of the weights
        self._inner = inner

    def step(
        self, update: int, gradient: Tensor, found_inf: Tensor | None = None, unreached: Sequence[int] = ()
    ) -> None:
        """Update the master, but for the parameters in `unreached`; if `found_inf` is 1, nothing changes at all."""
        for parameter, view in zip(self._parameters, self._views(gradient), strict=True):
            parameter.grad = view
        assert self._weights.parts is not None or not unreached, "a flat update leaves no parameter alone"
        for index in unreached:
            self._parameters[index].grad = None
        self.rates.apply(update, self._inner.param_groups)
        self._update(found_inf)
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def has_own_rates(self) -> bool:
        """Whether its rates are not those of the options."""
        return False

    def rate(self, update: int) -> float:
        """The rate of an update, of the first group."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self._inner.param_groups]
        self.rates.apply(update, groups)
        return float(groups[0]["lr"])

    def _views(self, flat: Tensor) -> list[Tensor]:
        """A flat buffer as torch's optimizer sees the master."""
        return self._weights.views(flat)

    def _update(self, found_inf: Tensor | None) -> None:
        self._inner.found_inf = found_inf  # type: ignore[attr-defined]  # fused optimizers read it
        self._inner.step()

    @property
    def extrapolates(self) -> bool:
        """Whether stale weights are extrapolated: with --predict, if there is a momentum to extrapolate along."""
        return self.config.predict

    def extrapolate(self, weights: Tensor, version: int, updates: int) -> None:
        """Write the master, which is at `version`, extrapolated by `updates` updates along its momentum.

        The momentum continues at the learning rate of the next update; future gradients and weight decay are unknown.
        """
        self.rates.apply(version, self._inner.param_groups)
        targets = {id(p): view for p, view in zip(self._parameters, self._views(weights), strict=True)}
        rule = _RULES[type(self._inner)]
        for group in self._inner.param_groups:
            for parameter in group["params"]:
                rule(group, self._inner.state[parameter], parameter, targets[id(parameter)], updates)

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """State that is not flat, to be saved: by kind and parameter name."""
        if self.counts is None:
            return {}
        names = [part.names[0] for part in self._weights.parts or ()]
        return {COUNTS: dict(zip(names, self.counts, strict=True))}

    def load_named_state(self, kinds: Collection[str], find: Find) -> None:
        """Restore what `named_state` returned, before the first step; `find` has one kind of the parameters here."""
        if self.counts is not None and COUNTS in kinds:
            found = find(COUNTS)
            for index, part in enumerate(self._weights.parts or ()):
                held = found[part.names[0]]  # older versions saved a count in the place of each of its numbers
                self.counts[index] = float(held.flatten()[0]) if held.numel() else 0.0


class Sgd(Optimizer):
    """SGD with momentum, or Nesterov's."""

    def __init__(
        self, config: OptimizerConfig, weights: Weights, rates: Hyperparameters, groups: Sequence[Group]
    ) -> None:
        parameters = weights.views(weights.master)
        made = [
            {
                "params": members,
                "lr": group.lr,
                "momentum": group.momentum,
                "weight_decay": group.weight_decay,
                "nesterov": config.nesterov,
            }
            for group, members in _grouped(weights, parameters, groups)
        ]
        inner = torch.optim.SGD(made, fused=True)
        state = {}
        if any(group.momentum for group in groups):  # otherwise fused SGD starts from uninitialised memory
            state["momentum_buffer"] = torch.zeros_like(weights.master)
            for parameter, view in zip(parameters, weights.views(state["momentum_buffer"]), strict=True):
                inner.state[parameter]["momentum_buffer"] = view
        super().__init__(config, weights, rates, parameters, inner, state)

    @property
    def extrapolates(self) -> bool:
        return self.config.predict and bool(self.state)


class AdamW(Optimizer):
    """AdamW, whose momentum is the mean of the gradients over the root of the mean of their squares.

    It counts the steps of each tensor it sees: of the whole master, or of each parameter.
    """

    def __init__(
        self, config: OptimizerConfig, weights: Weights, rates: Hyperparameters, groups: Sequence[Group]
    ) -> None:
        parameters, master = weights.views(weights.master), weights.master
        made = [
            {
                "params": members,
                "lr": group.lr,
                "betas": (group.beta1, group.beta2),
                "eps": config.eps,
                "weight_decay": group.weight_decay,
            }
            for group, members in _grouped(weights, parameters, groups)
        ]
        inner = torch.optim.AdamW(made, fused=True)
        is_whole = weights.parts is None
        steps = torch.zeros(len(parameters), device=master.device)
        state = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
        moments = zip(*(weights.views(flat) for flat in state.values()), strict=True)
        for parameter, (mean, square), step in zip(parameters, moments, steps, strict=True):
            inner.state[parameter].update(exp_avg=mean, exp_avg_sq=square, step=step)
        state |= {"step": steps[0]} if is_whole else {}
        super().__init__(config, weights, rates, parameters, inner, state)
        self.counts = None if is_whole else steps


class OwnOptimizer(Optimizer):
    """A user's optimizer, on the parameters as the author's model has them; its state is whatever it keeps of them.

    `first_names`: of a tied parameter, its first name in the whole model, by which every home gives it to the factory.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        weights: Weights,
        rates: Hyperparameters,
        factory: Factory,
        first_names: Mapping[str, str],
    ) -> None:
        assert weights.parts is not None, "a user's optimizer sees parameter by parameter"
        self._names = [part.names[0] for part in weights.parts]
        parameters = [torch.nn.Parameter(part.view(weights.master)) for part in weights.parts]
        given = [first_names.get(name, name) for name in self._names]
        inner = build_own(factory, list(zip(given, parameters, strict=True)))
        if config.predict:
            require_rule(inner)
        self._numbers = numbers_of(inner)  # as the factory made them: what differs later is state
        super().__init__(config, weights, rates, parameters, inner, {})

    @property
    def has_own_rates(self) -> bool:
        return True

    def _views(self, flat: Tensor) -> list[Tensor]:
        assert self._weights.parts is not None
        return [part.view(flat) for part in self._weights.parts]

    def _update(self, found_inf: Tensor | None) -> None:
        if found_inf is None or not found_inf.item():
            self._inner.step()

    def extrapolate(self, weights: Tensor, version: int, updates: int) -> None:
        weights.copy_(self.master)  # for the parameters that the user's optimizer leaves out
        super().extrapolate(weights, version, updates)

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        return named_state(self._inner, self._by_id(), self._numbers)

    def load_named_state(self, kinds: Collection[str], find: Find) -> None:
        load_named_state(self._inner, self._by_id(), kinds, find)

    def _by_id(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in zip(self._names, self._parameters, strict=True)}


OPTIMIZERS = {"sgd": Sgd, "adamw": AdamW}


def make_optimizer(
    config: OptimizerConfig,
    weights: Weights,
    rates: Hyperparameters,
    groups: Sequence[Group] = (),
    factory: Factory | None = None,
    first_names: Mapping[str, str] | None = None,
) -> Optimizer:
    """The optimizer that the options name, or that a user's factory makes; `groups` are those of the whole model."""
    if factory is not None and weights.parts:
        return OwnOptimizer(config, weights, rates, factory, first_names or {})
    kind = Sgd if factory is not None else OPTIMIZERS[config.name]  # a stage without parameters has nothing to move
    return kind(config, weights, rates, groups or (Group.of_all(config),))


def require_factory(
    config: OptimizerConfig, factory: Factory, parameters: Mapping[str, Tensor], pieces: Sequence[Sequence[str]]
) -> None:
    """Raise UserError unless a user's optimizer can train a model in these pieces (`compare_factory`)."""
    inner = compare_factory(factory, parameters, pieces)
    if config.predict:
        require_rule(inner)


def _grouped(
    weights: Weights, parameters: Sequence[Tensor], groups: Sequence[Group]
) -> list[tuple[Group, Sequence[Tensor]]]:
    """What torch's optimizer sees of the master, by group; groups that have nothing here are left out."""
    if len(groups) == 1 or not len(weights.master):  # of a stage whose parameters are all frozen
        return [(groups[0], parameters)]
    assert weights.parts is not None, "several groups need weights by parameter"
    group_of = {name: number for number, group in enumerate(groups) for name in group.names}
    members: list[list[Tensor]] = [[] for _ in groups]
    for part, parameter in zip(weights.parts, parameters, strict=True):
        members[group_of[part.names[0]]].append(parameter)
    return [(group, own) for group, own in zip(groups, members, strict=True) if own]


# --- Extrapolation ----------------------------------------------------------------------------------------------------

Rule = Callable[[ParamGroup, Mapping[str, Any], Tensor, Tensor, int], None]


def require_rule(inner: torch.optim.Optimizer) -> None:
    """An error where nobody knows how the momentum of an optimizer moves its weights."""
    name = type(inner).__name__
    if type(inner) not in _RULES:
        known = " and ".join(f"torch.optim.{kind.__name__}" for kind in _RULES)
        raise UserError(f"--predict extrapolates {known}, not the optimizer {name}; use one of them, or leave it out")
    for group in inner.param_groups:
        for option in ("maximize", "amsgrad"):
            if group.get(option):
                raise UserError(f"--predict can't extrapolate {name} with {option}=True; leave one of them out")


def momentum_distance(momentum: float, updates: int, *, nesterov: bool) -> float:
    """How far `updates` updates without a gradient move the weights, in learning rates times the present momentum."""
    first = momentum**2 if nesterov else momentum
    return float(sum(first * momentum**number for number in range(updates)))


def _extrapolate_sgd(group: ParamGroup, state: Mapping[str, Any], weight: Tensor, target: Tensor, updates: int) -> None:
    if state.get("momentum_buffer") is None:  # a user's, before its first step
        target.copy_(weight)
        return
    distance = momentum_distance(group["momentum"], updates, nesterov=group["nesterov"]) * group["lr"]
    torch.add(weight, state["momentum_buffer"], alpha=-distance, out=target)


def _extrapolate_adamw(
    group: ParamGroup, state: Mapping[str, Any], weight: Tensor, target: Tensor, updates: int
) -> None:
    if not state:
        target.copy_(weight)
        return
    (beta1, beta2), steps = group["betas"], torch.as_tensor(state["step"]).to(weight.device).double().clamp(min=1)
    weight, target, average, square = map(_as_real, (weight, target, state["exp_avg"], state["exp_avg_sq"]))
    mean = average / (1 - beta1**steps)
    root = (square / (1 - beta2**steps)).sqrt_().add_(group["eps"])
    torch.addcdiv(weight, mean, root, value=-group["lr"] * updates, out=target)


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


_RULES: dict[type, Rule] = {torch.optim.SGD: _extrapolate_sgd, torch.optim.AdamW: _extrapolate_adamw}
