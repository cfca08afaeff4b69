"""A bench's outcome for people: the page of its report, the tables in the terminal, and the files in its folder.

`summary` writes the sentences that both begin with. `run_to_folder` runs any bench into a folder, which holds
bench.json, report.md, report.html and, of benches that train runs, logs.zip.
"""

from __future__ import annotations

import json
import shlex
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table as TerminalTable

from stagewright.bench.result import FILE, Outcome, PublishedRow, Ratio, Row, anonymous, make_cleaner, write_json
from stagewright.bench.statistics import Answer, Interval, judge, not_slower
from stagewright.bench.suite import devices_of
from stagewright.config.sections import options
from stagewright.errors import Interrupted, UserError, counted
from stagewright.metrics import MIB, format_metric, metric_label
from stagewright.planning.predict import IMAGENET
from stagewright.report.charts import COLOURS
from stagewright.report.live.progress import ProgressLine
from stagewright.report.live.terminal import open_console, plain_table, say
from stagewright.report.page import Bar, Bars, Block, Listing, Page, Summary, Table
from stagewright.report.words import upper_first
from stagewright.run.folder import new_folder
from stagewright.run.report import write_page

Keep = Callable[[Outcome], None]
Measure = Callable[[Path, Keep, ProgressLine], Outcome]
LOGS = "logs.zip"
_MET = {True: "yes", False: "no", None: "not known"}
_NO_LOGS = {"checkpoints", ".lock", "ranks", "report.html"}  # left out of the zip
_TOLERANCE = 0.2  # cores
_CLOSE = 0.03  # predictions nearer to each other than this do not differ
_MOST_RATIOS = 3  # that a summary begins with
_SIZES = {"MiB": ("use", "much memory")}  # how to compare what is neither a speed nor a time
_FEW = 5  # with fewer repeats the interval is known to be too narrow


def outcome_page(outcome: Outcome) -> Page:
    return Page(f"{outcome.title} ({outcome.suite}, {outcome.date})", tuple(_blocks(outcome)))


def _blocks(outcome: Outcome) -> Iterator[Block]:
    yield Summary(tuple(summary(outcome)))
    if outcome.ratios:
        yield _ratios(outcome)
    colours = _colours(outcome)
    for name, rows in outcome.groups().items():
        if any(row.rate for row in rows):
            yield _bars(name, rows, _unit_of(rows, outcome), colours)
        yield _figures(name, rows, _unit_of(rows, outcome), colours)
        if any(row.model for row in rows):
            yield _configurations(name, rows)
    if outcome.figures:
        figures = tuple((name, format_figure(value)) for name, value in outcome.figures.items())
        yield Table("Also measured", ("what", "value"), figures)
    for model, published in groupby(outcome.published, key=lambda row: row.model):
        yield _published(model, list(published))
    if any(row.repeats for row in outcome.rows):
        yield _repeats(outcome)
    if remarks := _remarks(outcome):
        yield Table("Remarks", ("configuration", "remark"), remarks)
    if lines := [f"# {row.group}, {row.label}\n" + "\n".join(row.step_lines) for row in outcome.rows if row.step_lines]:
        yield Listing("Step lines", "\n\n".join(lines))
    yield Table("Environment", ("what", "value"), tuple(outcome.machine.items()))
    if outcome.topology:
        yield Listing("Topology", outcome.topology)
    trained = dict.fromkeys(train_command(row) for row in outcome.rows if row.options)
    yield Listing("Commands", "\n".join([outcome.command, *trained]))


def summary(outcome: Outcome) -> Iterator[str]:
    """A sentence per group and kind of data: what is fastest, and whether the difference is significant."""
    yield from headlines(outcome)
    for row in outcome.rows:
        if row.kind in ("left out", "failed"):
            yield f"{row.group}, {row.label}: {row.kind}: {row.reason}"
    if goals := [ratio.is_met for ratio in outcome.ratios if ratio.goal]:
        wide = (
            f"; {goals.count(None)} not known, from too wide an interval: give more --repeats" if None in goals else ""
        )
        yield f"{goals.count(True)} of {counted(len(goals), 'goal')} met{wide}."
    yield from _circumstances(outcome)
    if not outcome.is_whole:
        yield f"The bench was interrupted after {counted(sum(len(row.repeats) for row in outcome.rows), 'run')}."


