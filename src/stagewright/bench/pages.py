"""A bench's outcome for people: the page of its report, and its tables in the terminal, with one list of columns.

`summary` writes the sentences that both begin with.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from rich.console import Console

from stagewright.bench.result import Outcome, Repeat, Row
from stagewright.bench.statistics import Answer, Interval, judge
from stagewright.bench.suite import devices_of
from stagewright.config.sections import options
from stagewright.errors import counted
from stagewright.metrics import MIB, format_metric, metric_label
from stagewright.report.charts import COLOURS
from stagewright.report.columns import Column, page_table, used
from stagewright.report.live.terminal import print_table, say
from stagewright.report.page import Bar, Bars, Block, Listing, Page, Summary, Table
from stagewright.report.words import upper_first

_TOLERANCE = 0.2  # cores
_CLOSE = 0.03  # predictions nearer to each other than this do not differ
_FEW = 5  # with fewer repeats the interval is known to be too narrow


# --- The page ---------------------------------------------------------------------------------------------------------


def outcome_page(outcome: Outcome, lines: Sequence[str] | None = None, first: Sequence[Block] = ()) -> Page:
    """The report of a bench; sentences and blocks of its own come first."""
    begins = Summary(tuple(summary(outcome) if lines is None else lines))
    return Page(f"{outcome.title} ({outcome.suite}, {outcome.date})", (begins, *first, *_blocks(outcome)))


def _blocks(outcome: Outcome) -> Iterator[Block]:
    colours = _colours(outcome)
    for name, rows in outcome.groups().items():
        unit = unit_of(rows, outcome)
        if any(row.rate for row in rows):
            yield _bars(name, rows, unit, colours)
        shown = tuple(colours[row.name] for row in rows if row.name in colours)
        yield page_table(name, _figures(rows, unit), rows, note=_note(rows), colours=shown)
        if any(row.model for row in rows):
            yield page_table(f"{name}: configuration", used(_CONFIGURATION, rows), rows)
    if any(row.repeats for row in outcome.rows):
        yield _repeats(outcome)
    if remarks := tuple(_remarks(outcome)):
        yield Table("Remarks", ("configuration", "remark"), remarks)
    if lines := [f"# {row.group}, {row.label}\n" + "\n".join(row.step_lines) for row in outcome.rows if row.step_lines]:
        yield Listing("Step lines", "\n\n".join(lines))
    yield Table("Environment", ("what", "value"), tuple(outcome.machine.items()))
    if outcome.topology:
        yield Listing("Topology", outcome.topology)
    trained = dict.fromkeys(train_command(row) for row in outcome.rows if row.options)
    yield Listing("Commands", "\n".join([outcome.command, *trained]))


def _figures(rows: Sequence[Row], unit: str) -> tuple[Column[Row], ...]:
    """What was measured or predicted of each configuration of a group."""
    base = next((row.name for row in rows if row.is_baseline), "first")
    columns: tuple[Column[Row], ...] = (
        Column("configuration", lambda row: row.name, is_text=True, wraps=True),
        Column("data", lambda row: row.data or None, is_text=True),
        Column(unit, _rate),
        Column("95 % interval", lambda row: format_span(row.rate) or None),
        Column(f"x {base}", lambda row: row.speedup and f"{row.speedup.value:.2f}"),
        Column("95 % interval", lambda row: format_span(row.speedup, 2) or None),
        Column("ImageNet epoch, s", lambda row: row.epoch_seconds, "{:,.1f}", spare=3),
        Column("memory by stage, MiB", lambda row: _joined(f"{size / MIB:,.0f}" for size in row.memory), spare=2),
        Column("predicted on", lambda row: row.cluster, is_text=True, spare=1),
        Column("note", lambda row: row.note or None, is_text=True, wraps=True),
    )
    return used(columns, rows)


def _rate(row: Row) -> str:
    marks = ("p" if row.kind == "predicted" else "") + ("*" if row.outliers else "")
    return row.kind if row.rate is None else f"{format_figure(row.rate.value)}{marks}"


def _joined(words: Iterator[str]) -> str | None:
    return ", ".join(words) or None


_CONFIGURATION: tuple[Column[Row], ...] = (
    Column("configuration", lambda row: row.label, is_text=True),
    Column("mode", lambda row: row.mode or None, is_text=True),
    Column("devices of each stage", lambda row: row.placement or None, is_text=True),
    Column("cut before", lambda row: ", ".join(row.cuts) or None, is_text=True),
    Column("batch", lambda row: row.batch, "{:,}"),
    Column("microbatches", lambda row: row.microbatches or None),
    Column("lag", lambda row: _joined(str(versions - 1) for versions in row.versions)),
    Column("precision", lambda row: row.precision or None, is_text=True),
)


def _note(rows: Sequence[Row]) -> str:
    most = max(len(row.repeats) for row in rows)
    note = ("Predicted, not measured", "One repeat")[most] if most < 2 else "Median and 95 % interval of the repeats"
    note += "; memory of the rank that uses the most in each stage." if any(row.memory for row in rows) else "."
    if any(row.kind == "predicted" for row in rows):
        note += " Predictions (p) are for Stagewright itself; no published run tests them."
    if any(1 < len(row.repeats) < _FEW for row in rows):
        note += f" With fewer than {_FEW} repeats the intervals hold the true median in less than 95 % of cases."
    return note


def _bars(name: str, rows: Sequence[Row], unit: str, colours: Mapping[str, int]) -> Bars:
    bars = []
    for row, rate in ((row, row.rate) for row in rows if row.rate is not None):
        is_predicted, colour = row.kind == "predicted", colours.get(row.name, 0)
        low, high = (rate.low, rate.high) if len(row.repeats) > 1 else (None, None)
        note = f"predicted on {row.cluster}" if is_predicted else ""
        bars.append(Bar(row.label, rate.value, low, high, is_predicted, note, colour))
    return Bars(f"{name}: {'throughput' if unit.endswith('/s') else unit}", unit, tuple(bars))


def _repeats(outcome: Outcome) -> Table:
    every = [(row, number, repeat) for row in outcome.rows for number, repeat in enumerate(row.repeats)]
    metrics = dict.fromkeys(name for _, _, repeat in every for name in repeat.metrics)
    own = [row for row in outcome.rows if row.repeats]
    unit = unit_of(outcome.rows, outcome) if all(row.unit for row in own) else outcome.unit

    def rate(one: tuple[Row, int, Repeat]) -> str:
        row, number, repeat = one
        figure = f"{repeat.rate:,.1f}" if repeat.rate >= 1 else f"{repeat.rate:.3g}"
        return f"{figure}{f' {row.unit}' if row.unit not in ('', unit) else ''}{' *' * (number in row.outliers)}"

    def warmup(one: tuple[Row, int, Repeat]) -> str | None:
        return f"{one[2].warmup if one[2].times else ''}{'' if one[2].is_steady else ' (no plateau)'}" or None

    columns: list[Column[tuple[Row, int, Repeat]]] = [
        Column("configuration", lambda one: f"{one[0].group}, {one[0].label}"),
        Column("repeat", lambda one: one[1] + 1),
        Column(unit, rate),
        Column("warm-up, batches", warmup),
        Column("last loss", lambda one: one[2].loss, "{:.4f}"),
        *map(_metric, metrics),
        Column("other cores busy", lambda one: one[2].others, "{:.1f}"),
    ]
    note = "* differs from the other repeats (outlier); it still counts."
    return page_table("Every repeat", used(columns, every), every, note=note)


def _metric(name: str) -> Column[tuple[Row, int, Repeat]]:
    return Column(metric_label(name), lambda one: one[2].metrics.get(name), lambda value: format_metric(name, value, 2))


def _remarks(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """What may have disturbed a measurement."""
    for row in outcome.rows:
        where = f"{row.group}, {row.label}"
        for number in row.outliers:
            rate = f"{row.repeats[number].rate:,.1f} {row.unit or 'images/s'}"
            yield where, f"repeat {number + 1} is an outlier: {rate}"
        for number, repeat in enumerate(row.repeats, 1):
            if not repeat.is_steady:
                yield where, f"repeat {number} was never steady, so its later half counts; give more --steps"
            if repeat.throttled:
                yield where, f"repeat {number}: GPUs were throttled: {', '.join(repeat.throttled)}"
            if repeat.foreign:
                yield where, f"repeat {number}: {counted(repeat.foreign, 'other process', 'es')} on one GPU"
        is_dynamic = row.kind == "predicted" and row.options.get("run", {}).get("dynamic")
        reasons = [row.reason, "the simulator uses the static order" if is_dynamic else ""]
        if row.kind == "predicted" and any(reasons):
            yield where, f"predicted: {'; '.join(filter(None, reasons))}"


def train_command(row: Row) -> str:
    """The command that trains a row's configuration once."""
    words = ["stagewright", "train"]
    for option in options():
        section, _, name = option.key.partition(".")
        value = row.options.get(section, {}).get(name)
        is_default = value in (option.default, []) and option.key != "plan.mode"
        if value is None or is_default or option.key == "run.runs":
            continue
        if isinstance(value, bool):
            words.append(option.flag if value else option.flag.replace("--", "--no-", 1))
        else:
            words += [option.flag, str(value)]
    return shlex.join(words)


