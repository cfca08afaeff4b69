"""Optimizers of flat master weights: those of the register (`config/optimizers`), or a user's own.

All are torch's, on views of the master. The state of a registered one is flat like the master, and torch's optimizer
has views of it too; a user's keeps what it likes of each parameter, and checkpoints hold that by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from stagewright.config.groups import Group
from stagewright.config.learning_rate import learning_rate
from stagewright.config.optimizers import OPTIMIZERS, Extrapolation, OptimizerFacts
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
_MOMENTUM = "momentum_buffer"
_TRUST = 0.001  # the paper's eta: of its norm, how far a tensor moves at a rate of 1
ParamGroup = dict[str, Any]  # of torch's optimizers: parameters, and how they move


class Hyperparameters(Protocol):
    """How the parameters of each of torch's groups move in an update."""

    def apply(self, update: int, groups: Sequence[ParamGroup]) -> None:
        """Set `lr`, and whatever else changes, in each group; the same for the same update, whenever it is asked."""


@dataclass(frozen=True, slots=True)
class ScheduledRates:
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

    By parameter where it may leave some alone, where they are in several groups, where an optimizer sees each tensor as
    a whole, as a user's may, and where some are tied: a kernel may round the end of a tensor in another way than its
    middle, so homes have the same bits only if the tied parameter is a tensor of its own.
    """

    master: Tensor
    parts: tuple[Parameter, ...] | None = None

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors of real numbers that an optimizer sees of a flat buffer."""
        return [flat] if self.parts is None else [part.real_view(flat) for part in self.parts]


class Optimizer:
    """Updates flat master weights from a flat gradient, by one of torch's optimizers."""

    has_own_rates = False  # its rates are not those of the options
    is_fused = False  # torch skips an update where `found_inf` says so

    def __init__(
        self,
        config: OptimizerConfig,
        weights: Weights,
        rates: Hyperparameters,
        parameters: Sequence[Tensor],
        inner: torch.optim.Optimizer,
    ) -> None:
        """`parameters`: what the inner optimizer sees of the master, in the order of the weights."""
        self.config = config
        self.master = weights.master
        self.rates = rates
        self.state: dict[str, Tensor] = {}  # to be saved or restored in place: flat like the master, and scalars
        self.counts: Tensor | None = None  # steps of each parameter, where they are counted one by one
        self.extrapolates = config.predict  # stale weights, if there is a momentum to extrapolate along
        self._rule = require_rule(inner) if config.predict else None
        self._weights = weights
        self._parameters = parameters
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
        if self.is_fused:
            self._inner.found_inf = found_inf  # type: ignore[attr-defined]
            self._inner.step()
        elif found_inf is None or not found_inf.item():
            self._inner.step()
        for parameter in self._parameters:
            parameter.grad = None

    def rate(self, update: int) -> float:
        """The rate of an update, of the first group."""
        groups = numbers_of(self._inner)
        self.rates.apply(update, groups)
        return float(groups[0]["lr"])

    def _views(self, flat: Tensor) -> list[Tensor]:
        """A flat buffer as the inner optimizer sees the master."""
        return self._weights.views(flat)

    def extrapolate(self, weights: Tensor, version: int, updates: int) -> None:
        """Write the master, which is at `version`, extrapolated by `updates` updates along its momentum.

        The momentum continues at the learning rate of the next update; future gradients and weight decay are unknown.
        """
        self.rates.apply(version, self._inner.param_groups)
        targets = {id(p): view for p, view in zip(self._parameters, self._views(weights), strict=True)}
        assert self._rule is not None
        for group in self._inner.param_groups:
            for parameter in group["params"]:
                self._rule(group, self._inner.state[parameter], parameter, targets[id(parameter)], updates)

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


class FlatOptimizer(Optimizer):
    """One of the register, with all of its state made at once: flat tensors that torch's optimizer has views of.

    Steps are counted for each tensor that it sees: for the whole master, or for each parameter.
    """

    def __init__(
        self,
        facts: OptimizerFacts,
        config: OptimizerConfig,
        weights: Weights,
        rates: Hyperparameters,
        groups: Sequence[Group],
    ) -> None:
        parameters = weights.views(weights.master)
        made = [
            {"params": members, "lr": group.lr, "weight_decay": group.weight_decay, **_arguments(facts, config, group)}
            for group, members in _grouped(weights, parameters, groups)
        ]
        inner = class_of(facts)(made, **({"fused": True} if facts.is_fused else {}))
        super().__init__(config, weights, rates, parameters, inner)
        self.is_fused = facts.is_fused
        has_momentum = any(group.momentum for group in groups)  # otherwise fused SGD starts from uninitialised memory
        keys = [key for key in facts.state if key != _MOMENTUM or has_momentum]
        self.extrapolates = config.predict and len(keys) == len(facts.state)
        self.state = {key: torch.zeros_like(weights.master) for key in keys}
        for key, flat in self.state.items():
            for parameter, view in zip(parameters, weights.views(flat), strict=True):
                inner.state[parameter][key] = view
        if facts.counts_steps:
            steps = torch.zeros(len(parameters), device=weights.master.device)
            for parameter, step in zip(parameters, steps, strict=True):
                inner.state[parameter]["step"] = step
            if weights.parts is None:
                self.state["step"] = steps[0]
            else:
                self.counts = steps