def headlines(outcome: Outcome) -> Iterator[str]:
    """What a bench found, in sentences that can be said aloud: one per group and kind of data, or a few ratios."""
    for name, rows in outcome.groups().items():
        kinds = list(dict.fromkeys(row.data for row in rows))
        for data in kinds:
            others = [row for row in rows if row.data == data and row.speedup and not row.is_baseline]
            base = next((row for row in rows if row.data == data and row.is_baseline), None)
            if base is not None and base.rate is not None and others:
                most = max(row.speedup.value for row in others if row.speedup)
                best = next(row for row in others if row.speedup and row.speedup.value >= most * (1 - _CLOSE))
                yield _comparison(best, base, f"{name} on {data} data" if len(kinds) > 1 and data else name)
    for ratio in outcome.ratios[:_MOST_RATIOS]:
        unit = _unit_of_ratio(ratio, outcome)
        verb, way = ("is", "fast") if unit.endswith("/s") else _SIZES.get(unit, ("takes", "long"))
        times = f"{_times(ratio.ratio)} times as {way} as {_said(ratio.theirs)}{_ends(ratio.ratio)}"
        yield f"{upper_first(ratio.group)}: {_said(ratio.ours)} {verb} {times}."


def _circumstances(outcome: Outcome) -> Iterator[str]:
    """What limits these measurements."""
    measured = [row for row in outcome.rows if row.repeats]
    done = max((len(row.repeats) for row in measured), default=0)
    if outcome.is_whole and 0 < done < outcome.repeats:
        yield f"Only {done} of {outcome.repeats} repeats fit the time limit of the suite."
    on_cpu = [row for row in measured if row.device == "cpu"]
    others = median([repeat.others or 0.0 for row in on_cpu for repeat in row.repeats]) if on_cpu else 0.0
    ranks = max((len(devices_of(row.placement)) for row in on_cpu), default=0)
    if others + ranks > outcome.cores + _TOLERANCE and on_cpu:
        busy = f"other processes kept {others:.1f} of {outcome.cores} cores busy"
        yield f"Warning: {busy}; repeat the bench on an idle machine."


def _comparison(row: Row, base: Row, work: str) -> str:
    """`Stale 7+1 trains VGG-16 8.0 times as fast as data parallel (7.8 to 8.2).`"""
    speedup, rate = row.speedup, row.rate
    assert speedup is not None and rate is not None
    ours, theirs = _said(row.name), _said(base.name)
    if row.kind == "predicted":
        where = f"{work} on {row.cluster}"
        if abs(speedup.value - 1) < _CLOSE:
            return f"{upper_first(ours)} and {theirs} are predicted to train {where} equally fast."
        what = f"{format_figure(rate.value)} {row.unit or 'images/s'}"
        times = f"{_times(speedup)} times as fast as {theirs}"
        return f"{upper_first(ours)} is predicted to train {where} {times}, at {what}."
    if speedup.holds(1.0):
        known = "; more --repeats would say which is faster" if judge(speedup) is Answer.UNKNOWN else ""
        between = f"{_times(speedup)}{_ends(speedup)} times as fast"
        return f"No significant difference for {work}: {ours} is {between} as {theirs}{known}."
    few = f", from only {counted(len(row.repeats), 'repeat')}" if len(row.repeats) < _FEW else ""
    if speedup.value < 1:
        slower = f"the best other, {ours}, is only {_times(speedup)} times as fast{_ends(speedup)}"
        return f"{upper_first(theirs)} is the fastest way to train {work}: {slower}{few}."
    return f"{upper_first(ours)} trains {work} {_times(speedup)} times as fast as {theirs}{_ends(speedup)}{few}."


def _said(name: str) -> str:
    """A configuration's name as people say it."""
    return "data parallel" if name == "dp" else name


def _times(ratio: Interval) -> str:
    return f"{ratio.value:.{_digits(ratio)}f}"


def _digits(ratio: Interval) -> int:
    return 1 if ratio.value >= 2 else 2


