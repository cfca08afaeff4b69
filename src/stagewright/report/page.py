"""A page: the blocks of a report in reading order, as values that `markdown` and `html` both draw."""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.metrics import Timeline


@dataclass(frozen=True, slots=True)
class Summary:
    """What a reader should take away, one sentence per line."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; columns of numbers are right-justified."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    links: tuple[str, ...] = ()  # where the first cell of each row leads, on a page that a server shows


@dataclass(frozen=True, slots=True)
class Bar:
    """One value, with its 95 % interval where it has one."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    is_predicted: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """Values of one unit, drawn one below the other."""

    title: str
    unit: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """One bar made of named parts."""

    label: str
    parts: tuple[tuple[str, float], ...]
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Stacks:
    """Bars made of the same parts: memory by part and rank."""

    title: str
    unit: str
    stacks: tuple[Stack, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a curve, with its interval where it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves over one axis: losses, accuracies, utilisation over time."""

    title: str
    x: str  # labels of the axes, with units
    y: str
    curves: tuple[Curve, ...]
    is_small: bool = False  # two of them, one after the other, share the width


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A timeline, one row per rank."""

    title: str
    timeline: Timeline
    ranks: tuple[str, ...]  # one label per rank
    is_predicted: bool = False
    total: int = 0  # bars of the whole timeline, where only the last are shown


@dataclass(frozen=True, slots=True)
class Listing:
    """Preformatted text: a command, a topology matrix."""

    title: str
    text: str


Block = Summary | Table | Bars | Stacks | Curves | Pipeline | Listing


@dataclass(frozen=True, slots=True)
class Page:
    """A whole report."""

    title: str
    blocks: tuple[Block, ...]
