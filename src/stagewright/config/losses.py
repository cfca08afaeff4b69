"""Every built-in loss by its name: the function that computes it, the options that it takes, and where classes are.

This table is the only place that lists them. The help of `--loss`, the rules about options of a loss, errors and the
runtime read it; a new entry needs its function in `model/loss`, a row in docs/models.md, and no other line.
"""

from __future__ import annotations

from dataclasses import dataclass

_SMOOTHED, _IGNORED, _WEIGHTED = "--label-smoothing", "--ignore-index", "--class-weights"


@dataclass(frozen=True, slots=True)
class LossFacts:
    """What there is to know of a loss."""

    computed_by: str  # a function of model/loss, of what the model returns, the fields and the options
    options: tuple[str, ...] = ()  # that change it
    classes: int | None = None  # the dimension of what the model returns that has classes
    takes_real: bool = False  # its targets may be floating-point numbers


LOSSES: dict[str, LossFacts] = {
    "cross-entropy": LossFacts("cross_entropy", (_SMOOTHED, _IGNORED, _WEIGHTED), 1),
    "next-token": LossFacts("next_token", (_SMOOTHED, _IGNORED), -1),
    "binary": LossFacts("binary", (_IGNORED,), takes_real=True),
    "mse": LossFacts("mse", takes_real=True),
    "l1": LossFacts("l1", takes_real=True),
    "soft": LossFacts("soft", (_SMOOTHED,), takes_real=True),
    "model": LossFacts("of_model"),  # its own
}
# The losses that each option of a loss changes.
LOSS_OPTIONS = {
    flag: tuple(name for name, facts in LOSSES.items() if flag in facts.options)
    for flag in dict.fromkeys(flag for facts in LOSSES.values() for flag in facts.options)
}