def _ends(ratio: Interval) -> str:
    """The ends of a ratio's interval in brackets, unless it is a point."""
    digits = _digits(ratio)
    return "" if ratio.low == ratio.high else f" ({ratio.low:.{digits}f} to {ratio.high:.{digits}f})"


def format_figure(value: float) -> str:
    """Three digits, or all of a larger number."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _short(interval: Interval | None, digits: int | None = None) -> str:
    """A value with its interval, unless that is a point."""
    if interval is None:
        return ""
    value = format_figure(interval.value) if digits is None else f"{interval.value:.{digits}f}"
    span = format_span(interval, digits)
    return f"{value} ({span})" if span else value


def _unit_of(rows: Sequence[Row], outcome: Outcome) -> str:
    """The unit of a group's rates."""
    return next((row.unit for row in rows if row.unit), outcome.unit)


def _unit_of_ratio(ratio: Ratio, outcome: Outcome) -> str:
    """The unit of what a ratio compares."""
    return _unit_of([row for row in outcome.rows if row.group == ratio.group], outcome)


def _colours(outcome: Outcome) -> dict[str, int]:
    """The colour of each side, the same in every group; none where there are more sides than colours."""
    sides = dict.fromkeys(row.name for row in outcome.rows)
    return {side: number for number, side in enumerate(sides)} if len(sides) <= COLOURS else {}


def _bars(name: str, rows: Sequence[Row], unit: str, colours: Mapping[str, int]) -> Bars:
    bars = []
    for row in rows:
        colour = colours.get(row.name, 0)
        if row.rate is not None and row.kind == "predicted":
            note = f"predicted on {row.cluster}"
            bars.append(Bar(row.label, row.rate.value, None, None, True, note, colour))
        elif row.rate is not None:
            low, high = (row.rate.low, row.rate.high) if len(row.repeats) > 1 else (None, None)
            bars.append(Bar(row.label, row.rate.value, low, high, colour=colour))
    return Bars(f"{name}: {'throughput' if unit.endswith('/s') else unit}", unit, tuple(bars))


def _table(title: str, lines: Sequence[Mapping[str, str]], note: str = "") -> Table:
    """A table of at least one line, each of which has its cells by the names of their columns; not of empty columns."""
    columns = tuple(name for name in lines[0] if any(line[name] for line in lines))
    return Table(title, columns, tuple(tuple(line[name] for name in columns) for line in lines), note)


def _ratio_cells(heading: str, unit: str, ratio: Ratio) -> dict[str, str]:
    """One line of the table that both the terminal and the page show, by the names of its columns."""
    return {
        heading: f"{ratio.ours} / {ratio.theirs}" + (f", {unit}" if unit != heading else ""),
        "ours": format_figure(ratio.first.value),
        "theirs": format_figure(ratio.second.value),
        "ratio": f"{ratio.ratio.value:.3f}",
        "95 % interval": format_span(ratio.ratio, 3),
        "goal": ratio.goal,
        "met": _MET[ratio.is_met] if ratio.goal else "",
    }


def _ratios(outcome: Outcome) -> Table:
    lines = [
        {"work": ratio.group, **_ratio_cells(outcome.unit, _unit_of_ratio(ratio, outcome), ratio)}
        for ratio in outcome.ratios
    ]
    has_speeds = any(ratio.goal == not_slower().text for ratio in outcome.ratios)
    note = "Not slower: a ratio of at least 0.99, known to 0.02 on both sides." if has_speeds else ""
    return _table("Comparisons", lines, note)


def _figures(name: str, rows: Sequence[Row], unit: str, colours: Mapping[str, int]) -> Table:
    base = next((row.name for row in rows if row.is_baseline), "the first")
    lines = [
        {
            "configuration": row.label,
            "how": row.kind + (f" on {row.cluster}" if row.cluster else ""),
            unit: _short(row.rate),
            f"x {base}": _short(row.speedup, 2),
            "ImageNet epoch, s": "" if row.epoch_seconds is None else f"{row.epoch_seconds:,.1f}",
            "memory by stage, MiB": ", ".join(f"{size / MIB:,.0f}" for size in row.memory),
            "note": row.note,
        }
        for row in rows
    ]
    most = max(len(row.repeats) for row in rows)
    note = ("Predicted, not measured", "One repeat")[most] if most < 2 else "Median and 95 % interval of the repeats"
    note += "; memory of the rank that uses the most in each stage." if any(row.memory for row in rows) else "."
    if any(row.kind == "predicted" for row in rows):
        note += " Predictions are for Stagewright itself; no published run tests them."
    if any(1 < len(row.repeats) < _FEW for row in rows):
        note += f" With fewer than {_FEW} repeats the intervals hold the true median in less than 95 % of cases."
    return replace(_table(name, lines, note), colours=tuple(colours[row.name] for row in rows if row.name in colours))


