"""Which learning rates are stable at a lag and a momentum: linear analysis of one direction of the loss.

Along a direction of curvature c the gradient at x is c*x, so SGD at rate lr moves x by a linear rule whose only unknown
is a = lr*c. With lag d the gradient is that of d updates ago:

    v[t+1] = mu v[t] + a x[t-d]        x[t+1] = x[t] - v[t+1]

Nesterov moves x by the gradient and mu v[t+1] instead; with extrapolation (--predict) the gradient is taken where
v[t-d] would bring x[t-d] in d updates without a gradient. x shrinks while all roots of the rule's polynomial lie
within the unit circle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import ROUND_DOWN, Context
from functools import cache

import numpy as np

_MOST = 4.0  # largest stable lr x curvature of SGD, without lag and with the most momentum
_GRID = 400
_HALVINGS = 40
_CLOSE = 1e-9


@dataclass(frozen=True, slots=True)
class Motion:
    """How SGD moves weights, and by how many updates its gradients are late."""

    momentum: float
    lag: int = 0
    is_extrapolated: bool = False
    is_nesterov: bool = False

    def polynomial(self, product: float) -> list[float]:
        """The rule's polynomial at a learning rate times curvature, highest power first."""
        mu, lag = self.momentum, self.lag
        free = np.polymul([1.0, -(1 + mu), mu], [1.0] + [0.0] * lag)  # z^lag (z-1) (z-mu)
        push = [1 + mu, -mu] if self.is_nesterov else [1.0, 0.0]
        driven = product * np.polyadd(push, self._extrapolation() * np.array([1.0, -1.0]))
        return [float(factor) for factor in np.polyadd(free, driven)]

    def _extrapolation(self) -> float:
        """How far ahead of the stale weights a gradient is taken, in velocities."""
        if not self.is_extrapolated:
            return 0.0
        first = self.momentum**2 if self.is_nesterov else self.momentum
        return sum(first * self.momentum**number for number in range(self.lag))

    def is_stable(self, product: float) -> bool:
        return bool(np.abs(np.roots(self.polynomial(product))).max() <= 1 + _CLOSE)


@cache
def stable_limit(motion: Motion) -> float:
    """The largest stable learning rate times curvature."""
    grid = np.geomspace(1e-4, _MOST * 1.05, _GRID)
    low = 0.0
    for product in grid:
        if not motion.is_stable(float(product)):
            return _border(motion.is_stable, low, float(product))
        low = float(product)
    return low


def _border(is_stable: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_stable(middle) else (low, middle)
    return low


def stability_warning(motion: Motion, rate: float, *, takes_staleness: bool = True) -> str | None:
    """A warning with remedies, if a rate is unstable at this lag along a direction of curvature 1.

    `takes_staleness`: whether --staleness, one of the remedies, is an option of this plan.
    """
    limit = stable_limit(motion)
    if motion.lag == 0 or rate <= limit:
        return None
    without = stable_limit(replace(motion, lag=0))
    remedies = []
    if not motion.is_extrapolated and (extrapolated := stable_limit(replace(motion, is_extrapolated=True))) > limit:
        remedies.append(f"--predict (up to {extrapolated:.2g})")
    if takes_staleness and motion.lag > 1:
        less = stable_limit(replace(motion, lag=1))
        remedies.append(f"--staleness 1 with more --microbatches (up to {less:.2g})")
    remedies.append(_gentler(motion, rate) or f"--lr {_down(limit)}")
    return (
        f"at momentum {motion.momentum:g} and lag {motion.lag} learning rate x curvature is stable up to {limit:.2g} "
        f"(without lag {without:.2g}); --lr {rate:g} passes that where the loss curves by more than "
        f"{limit / rate:.2g}; try {', or '.join(remedies)}"
    )


def _down(limit: float) -> str:
    """The limit rounded down to two digits."""
    return f"{float(Context(prec=2, rounding=ROUND_DOWN).create_decimal_from_float(limit)):g}"


def _gentler(motion: Motion, rate: float) -> str | None:
    """Half the momentum at the same lr/(1-momentum), if that is stable at more curvature."""
    if motion.momentum >= 1:
        return None
    momentum = motion.momentum / 2
    scaled = rate * (1 - momentum) / (1 - motion.momentum)
    gain = stable_limit(replace(motion, momentum=momentum)) / scaled / (stable_limit(motion) / rate)
    return f"--momentum {momentum:g} --lr {scaled:.2g} ({gain:.1f} x the curvature)" if gain > 1.1 else None