class OwnOptimizer(Optimizer):
    """A user's optimizer, on the parameters as the author's model has them; its state is whatever it keeps of them.

    `first_names`: of a tied parameter, its first name in the whole model, by which every home gives it to the factory.
    """

    has_own_rates = True

    def __init__(
        self,
        config: OptimizerConfig,
        weights: Weights,
        rates: Hyperparameters,
        factory: Factory,
        first_names: Mapping[str, str],
    ) -> None:
        assert weights.parts is not None, "a user's optimizer sees parameter by parameter"
        self._parts = weights.parts
        names = [part.names[0] for part in weights.parts]
        parameters = [torch.nn.Parameter(view) for view in self._views(weights.master)]
        given = [first_names.get(name, name) for name in names]
        inner = build_own(factory, list(zip(given, parameters, strict=True)))
        super().__init__(config, weights, rates, parameters, inner)
        self._made = numbers_of(inner)  # as the factory made them: what differs later is state
        self._names = {id(parameter): name for name, parameter in zip(names, parameters, strict=True)}

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [part.view(flat) for part in self._parts]

    def extrapolate(self, weights: Tensor, version: int, updates: int) -> None:
        weights.copy_(self.master)  # for the parameters that the user's optimizer leaves out
        super().extrapolate(weights, version, updates)

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        return named_state(self._inner, self._names, self._made)

    def load_named_state(self, kinds: Collection[str], find: Find) -> None:
        load_named_state(self._inner, self._names, kinds, find)


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
    facts = OPTIMIZERS.get(config.name, OPTIMIZERS["sgd"])  # a stage without parameters has nothing to move
    return FlatOptimizer(facts, config, weights, rates, groups or (Group.of_all(config),))


def require_factory(
    config: OptimizerConfig, factory: Factory, parameters: Mapping[str, Tensor], pieces: Sequence[Sequence[str]]
) -> None:
    """Raise UserError unless a user's optimizer can train a model in these pieces (`compare_factory`)."""
    inner = compare_factory(factory, parameters, pieces)
    if config.predict:
        require_rule(inner)


def class_of(facts: OptimizerFacts) -> Callable[..., torch.optim.Optimizer]:
    """The class of a registered optimizer."""
    module, _, name = facts.kind.partition(":")
    found: Callable[..., torch.optim.Optimizer] = getattr(import_module(module), name)
    return found


def _arguments(facts: OptimizerFacts, config: OptimizerConfig, group: Group) -> dict[str, Any]:
    """What the class of an optimizer gets for a group: its own settings, else those of the options."""
    known = vars(config) | asdict(group)
    values = {name: tuple(known[option] for option in options) for name, options in facts.arguments.items()}
    return {name: value if len(value) > 1 else value[0] for name, value in values.items()}


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


def require_rule(inner: torch.optim.Optimizer) -> Rule:
    """How the momentum of an optimizer moves its weights; an error where nobody knows."""
    name = type(inner).__name__
    known = {class_of(facts): facts for facts in OPTIMIZERS.values() if facts.extrapolation}
    facts = known.get(type(inner))
    if facts is None or facts.extrapolation is None:
        names = [found.kind.replace(":", ".") for found in known.values() if found.kind.startswith("torch.")]
        raise UserError(
            f"--predict extrapolates {', '.join(names[:-1])} and {names[-1]}, not the optimizer {name}; use one of "
            "them, or leave it out"
        )
    for group in inner.param_groups:
        for option in ("maximize", "amsgrad"):
            if group.get(option):
                raise UserError(f"--predict can't extrapolate {name} with {option}=True; leave one of them out")
    return _RULES[facts.extrapolation]


def momentum_distance(momentum: float, updates: int, *, nesterov: bool) -> float:
    """How far `updates` updates without a gradient move the weights, in learning rates times the present momentum."""
    first = momentum**2 if nesterov else momentum
    return float(sum(first * momentum**number for number in range(updates)))


def _along_momentum(group: ParamGroup, state: Mapping[str, Any], weight: Tensor, target: Tensor, updates: int) -> None:
    if state.get(_MOMENTUM) is None:  # a user's, before its first step
        target.copy_(weight)
        return
    distance = momentum_distance(group["momentum"], updates, nesterov=group.get("nesterov", False)) * group["lr"]
    torch.add(weight, state[_MOMENTUM], alpha=-distance, out=target)


def _along_mean(group: ParamGroup, state: Mapping[str, Any], weight: Tensor, target: Tensor, updates: int) -> None:
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


_RULES: dict[Extrapolation, Rule] = {Extrapolation.MOMENTUM: _along_momentum, Extrapolation.ADAM: _along_mean}


# --- LARS, which torch does not have ----------------------------------------------------------------------------------


class Lars(torch.optim.Optimizer):
    """LARS of You, Gitman and Ginsburg (2017): SGD whose gradient is scaled by the trust ratio of its tensor.

    ratio = 0.001 |w| / (|g| + decay |w|), or 1 where |w| or |g| is 0
    v = momentum v + ratio (g + decay w);  w = w - lr v
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.01, momentum: float = 0.9, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, weight.grad, **{key: group[key] for key in ("lr", "momentum", "weight_decay")})

    def _move(self, weight: Tensor, gradient: Tensor, lr: float, momentum: float, weight_decay: float) -> None:
        length, slope = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(gradient)
        ratio = _TRUST * length / (slope + weight_decay * length)
        moved = gradient.add(weight, alpha=weight_decay).mul_(torch.where((length > 0) & (slope > 0), ratio, 1.0))
        if momentum:
            if _MOMENTUM not in self.state[weight]:
                self.state[weight][_MOMENTUM] = torch.zeros_like(weight)
            moved = self.state[weight][_MOMENTUM].mul_(momentum).add_(moved)
        weight.add_(moved, alpha=-lr)