def _configurations(name: str, rows: Sequence[Row]) -> Table:
    lines = [
        {
            "configuration": row.label,
            "mode": row.mode,
            "devices of each stage": row.placement,
            "cut before": ", ".join(row.cuts),
            "batch": f"{row.batch:,}",
            "microbatches": str(row.microbatches or ""),
            "lag": ", ".join(str(versions - 1) for versions in row.versions),
            "precision": row.precision,
        }
        for row in rows
    ]
    return _table(f"{name}: configuration", lines)


def _published(model: str, rows: Sequence[PublishedRow]) -> Table:
    lines = []
    for row in rows:
        epochs = row.epochs or (() if row.published is None else (IMAGENET / row.published,))
        predicted_times, published_times = _times_dp(row, rows)
        lines.append(
            {
                "system": row.system,
                "run": f"{row.mode} {row.batch}, {row.data}, {row.precision}",
                "cluster": row.cluster,
                "epoch s, predicted": f"{IMAGENET / row.predicted:,.1f}",
                "epoch s, published": ", ".join(f"{seconds:,.1f}" for seconds in epochs),
                "off by": "" if row.published is None else f"{row.predicted / row.published - 1:+.1%}",
                "images/s, predicted": f"{row.predicted:,.0f}",
                "published": "" if row.published is None else f"{row.published:,.0f}",
                "x dp, predicted": predicted_times,
                "x dp, published": published_times,
                "MiB by stage, predicted": ", ".join(f"{size:,.0f}" for size in row.memory),
                "MiB, published": ", ".join(f"{size:,.0f}" for size in row.published_memory),
            }
        )
    note = (
        "Predicted with the efficiency of the software that ran it. The fit has seen these runs; how far it is off on "
        "rows that it has not seen is in docs/planning.md."
    )
    return _table(f"{model}: predicted and published", lines, note)


def _times_dp(row: PublishedRow, rows: Sequence[PublishedRow]) -> tuple[str, str]:
    """The speedup over the same system's data parallel run on the same data, predicted and published."""
    base = next(
        (b for b in rows if (b.system, b.cluster, b.data, b.mode) == (row.system, row.cluster, row.data, "dp")), None
    )
    if base is None or row.mode == "dp":
        return ("", "")
    published = f"{row.published / base.published:.2f}" if row.published and base.published else ""
    return (f"{row.predicted / base.predicted:.2f}", published)


def _repeats(outcome: Outcome) -> Table:
    metrics = dict.fromkeys(name for row in outcome.rows for repeat in row.repeats for name in repeat.metrics)
    unit = _unit_of(outcome.rows, outcome) if all(row.unit for row in outcome.rows if row.repeats) else outcome.unit
    lines = [
        {
            "configuration": f"{row.group}, {row.label}",
            "repeat": str(number),
            unit: (f"{repeat.rate:,.1f}" if repeat.rate >= 1 else f"{repeat.rate:.3g}")
            + (f" {row.unit}" if row.unit not in ("", unit) else "")
            + (" *" if number - 1 in row.outliers else ""),
            "warm-up, batches": f"{repeat.warmup if repeat.times else ''}{'' if repeat.is_steady else ' (no plateau)'}",
            "last loss": "" if repeat.loss is None else f"{repeat.loss:.4f}",
            **{
                metric_label(name): format_metric(name, repeat.metrics[name], 2) if name in repeat.metrics else ""
                for name in metrics
            },
            "other cores busy": "" if repeat.others is None else f"{repeat.others:.1f}",
        }
        for row in outcome.rows
        for number, repeat in enumerate(row.repeats, 1)
    ]
    return _table("Every repeat", lines, "* differs from the other repeats (outlier); it still counts.")