def unit_of(rows: Sequence[Row], outcome: Outcome) -> str:
    """The unit of a group's rates."""
    return next((row.unit for row in rows if row.unit), outcome.unit)


def _colours(outcome: Outcome) -> dict[str, int]:
    """The colour of each side, the same in every group; none where there are more sides than colours."""
    sides = dict.fromkeys(row.name for row in outcome.rows)
    return {side: number for number, side in enumerate(sides)} if len(sides) <= COLOURS else {}


# --- Sentences --------------------------------------------------------------------------------------------------------


def summary(outcome: Outcome, *more: str) -> Iterator[str]:
    """What a bench found, in sentences that can be said aloud, and what limits it; `more` comes after the findings."""
    yield from _headlines(outcome)
    yield from more
    for row in outcome.rows:
        if row.kind in ("left out", "failed"):
            yield f"{row.group}, {row.label}: {row.kind}: {row.reason}"
    yield from _circumstances(outcome)
    if not outcome.is_whole:
        yield f"The bench was interrupted after {counted(sum(len(row.repeats) for row in outcome.rows), 'run')}."


def _headlines(outcome: Outcome) -> Iterator[str]:
    """A sentence per group and kind of data: what is fastest, and whether the difference is significant."""
    for name, rows in outcome.groups().items():
        kinds = list(dict.fromkeys(row.data for row in rows))
        for data in kinds:
            speedups = [(row, row.speedup) for row in rows if row.data == data and row.speedup and not row.is_baseline]
            base = next((row for row in rows if row.data == data and row.is_baseline), None)
            if base is not None and base.rate is not None and speedups:
                most = max(speedup.value for _, speedup in speedups)
                best, speedup = next(one for one in speedups if one[1].value >= most * (1 - _CLOSE))
                yield _comparison(best, speedup, base, f"{name} on {data} data" if len(kinds) > 1 and data else name)


