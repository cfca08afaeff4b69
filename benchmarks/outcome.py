"""What a benchmark found: an outcome as a suite has it, with ratios of two rows, goals for them, and other figures.

`outcome_page` and `show` put these before what every outcome shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from stagewright.bench import pages, result
from stagewright.bench.pages import format_ends, format_figure, format_span, format_times, said, show_end, unit_of
from stagewright.bench.result import Row
from stagewright.bench.statistics import Answer, Interval, judge, paired_ratio
from stagewright.errors import counted
from stagewright.report.columns import Column, page_table, used
from stagewright.report.live.terminal import print_table, say
from stagewright.report.page import Block, Page, Table
from stagewright.report.words import upper_first
from stagewright.voice import SILENT, Voice

Key = TypeVar("Key")
Found = TypeVar("Found")

_MET = {True: "yes", False: "no", None: "not known"}
_MOST_RATIOS = 3  # that a summary begins with
_SHOWN, _TEXT = 6, 3  # columns of other tables in a terminal, and those of them that are text
_SIZES = {"MiB": ("use", "much memory")}  # how to compare what is neither a speed nor a time


@dataclass(frozen=True, slots=True)
class Goal:
    """What a ratio should be."""

    text: str
    is_met: Callable[[Interval], bool | None]  # None where the interval is too wide to say


def at_most(limit: float) -> Goal:
    return Goal(f"<= {limit:g}", lambda ratio: ratio.value <= limit)


def at_least(limit: float, within: float | None = None) -> Goal:
    """`within`: the half-width from which an interval on both sides of the limit does not tell; a point never does."""

    def is_met(ratio: Interval) -> bool | None:
        is_wide = within is not None and (ratio.half_width > within or ratio.low == ratio.high)
        return None if is_wide and ratio.low <= limit <= ratio.high else ratio.value >= limit

    return Goal(f">= {limit:g}" + (f" known to {within:g}" if within else ""), is_met)


def not_slower() -> Goal:
    """For a ratio of speeds."""
    return Goal("not slower", lambda ratio: {Answer.NOT_SLOWER: True, Answer.SLOWER: False}.get(judge(ratio)))


@dataclass(frozen=True, slots=True)
class Ratio:
    """One row over another, repeat by repeat, and the goal for it."""

    group: str
    ours: str  # their names
    theirs: str
    first: Interval
    second: Interval
    ratio: Interval
    goal: str = ""
    is_met: bool | None = None  # None where there is no goal, or where the interval is too wide to say


def ratio_of(ours: Row, theirs: Row, goal: Goal | None = None) -> Ratio:
    """The ratio of two rows whose repeats were interleaved."""
    assert ours.rate is not None and theirs.rate is not None
    ratio = paired_ratio([repeat.rate for repeat in ours.repeats], [repeat.rate for repeat in theirs.repeats])
    goal_text, is_met = ("", None) if goal is None else (goal.text, goal.is_met(ratio))
    return Ratio(ours.group, ours.label, theirs.label, ours.rate, theirs.rate, ratio, goal_text, is_met)


@dataclass(frozen=True, slots=True)
class Outcome(result.Outcome):
    """A whole benchmark."""

    ratios: tuple[Ratio, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)  # whatever else was measured, by its name and unit
    tables: tuple[Table, ...] = ()  # whatever is neither


def in_turns(
    sides: Mapping[Key, Callable[[], Found]], repeats: int, voice: Voice = SILENT, about: str = ""
) -> dict[Key, list[Found]]:
    """What each side gives in each repeat. Background load meets all; every other repeat goes through them backwards,
    so that no side always follows the same other one.
    """
    found: dict[Key, list[Found]] = {side: [] for side in sides}
    for number in range(repeats):
        for side in sides if number % 2 == 0 else reversed(list(sides)):
            name = ", ".join(side) if isinstance(side, tuple) else side
            voice.progress(f"{about}{': ' if about else ''}turn {number + 1} of {repeats}, {name}")
            found[side].append(sides[side]())
    return found


def compared(*pairs: tuple[Row, Row, Goal | None]) -> dict[str, Any]:
    """The rows and ratios of an outcome that compares pairs."""
    rows = tuple(row for ours, theirs, _ in pairs for row in (ours, theirs))
    return {"rows": rows, "ratios": tuple(ratio_of(*pair) for pair in pairs)}


def new_outcome(suite: str, title: str, repeats: int, steps: int = 0, **found: Any) -> Outcome:
    """An outcome of this machine and this minute."""
    return result.new_outcome(suite, title, repeats, steps, Outcome, **found)


def outcome_page(outcome: Outcome) -> Page:
    return pages.outcome_page(outcome, list(summary(outcome)), list(_blocks(outcome)))


def _blocks(outcome: Outcome) -> Iterator[Block]:
    if outcome.ratios:
        has_speeds = any(ratio.goal == not_slower().text for ratio in outcome.ratios)
        note = "Not slower: a ratio of at least 0.99, known to 0.02 on both sides." if has_speeds else ""
        work: Column[Ratio] = Column("work", lambda ratio: ratio.group, is_text=True)
        columns = (work, *_columns(outcome.unit, outcome.ratios, lambda ratio: _unit_of(ratio, outcome)))
        yield page_table("Comparisons", columns, outcome.ratios, note=note)
    if outcome.figures:
        figures = tuple((name, format_figure(value)) for name, value in outcome.figures.items())
        yield Table("Also measured", ("what", "value"), figures)
    yield from outcome.tables


def _unit_of(ratio: Ratio, outcome: Outcome) -> str:
    """The unit of what a ratio compares."""
    return unit_of([row for row in outcome.rows if row.group == ratio.group], outcome)


def _columns(
    heading: str, ratios: Sequence[Ratio], unit: Callable[[Ratio], str] | None = None
) -> tuple[Column[Ratio], ...]:
    """What a table has of each ratio, and the unit of what it compares where that is not the heading."""

    def sides(ratio: Ratio) -> str:
        own = heading if unit is None else unit(ratio)
        return f"{ratio.ours} / {ratio.theirs}" + (f", {own}" if own != heading else "")

    columns: tuple[Column[Ratio], ...] = (
        Column(heading, sides, is_text=True, wraps=True),
        Column("ours", lambda ratio: ratio.first.value, format_figure),
        Column("theirs", lambda ratio: ratio.second.value, format_figure),
        Column("ratio", lambda ratio: ratio.ratio.value, "{:.3f}"),
        Column("95 % interval", lambda ratio: format_span(ratio.ratio, 3) or None),
        Column("goal", lambda ratio: ratio.goal or None),
        Column("met", lambda ratio: _MET[ratio.is_met] if ratio.goal else None),
    )
    return used(columns, ratios)


def summary(outcome: Outcome) -> Iterator[str]:
    """The first ratios, whether goals are met, and what any outcome says."""
    yield from pages.summary(outcome, *_headlines(outcome))


def _headlines(outcome: Outcome) -> Iterator[str]:
    for ratio in outcome.ratios[:_MOST_RATIOS]:
        unit = _unit_of(ratio, outcome)
        verb, way = ("is", "fast") if unit.endswith("/s") else _SIZES.get(unit, ("takes", "long"))
        times = f"{format_times(ratio.ratio)} times as {way} as {said(ratio.theirs)}{format_ends(ratio.ratio)}"
        yield f"{upper_first(ratio.group)}: {said(ratio.ours)} {verb} {times}."
    if goals := [ratio.is_met for ratio in outcome.ratios if ratio.goal]:
        known = f"; {goals.count(None)} not known, from too wide an interval: give more --repeats"
        yield f"{goals.count(True)} of {counted(len(goals), 'goal')} met{known if None in goals else ''}."


def show(console: Console, outcome: Outcome, folder: Path) -> None:
    """Print the outcome in 80 columns, and where its reports are."""
    for name, rows in outcome.groups().items():
        say(console, name)
        ratios = [ratio for ratio in outcome.ratios if ratio.group == name]
        if ratios:
            print_table(console, _columns(unit_of(rows, outcome), ratios), ratios)
        compared = {side for ratio in ratios for side in (ratio.ours, ratio.theirs)}
        if others := [row for row in rows if row.label not in compared]:
            pages.show_rows(console, others, outcome)
        for row in rows if ratios else ():
            if row.note and row.label in compared:  # else the table above has it
                say(console, f"{row.name}: {row.note}")
    for made in outcome.tables:
        say(console, made.title)
        heads = enumerate(made.columns[:_SHOWN])
        columns = [Column(head, itemgetter(at), is_text=at < _TEXT, wraps=True) for at, head in heads]
        print_table(console, columns, made.rows)
    for name, value in outcome.figures.items():
        what, _, share = name.rpartition(", %")
        say(console, f"{name}: {format_figure(value)}" if share or not what else f"{what}: {format_figure(value)} %")
    say(console, *summary(outcome))
    show_end(console, outcome, folder)