def _remarks(outcome: Outcome) -> tuple[tuple[str, str], ...]:
    """What may have disturbed a measurement."""
    found: list[tuple[str, str]] = []
    for row in outcome.rows:
        where = f"{row.group}, {row.label}"
        for number in row.outliers:
            found.append(
                (where, f"repeat {number + 1} is an outlier: {row.repeats[number].rate:,.1f} {row.unit or 'images/s'}")
            )
        for number, repeat in enumerate(row.repeats, 1):
            if not repeat.is_steady:
                found.append((where, f"repeat {number} was never steady, so its later half counts; give more --steps"))
            if repeat.throttled:
                found.append((where, f"repeat {number}: GPUs were throttled: {', '.join(repeat.throttled)}"))
            if repeat.foreign:
                foreign = counted(repeat.foreign, "other process", "es")
                found.append((where, f"repeat {number}: {foreign} on one GPU"))
        if row.kind == "predicted":
            dynamic = "the simulator uses the static order" if row.options.get("run", {}).get("dynamic") else ""
            reasons = [reason for reason in (row.reason, dynamic) if reason]
            found += [(where, f"predicted: {'; '.join(reasons)}")] if reasons else []
    return tuple(found)


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


def show(console: Console, outcome: Outcome, folder: Path) -> None:
    """Print the outcome in 80 columns, and where its reports are."""
    for name, rows in outcome.groups().items():
        say(console, name)
        unit = _unit_of(rows, outcome)
        ratios = [ratio for ratio in outcome.ratios if ratio.group == name]
        if ratios:
            console.print(_terminal_table([_ratio_cells(unit, unit, ratio) for ratio in ratios]))
        compared = {side for ratio in ratios for side in (ratio.ours, ratio.theirs)}
        if others := [row for row in rows if row.label not in compared]:
            console.print(_terminal_table(_row_cells(others, unit)))
        for row in rows if ratios else ():
            if row.note and row.label in compared:  # else the table above has it
                say(console, f"{row.name}: {row.note}")
    if published := [row for row in outcome.published if row.published]:
        names = Counter(map(_published_name, published))
        console.print(_terminal_table([_published_cells(row, names) for row in published]))
    for name, value in outcome.figures.items():
        what, _, share = name.rpartition(", %")
        say(console, f"{name}: {format_figure(value)}" if share or not what else f"{what}: {format_figure(value)} %")
    for line in summary(outcome):
        say(console, line)
    if any(row.kind == "predicted" for row in outcome.rows):
        say(console, "p: predicted by the simulator, not measured")
    if any(row.outliers for row in outcome.rows):
        say(console, "*: a repeat is an outlier; it still counts")
    machine = ", ".join(value for name, value in outcome.machine.items() if name == "processor" or name[:4] == "GPU ")
    say(console, f"{machine}, torch {outcome.machine.get('torch', 'not known')}, {outcome.date}")
    say(console, f"report: {folder / 'report.md'}", f"        {folder / 'report.html'}", soft_wrap=True)
    say(console, f"repeat with: {outcome.command}", soft_wrap=True)


def _terminal_table(lines: Sequence[Mapping[str, str]]) -> TerminalTable:
    """A table of at least one line, each of which has its cells by the names of their columns; not of empty columns."""
    columns = [column for column in lines[0] if any(line[column] for line in lines)]
    table = plain_table(*columns, left=(columns[0], "data", "note"), no_wrap=columns[1:])
    for line in lines:
        table.add_row(*(line[column] for column in columns))
    return table


def _row_cells(rows: list[Row], unit: str) -> list[dict[str, str]]:
    base = next((row.name for row in rows if row.is_baseline), "first")
    lines = []
    for row in rows:
        marks = ("p" if row.kind == "predicted" else "") + ("*" if row.outliers else "")
        lines.append(
            {
                "configuration": row.name,
                "data": row.data,
                unit: row.kind if row.rate is None else f"{format_figure(row.rate.value)}{marks}",
                "95 % interval": format_span(row.rate),  # predictions are points
                f"x {base}": f"{row.speedup.value:.2f}" if row.speedup else "",
                "95 % interval ": format_span(row.speedup, 2),
                "note": row.note,
            }
        )
    return lines


