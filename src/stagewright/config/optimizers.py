"""Every optimizer by its name: its class, its options, its state and how it extrapolates.

This table is the only place that lists them. Options and their rules, groups, memory, checkpoints and the runtime all
read it; a new entry needs no other line, unless it has an option that none has yet (a field of `OptimizerConfig`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Extrapolation(StrEnum):
    """How an optimizer's state moves weights while no gradient comes (`runtime/stage/optimizer`)."""

    MOMENTUM = "momentum"  # along `momentum_buffer`, which shrinks with each update
    ADAM = "adam"  # along the mean of the gradients over the root of the mean of their squares


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """What there is to know of an optimizer; all of them have a learning rate and a weight decay."""

    title: str  # for people
    kind: str  # its class, one of `torch.optim.Optimizer`, as module:name
    arguments: Mapping[str, tuple[str, ...]]  # of the class beside lr and weight_decay, and the options that they are
    state: tuple[str, ...]  # keys of its tensors like the weights; a `momentum_buffer` only where there is momentum
    extrapolation: Extrapolation | None = Extrapolation.MOMENTUM  # None: --predict is refused
    counts_steps: bool = False  # its state has a `step` as well
    is_fused: bool = False  # torch updates all weights by one kernel, which skips an update by itself in fp16
    sees_tensors: bool = False  # an update depends on a parameter as a whole, not on each of its numbers alone
    has_stable_rate: bool = False  # its largest stable learning rate is known (`plan/stability`)

    @property
    def options(self) -> tuple[str, ...]:
        """The options that it takes, beside those that all have."""
        return tuple(option for options in self.arguments.values() for option in options)


OPTIMIZERS: dict[str, OptimizerFacts] = {
    "sgd": OptimizerFacts(
        "SGD",
        "torch.optim:SGD",
        {"momentum": ("momentum",), "nesterov": ("nesterov",)},
        ("momentum_buffer",),
        is_fused=True,
        has_stable_rate=True,
    ),
    "adamw": OptimizerFacts(
        "AdamW",
        "torch.optim:AdamW",
        {"betas": ("beta1", "beta2"), "eps": ("eps",)},
        ("exp_avg", "exp_avg_sq"),
        Extrapolation.ADAM,
        counts_steps=True,
        is_fused=True,
    ),
    "rmsprop": OptimizerFacts(
        "RMSprop",
        "torch.optim:RMSprop",
        {"alpha": ("beta2",), "momentum": ("momentum",), "eps": ("eps",)},
        ("square_avg", "momentum_buffer"),
        counts_steps=True,
    ),
    "lars": OptimizerFacts(
        "LARS",
        "stagewright.runtime.stage.optimizer:Lars",
        {"momentum": ("momentum",)},
        ("momentum_buffer",),
        sees_tensors=True,
    ),
}


def takers(option: str) -> tuple[str, ...]:
    """The optimizers that take an option; none of one that all take."""
    return tuple(name for name, facts in OPTIMIZERS.items() if option in facts.options)


def titles(option: str) -> str:
    """The optimizers that take an option, for people."""
    return ", ".join(OPTIMIZERS[name].title for name in takers(option))


def moments_of(name: str) -> float:
    """Copies of the weights that an optimizer's state has; one where a user's is not known."""
    return float(len(OPTIMIZERS[name].state)) if name in OPTIMIZERS else 1.0


def sees_tensors(name: str) -> bool:
    """Whether an optimizer has to see each parameter as a tensor of its own; a user's may."""
    return name not in OPTIMIZERS or OPTIMIZERS[name].sees_tensors


def has_stable_rate(name: str) -> bool:
    """Whether the largest stable learning rate of an optimizer is known."""
    return name in OPTIMIZERS and OPTIMIZERS[name].has_stable_rate
