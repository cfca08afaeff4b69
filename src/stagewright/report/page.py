"""A page: the blocks of a report in reading order, as values that `markdown` and `html` both draw.

A colour is a number: equal numbers have the same colour in every figure of a page, which is how a comparison shows one
run everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from stagewright.metrics import Timeline


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure to see first: `310` of `images/s`, and what a reader must know about it."""

    label: str
    value: str
    unit: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The figures that a page begins with."""

    tiles: tuple[Tile, ...]


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
    colours: tuple[int, ...] = ()  # of the rows, where they are runs
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
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Bars:
    """Values of one unit, drawn one below the other."""

    title: str
    unit: str
    bars: tuple[Bar, ...]
    note: str = ""


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
    note: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a curve, with its interval where it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    mean: float | None = None  # of the points that this one stands for, in a curve that was thinned


class Look(StrEnum):
    """How a curve is drawn."""

    LINE = "line"  # what training reports with every step
    POINTS = "points"  # what is known at a few moments: evaluations
    REFERENCE = "reference"  # a level to compare with: a prediction


@dataclass(frozen=True, slots=True)
class Curve:
    label: str
    points: tuple[Point, ...]
    look: Look = Look.LINE
    colour: int | None = None  # None: its place among the curves
    shape: int = 0  # of its points: evaluations of several metrics in one colour


@dataclass(frozen=True, slots=True)
class Mark:
    """A stretch of time in which training paused."""

    kind: str  # one of MARKS
    start: float
    end: float
    curve: int | None = None  # the number of the curve that paused, where a figure has several


MARKS = ("evaluation", "checkpoint")


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves over one axis: losses, accuracies, utilisation over time."""

    title: str
    x: str  # labels of the axes, with units
    y: str
    curves: tuple[Curve, ...]
    is_small: bool = False  # two of them, one after the other, share the width
    marks: tuple[Mark, ...] = ()
    note: str = ""
    from_zero: bool = False  # its y axis: of rates, whose noise would look large on a short axis


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A timeline, one row per rank."""

    title: str
    timeline: Timeline
    ranks: tuple[str, ...]  # one label per rank
    is_predicted: bool = False
    total: int = 0  # bars of the whole timeline, where only the last are shown
    shares: tuple[float, ...] = ()  # of the time that each rank computes, by the one definition of the page
    marks: tuple[Mark, ...] = ()
    note: str = ""
    colour: int | None = None  # of its run, in a comparison
    is_shown_whole: bool = False  # at first, however many bars it has

    def since(self, moment: float) -> Pipeline:
        """The part that begins at a moment, which becomes zero."""
        if moment <= 0:
            return self
        marks = tuple(
            Mark(mark.kind, max(0.0, mark.start - moment), mark.end - moment)
            for mark in self.marks
            if mark.end > moment
        )
        return replace(self, timeline=self.timeline.since(moment), marks=marks)


@dataclass(frozen=True, slots=True)
class Listing:
    """Preformatted text: a command, a topology matrix."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """Why a section is empty."""

    title: str
    text: str


Block = Tiles | Summary | Table | Bars | Stacks | Curves | Pipeline | Listing | Note


@dataclass(frozen=True, slots=True)
class Page:
    """A whole report."""

    title: str
    blocks: tuple[Block, ...]
