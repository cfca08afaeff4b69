"""How a report writes numbers, durations and shares."""

from __future__ import annotations

import re
from collections.abc import Iterable

from stagewright.errors import counted
from stagewright.metrics import GIB, MIB

NONE = "\N{EN DASH}"  # the value of a figure that is not known
_DAY = 86_400
_LONG = 120  # seconds from which on a duration has minutes
_UNITS = ((_DAY, "day", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))  # of a duration, each with the next
_NUMBER = re.compile(
    r"[-+~<>]?[\d][\d.,]*(e[-+]?\d+)?( ?(%|x|s|ms|µs|ns|min|h|days?|[KMGT]iB))?( to [-+]?[\d.,]+)?"
    r"|\d+ min \d+ s|\d+ h \d+ min|\d+ days? \d+ h"
)


def format_number(value: float) -> str:
    """A number with four significant digits, or all of those before the point."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}" if size < 1e15 else f"{value:.4g}"
    return f"{value:.4g}" if size >= 0.001 else f"{value:.3g}"


def format_seconds(value: float) -> str:
    """A duration in a suitable unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= scale:
            return f"{format_number(value / scale)} {unit}"
    return "0 s" if value == 0 else f"{format_number(value * 1e9)} ns"


def format_duration(seconds: float) -> str:
    """A long duration as people say it: 3 h 26 min, 2 days 4 h; a short one in seconds."""
    whole = round(seconds)
    if whole < _LONG:
        return format_seconds(float(f"{seconds:.3g}"))
    size, unit, lower, name = next(entry for entry in _UNITS if whole >= entry[0])
    many = counted(whole // size, unit) if unit == "day" else f"{whole // size} {unit}"
    return f"{many} {rest} {name}" if (rest := whole % size // lower) else many


def format_share(share: float) -> str:
    """A share of the time, as every part of a page writes it."""
    return f"{share:.0%}"


def format_bytes(size: float) -> str:
    """Bytes in KiB, MiB or GiB."""
    if size < MIB:
        return f"{size / 1024:,.0f} KiB"
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"


def ago(seconds: float) -> str:
    """How long ago something was, in one unit."""
    for limit, size, unit in ((60.0, 0, ""), (3600.0, 60, "min"), (_DAY, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds // size)} {unit} ago" if size else "just now"
    return f"{counted(int(seconds // _DAY), 'day')} ago"


def is_numeric(values: Iterable[str]) -> bool:
    """Whether a column holds only numbers, so that it is right-justified."""
    known = [value for value in values if value not in ("", "-", NONE)]
    return bool(known) and all(_NUMBER.fullmatch(value) for value in known)


def upper_first(text: str) -> str:
    """The text as the start of a sentence."""
    return f"{text[:1].upper()}{text[1:]}"
