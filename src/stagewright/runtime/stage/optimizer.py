"""Optimizers of flat master weights: those of the register (`config/optimizers`), or a user's own.

All are torch's, on views of the master. The state of a registered one is flat like the master, and torch's optimizer
has views of it too; a user's keeps what it likes of each parameter, and checkpoints hold that by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
    OwnState,
    build_own,
    compare_factory,
    numbers_of,
)
from stagewright.runtime.stage.versions import Parameter
from stagewright.torch_internals import step_plainly, without_compiler

COUNTS = "optimizer/steps"  # a kind of a checkpoint's files
_MOMENTUM = "momentum_buffer"
_TRUST = 0.001  # the paper's eta: of its norm, how far a tensor moves at a rate of 1
ParamGroup = dict[str, Any]  # of torch's optimizers: parameters, and how they move
Rule = Callable[[ParamGroup, Mapping[str, Any], Tensor, Tensor, int], None]  # of a weight, extrapolated to a target


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

    def views(self, flat: Tensor, *, is_real: bool = True) -> list[Tensor]:
        """The tensors that an optimizer sees of a flat buffer, as real numbers or as the author's model has them."""
        if self.parts is None:
            return [flat]
        return [part.real_view(flat) if is_real else part.view(flat) for part in self.parts]


@dataclass(slots=True)
class Optimizer:
    """Updates flat master weights from a flat gradient, by one of torch's optimizers on views of the master."""

    config: OptimizerConfig
    weights: Weights
    rates: Hyperparameters
    inner: torch.optim.Optimizer
    parameters: Sequence[Tensor]  # what the inner one sees of the master, in the order of the weights
    state: dict[str, Tensor] = field(default_factory=dict)  # to be restored in place: flat tensors, and scalars
    counts: Tensor | None = None  # steps of each parameter, where they are counted one by one
    own: OwnState | None = None  # of a user's optimizer, which may keep anything
    extrapolates: bool = False  # stale weights; --predict, with a momentum to extrapolate along
    _rule: Rule | None = field(init=False)

    def __post_init__(self) -> None:
        self._rule = require_rule(self.inner) if self.config.predict else None

    @property
    def master(self) -> Tensor:
        return self.weights.master

    @property
    def has_own_rates(self) -> bool:
        """Whether its rates are not those of the options."""
        return self.own is not None

    def step(
        self, update: int, gradient: Tensor, found_inf: Tensor | None = None, unreached: Sequence[int] = ()
    ) -> None:
        """Update the master, but for the parameters in `unreached`; if `found_inf` is 1, nothing changes at all."""
        for parameter, view in zip(self.parameters, self._views(gradient), strict=True):
            parameter.grad = view
        assert self.weights.parts is not None or not unreached, "a flat update leaves no parameter alone"
        for index in unreached:
            self.parameters[index].grad = None
        self.rates.apply(update, self.inner.param_groups)
        if self.own is None and self.inner.defaults.get("fused"):
            self.inner.found_inf = found_inf  # type: ignore[attr-defined]  # its kernel skips the update
            step_plainly(self.inner)
        elif found_inf is None or not found_inf.item():
            step_plainly(self.inner) if self.own is None else self.inner.step()
        for parameter in self.parameters:
            parameter.grad = None

    def rate(self, update: int) -> float:
        """The rate of an update, of the first group."""
        groups = numbers_of(self.inner)
        self.rates.apply(update, groups)
        return float(groups[0]["lr"])

    def _views(self, flat: Tensor) -> list[Tensor]:
        return self.weights.views(flat, is_real=self.own is None)

    def extrapolate(self, weights: Tensor, version: int, updates: int) -> None:
        """Write the master, which is at `version`, extrapolated by `updates` updates along its momentum.

        The momentum continues at the learning rate of the next update; future gradients and weight decay are unknown.
        """
        assert self._rule is not None
        if self.own is not None:
            weights.copy_(self.master)  # for the parameters that the user's optimizer leaves out
        self.rates.apply(version, self.inner.param_groups)
        targets = {id(p): view for p, view in zip(self.parameters, self._views(weights), strict=True)}
        for group in self.inner.param_groups:
            for parameter in group["params"]:
                self._rule(group, self.inner.state[parameter], parameter, targets[id(parameter)], updates)

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """State that is not flat, to be saved: by kind and parameter name."""
        if self.own is not None:
            return self.own.save()
        names = [part.names[0] for part in self.weights.parts or ()]
        return {} if self.counts is None else {COUNTS: dict(zip(names, self.counts, strict=True))}

    def load_named_state(self, kinds: Collection[str], find: Find) -> None:
        """Restore what `named_state` returned, before the first step; `find` has one kind of the parameters here."""
        if self.own is not None:
            self.own.load(kinds, find)
        elif self.counts is not None and COUNTS in kinds:
            found = find(COUNTS)
            for index, part in enumerate(self.weights.parts or ()):
                held = found[part.names[0]]  # older versions saved a count in the place of each of its numbers
                self.counts[index] = float(held.flatten()[0]) if held.numel() else 0.0


