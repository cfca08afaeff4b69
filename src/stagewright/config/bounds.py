"""What a number that a user gives may be."""

from __future__ import annotations

import math


def require_within(flag: str, value: float, **bounds: float) -> None:
    """An error unless a number is finite and within `least`, `above`, `below` and `most`, whichever are given."""
    is_within = {
        "least": lambda bound: value >= bound,
        "above": lambda bound: value > bound,
        "below": lambda bound: value < bound,
        "most": lambda bound: value <= bound,
    }
    is_finite = isinstance(value, int) or math.isfinite(value)
    if is_finite and all(is_within[name](bound) for name, bound in bounds.items()):
        return
    words = {"least": "at least", "above": "above", "below": "below", "most": "at most"}
    wanted = " and ".join(f"{words[name]} {_shown(bounds[name])}" for name in words if name in bounds)
    raise ValueError(f"{flag} is {_shown(value)}; give {'' if is_finite else 'a finite number, '}{wanted}")


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.12g}"