def format_span(interval: Interval | None, digits: int | None = None) -> str:
    """The ends of an interval, unless it is a point."""
    if interval is None or interval.low == interval.high:
        return ""
    if digits is None:
        return f"{format_figure(interval.low)} - {format_figure(interval.high)}"
    return f"{interval.low:,.{digits}f} - {interval.high:,.{digits}f}"


def _published_name(row: PublishedRow) -> str:
    return f"{row.system}, {row.model}, {row.mode} {row.batch}, {row.data}"


def _published_cells(row: PublishedRow, others: Counter[str]) -> dict[str, str]:
    """A published run, and what is predicted for the software that ran it; where it was, if others have its name."""
    name = _published_name(row)
    name += f", {row.cluster} {row.precision}" if others[name] > 1 else ""
    assert row.published is not None
    return {
        "published run": name,
        "images/s": f"{row.published:,.0f}",
        "predicted": f"{row.predicted:,.0f}",
        "off by": f"{row.predicted / row.published - 1:+.1%}",
    }


@contextmanager
def bench_folder(name: str, runs: str, clean: Callable[[str], str]) -> Iterator[Path]:
    """A new folder for a bench. However the bench ends, the logs of its runs are zipped; an empty folder goes."""
    folder = new_folder(runs, f"bench-{Path(name).stem}")
    try:
        yield folder
    finally:
        zip_logs(folder / "runs", folder, clean)
        if not any(folder.iterdir()):
            folder.rmdir()


def run_to_folder(
    name: str, runs: str, command: str, measure: Callable[[Path, Keep], Outcome], *, anonymise: bool = False
) -> tuple[Outcome, Path]:
    """Run a bench; returns its outcome and its folder.

    `measure` is given a folder for its runs and a function to keep what it has, which writes bench.json and the
    reports: an interrupted bench leaves what it had.
    """
    clean: Callable[[str], str] = make_cleaner() if anonymise else str
    latest: list[Outcome] = []
    with bench_folder(name, runs, clean) as folder:

        def keep(outcome: Outcome) -> None:
            outcome = replace(outcome, command=command)
            latest[:] = [anonymous(outcome, clean) if anonymise else outcome]
            write_json(asdict(latest[0]), folder / FILE)
            write_page(outcome_page(latest[0]), folder / "report.html")

        try:
            keep(measure(folder / "runs", keep))
        except KeyboardInterrupt as error:
            done = sum(len(row.repeats) for row in latest[0].rows) if latest else 0
            kept = f"what was measured is in {folder}" if latest else "nothing was measured"
            raise Interrupted(f"after {counted(done, 'run')}", kept) from error
    return latest[0], folder


def measure_and_show(
    name: str, measure: Measure, command: str, *, runs: str = "runs", anonymise: bool = False, as_json: bool
) -> tuple[Outcome, Path]:
    """Measure into a folder, and print the tables or one JSON object."""
    with ProgressLine(name, patience=0) as progress:
        outcome, folder = run_to_folder(
            name, runs, command, lambda logs, keep: measure(logs, keep, progress), anonymise=anonymise
        )
    if as_json:
        print(json.dumps(asdict(outcome) | {"folder": str(folder)}))
    else:
        show(open_console(), outcome, folder)
    return outcome, folder


def require_none_failed(outcome: Outcome, folder: Path) -> None:
    if failed := [row for row in outcome.rows if row.kind == "failed"]:
        first, count = failed[0], f"{len(failed)} of {len(outcome.rows)} configurations"
        raise UserError(f"{count} failed, first {first.group}, {first.label}: {first.reason}; the rest is in {folder}")


def zip_logs(runs: Path, folder: Path, clean: Callable[[str], str]) -> None:
    """Move what the runs left into logs.zip, every text and name through `clean`; runs go once the zip is complete."""
    if not runs.is_dir():
        return
    draft = folder / f"{LOGS}.draft"
    with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(path for path in runs.rglob("*") if path.is_file()):
            name = path.relative_to(runs)
            if not _NO_LOGS & set(name.parts):
                file.writestr(clean(str(name)), clean(path.read_text(errors="replace")))
    draft.replace(folder / LOGS)
    shutil.rmtree(runs)