def make_optimizer(
    config: OptimizerConfig,
    weights: Weights,
    rates: Hyperparameters,
    groups: Sequence[Group] = (),
    factory: Factory | None = None,
    first_names: Mapping[str, str] | None = None,
) -> Optimizer:
    """The optimizer that the options name, or that a user's factory makes of the parameters of the author's model.

    `groups` are those of the whole model. `first_names`: of a tied parameter, its first name in the whole model, by
    which every home gives it to the factory.
    """
    if factory is None or not weights.parts:  # a stage without parameters has nothing to move
        return _registered(config, weights, rates, groups or (Group.of_all(config),))
    names = [part.names[0] for part in weights.parts]
    parameters = [torch.nn.Parameter(view) for view in weights.views(weights.master, is_real=False)]
    inner = build_own(factory, [((first_names or {}).get(n, n), p) for n, p in zip(names, parameters, strict=True)])
    own = OwnState(inner, {id(parameter): name for name, parameter in zip(names, parameters, strict=True)})
    return Optimizer(config, weights, rates, inner, parameters, own=own, extrapolates=config.predict)


def _registered(
    config: OptimizerConfig, weights: Weights, rates: Hyperparameters, groups: Sequence[Group]
) -> Optimizer:
    """An optimizer of the register, with all of its state made at once: flat tensors that the inner one has views of.

    Steps are counted for each tensor that it sees: for the whole master, or for each parameter.
    """
    facts = OPTIMIZERS.get(config.name, OPTIMIZERS["sgd"])
    parameters = weights.views(weights.master)
    made = [
        {"params": members, "lr": group.lr, "weight_decay": group.weight_decay, **_arguments(facts, config, group)}
        for group, members in _grouped(weights, parameters, groups)
    ]
    with without_compiler():
        inner = class_of(facts)(made, **({"fused": True} if facts.is_fused else {}))
    has_momentum = any(group.momentum for group in groups)  # otherwise fused SGD starts from uninitialised memory
    keys = [key for key in facts.state if key != _MOMENTUM or has_momentum]
    state = {key: torch.zeros_like(weights.master) for key in keys}
    for key, flat in state.items():
        for parameter, view in zip(parameters, weights.views(flat), strict=True):
            inner.state[parameter][key] = view
    counts = torch.zeros(len(parameters), device=weights.master.device) if facts.counts_steps else None
    if counts is not None:
        for parameter, step in zip(parameters, counts, strict=True):
            inner.state[parameter]["step"] = step
        if weights.parts is None:
            state["step"], counts = counts[0], None
    extrapolates = config.predict and len(keys) == len(facts.state)
    return Optimizer(config, weights, rates, inner, parameters, state, counts, extrapolates=extrapolates)


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


def stock_optimizer(config: OptimizerConfig, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer that the options name as a plain script has it: on a model's own parameters, as fast as it is."""
    facts = OPTIMIZERS[config.name]
    arguments = _arguments(facts, config, Group.of_all(config)) | ({"fused": True} if facts.is_fused else {})
    return class_of(facts)(parameters, lr=config.lr, weight_decay=config.weight_decay, **arguments)


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
            decay, momentum = group["weight_decay"], group["momentum"]
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            lengths = torch.stack([torch.linalg.vector_norm(weight) for weight in weights])
            slopes = torch.stack([torch.linalg.vector_norm(weight.grad) for weight in weights])
            ratios = torch.where((lengths > 0) & (slopes > 0), _TRUST * lengths / (slopes + decay * lengths), 1.0)
            for weight, ratio in zip(weights, ratios, strict=True):
                moved = weight.grad.add(weight, alpha=decay).mul_(ratio)
                if momentum:
                    if _MOMENTUM not in self.state[weight]:
                        self.state[weight][_MOMENTUM] = torch.zeros_like(weight)
                    moved = self.state[weight][_MOMENTUM].mul_(momentum).add_(moved)
                weight.add_(moved, alpha=-group["lr"])