def _circumstances(outcome: Outcome) -> Iterator[str]:
    """What limits these measurements."""
    measured = [row for row in outcome.rows if row.repeats]
    done = max((len(row.repeats) for row in measured), default=0)
    if outcome.is_whole and 0 < done < outcome.repeats:
        yield f"Only {done} of {outcome.repeats} repeats fit the time limit of the suite."
    on_cpu = [row for row in measured if row.device == "cpu"]
    if on_cpu:
        others = median(repeat.others or 0.0 for row in on_cpu for repeat in row.repeats)
        if others + max(len(devices_of(row.placement)) for row in on_cpu) > outcome.cores + _TOLERANCE:
            busy = f"other processes kept {others:.1f} of {outcome.cores} cores busy"
            yield f"Warning: {busy}; repeat the bench on an idle machine."


def _comparison(row: Row, speedup: Interval, base: Row, work: str) -> str:
    """`Stale 7+1 trains VGG-16 8.0 times as fast as data parallel (7.8 to 8.2).`"""
    ours, theirs = said(row.name), said(base.name)
    if row.kind == "predicted":
        where = f"{work} on {row.cluster}"
        if abs(speedup.value - 1) < _CLOSE:
            return f"{upper_first(ours)} and {theirs} are predicted to train {where} equally fast."
        what = f"{format_figure(row.rate.value if row.rate else 0.0)} {row.unit or 'images/s'}"
        times = f"{format_times(speedup)} times as fast as {theirs}"
        return f"{upper_first(ours)} is predicted to train {where} {times}, at {what}."
    times, ends = format_times(speedup), format_ends(speedup)
    if speedup.holds(1.0):
        known = "; more --repeats would say which is faster" if judge(speedup) is Answer.UNKNOWN else ""
        return f"No significant difference for {work}: {ours} is {times}{ends} times as fast as {theirs}{known}."
    few = f", from only {counted(len(row.repeats), 'repeat')}" if len(row.repeats) < _FEW else ""
    if speedup.value < 1:
        slower = f"the best other, {ours}, is only {times} times as fast{ends}"
        return f"{upper_first(theirs)} is the fastest way to train {work}: {slower}{few}."
    return f"{upper_first(ours)} trains {work} {times} times as fast as {theirs}{ends}{few}."


def said(name: str) -> str:
    """A configuration's name as people say it."""
    return "data parallel" if name == "dp" else name


def format_times(ratio: Interval) -> str:
    return f"{ratio.value:.{1 if ratio.value >= 2 else 2}f}"


def format_ends(ratio: Interval) -> str:
    """The ends of a ratio's interval in brackets, unless it is a point."""
    digits = 1 if ratio.value >= 2 else 2
    return "" if ratio.low == ratio.high else f" ({ratio.low:.{digits}f} to {ratio.high:.{digits}f})"


def format_figure(value: float) -> str:
    """Three digits, or all of a larger number."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_span(interval: Interval | None, digits: int | None = None) -> str:
    """The ends of an interval, unless it is a point."""
    if interval is None or interval.low == interval.high:
        return ""
    if digits is None:
        return f"{format_figure(interval.low)} - {format_figure(interval.high)}"
    return f"{interval.low:,.{digits}f} - {interval.high:,.{digits}f}"


# --- The terminal -----------------------------------------------------------------------------------------------------


def show(console: Console, outcome: Outcome, folder: Path) -> None:
    """Print the outcome in 80 columns, and where its reports are."""
    for name, rows in outcome.groups().items():
        say(console, name)
        show_rows(console, rows, outcome)
    say(console, *summary(outcome))
    show_end(console, outcome, folder)


def show_rows(console: Console, rows: Sequence[Row], outcome: Outcome) -> None:
    print_table(console, _figures(rows, unit_of(rows, outcome)), rows)


def show_end(console: Console, outcome: Outcome, folder: Path) -> None:
    """What marks mean, the machine, and where the reports are."""
    if any(row.kind == "predicted" for row in outcome.rows):
        say(console, "p: predicted by the simulator, not measured")
    if any(row.outliers for row in outcome.rows):
        say(console, "*: a repeat is an outlier; it still counts")
    machine = ", ".join(value for name, value in outcome.machine.items() if name == "processor" or name[:4] == "GPU ")
    say(console, f"{machine}, torch {outcome.machine.get('torch', 'not known')}, {outcome.date}")
    say(console, f"report: {folder / 'report.md'}", f"        {folder / 'report.html'}", soft_wrap=True)
    say(console, f"repeat with: {outcome.command}", soft_wrap=True)
