"""A bench's outcome for people: the page of its report, the tables in the terminal, and the files in its folder.

`summary` writes the sentences that both begin with. The folder holds bench.json, report.md, report.html and logs.zip.
"""

from __future__ import annotations

import shlex
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table as TerminalTable

from stagewright.bench.result import Outcome, PublishedRow, Row, write_outcome
from stagewright.bench.statistics import Interval
from stagewright.bench.suite import devices_of
from stagewright.config.sections import options
from stagewright.errors import counted
from stagewright.metrics import MIB
from stagewright.planning.predict import IMAGENET
from stagewright.report.live.terminal import plain_table, say
from stagewright.report.page import Bar, Bars, Block, Listing, Page, Summary, Table
from stagewright.run.report import write_page

LOGS = "logs.zip"
_NO_LOGS = {"checkpoints", ".lock", "ranks", "report.html"}  # left out of the zip
_TOLERANCE = 0.2  # cores
_CLOSE = 0.03  # predictions nearer to each other than this do not differ
_FEW = 5  # with fewer repeats the interval is known to be too narrow


def outcome_page(outcome: Outcome) -> Page:
    return Page(f"{outcome.title} ({outcome.suite}, {outcome.date})", tuple(_blocks(outcome)))


def _blocks(outcome: Outcome) -> Iterator[Block]:
    yield Summary(tuple(summary(outcome)))
    for name, rows in outcome.groups().items():
        if any(row.rate for row in rows):
            yield _bars(name, rows)
        yield _figures(name, rows)
        yield _configurations(name, rows)
    for model, published in groupby(outcome.published, key=lambda row: row.model):
        yield _published(model, list(published))
    if any(row.repeats for row in outcome.rows):
        yield _repeats(outcome)
    if remarks := _remarks(outcome):
        yield Table("Remarks", ("configuration", "remark"), remarks)
    for row in outcome.rows:
        if row.step_lines:
            yield Listing(f"Step lines: {row.group}, {row.label}", "\n".join(row.step_lines))
    yield Table("Environment", ("what", "value"), tuple(outcome.machine.items()))
    if outcome.topology:
        yield Listing("Topology", outcome.topology)
    yield Listing("Commands", "\n".join([outcome.command, *dict.fromkeys(map(train_command, outcome.rows))]))


def summary(outcome: Outcome) -> Iterator[str]:
    """A sentence per group and kind of data: what is fastest, and whether the difference is significant."""
    for name, rows in outcome.groups().items():
        for data in dict.fromkeys(row.data for row in rows):
            others = [row for row in rows if row.data == data and row.speedup and not row.is_baseline]
            base = next((row for row in rows if row.data == data and row.is_baseline), None)
            if base is not None and base.rate is not None and others:
                most = max(row.speedup.value for row in others if row.speedup)
                best = next(row for row in others if row.speedup and row.speedup.value >= most * (1 - _CLOSE))
                yield f"{name}, {data}: {_comparison(best, base)}"
    for row in outcome.rows:
        if row.kind in ("left out", "failed"):
            yield f"{row.group}, {row.label}: {row.kind}: {row.reason}"
    yield from _circumstances(outcome)
    if not outcome.is_whole:
        yield f"The bench was interrupted after {counted(sum(len(row.repeats) for row in outcome.rows), 'run')}."


def _circumstances(outcome: Outcome) -> Iterator[str]:
    """What limits these measurements."""
    measured = [row for row in outcome.rows if row.repeats]
    done = max((len(row.repeats) for row in measured), default=0)
    if outcome.is_whole and 0 < done < outcome.repeats:
        yield f"Only {done} of {outcome.repeats} repeats fit the time limit of the suite."
    on_cpu = [(repeat.others or 0.0, len(devices_of(row.placement))) for row in measured for repeat in row.repeats]
    others = median([busy for busy, _ in on_cpu]) if on_cpu else 0.0
    ranks = max((ranks for _, ranks in on_cpu), default=0)
    if measured and measured[0].device == "cpu" and others + ranks > outcome.cores + _TOLERANCE:
        busy = f"other processes kept {others:.1f} of {outcome.cores} cores busy"
        yield f"Warning: {busy}; repeat the bench on an idle machine."


def _comparison(row: Row, base: Row) -> str:
    speedup, rate = row.speedup, row.rate
    assert speedup is not None and rate is not None
    if row.kind == "predicted" and abs(speedup.value - 1) < _CLOSE:
        return f"no difference is predicted between {row.name} and {base.name}: {speedup.value:.2f} x"
    if row.kind == "predicted":
        return (
            f"{row.name} is predicted at {speedup.value:.2f} x {base.name}, {rate.value:,.0f} images/s on {row.cluster}"
        )
    if speedup.holds(1.0):
        return f"no significant difference between {row.name} and {base.name}: {_short(speedup)} x"
    few = f", from only {counted(len(row.repeats), 'repeat')}" if len(row.repeats) < _FEW else ""
    return f"{row.name} is {_short(speedup)} x {base.name}, {_short(rate)} images/s{few}"


def _short(interval: Interval | None) -> str:
    """A value with its interval, unless that is a point."""
    if interval is None:
        return ""
    if interval.low == interval.high:
        return f"{interval.value:,.{0 if interval.value >= 100 else 2}f}"
    return str(interval)


def _bars(name: str, rows: Sequence[Row]) -> Bars:
    bars = []
    for row in rows:
        if row.rate is not None and row.kind == "predicted":
            bars.append(Bar(row.label, row.rate.value, None, None, True, f"predicted on {row.cluster}"))
        elif row.rate is not None:
            bars.append(Bar(row.label, row.rate.value, row.rate.low, row.rate.high, False, ""))
    return Bars(f"{name}: throughput", "images/s", tuple(bars))


def _table(title: str, lines: Sequence[Mapping[str, str]], note: str = "") -> Table:
    """A table of at least one line, each of which has its cells by the names of their columns."""
    return Table(title, tuple(lines[0]), tuple(tuple(line.values()) for line in lines), note)


def _figures(name: str, rows: Sequence[Row]) -> Table:
    base = next((row.name for row in rows if row.is_baseline), "the first")
    lines = [
        {
            "configuration": row.label,
            "how": row.kind + (f" on {row.cluster}" if row.cluster else ""),
            "images/s": _short(row.rate),
            f"x {base}": _short(row.speedup),
            "ImageNet epoch, s": "" if row.epoch_seconds is None else f"{row.epoch_seconds:,.1f}",
            "memory by stage, MiB": ", ".join(f"{size / MIB:,.0f}" for size in row.memory),
        }
        for row in rows
    ]
    note = "Median and 95 % interval of the repeats" if any(row.repeats for row in rows) else "Predicted, not measured"
    note += "; memory of the rank that uses the most in each stage."
    if any(row.kind == "predicted" for row in rows):
        note += " Predictions are for Stagewright itself; no published run tests them."
    if any(len(row.repeats) < _FEW for row in rows if row.repeats):
        note += f" With fewer than {_FEW} repeats the intervals hold the true median in less than 95 % of cases."
    return _table(name, lines, note)


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
        alone = " (alone)" if row.is_alone else ""
        lines.append(
            {
                "system": row.system,
                "run": f"{row.mode} {row.batch}, {row.data}, {row.precision}",
                "cluster": row.cluster,
                "epoch s, predicted": f"{IMAGENET / row.predicted:,.1f}",
                "epoch s, published": ", ".join(f"{seconds:,.1f}" for seconds in epochs),
                "off by": "" if row.published is None else f"{row.predicted / row.published - 1:+.1%}",
                "off by, from the others": "" if row.told is None else f"{row.told:+.1%}{alone}",
                "images/s, predicted": f"{row.predicted:,.0f}",
                "published": "" if row.published is None else f"{row.published:,.0f}",
                "x dp, predicted": predicted_times,
                "x dp, published": published_times,
                "MiB by stage, predicted": ", ".join(f"{size:,.0f}" for size in row.memory),
                "MiB, published": ", ".join(f"{size:,.0f}" for size in row.published_memory),
            }
        )
    note = (
        "Predicted with the efficiency of the software that ran it, fitted to all published runs; from the "
        "others: fitted to all but the run itself (alone: no other run has its device, precision and software)."
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
    lines = [
        {
            "configuration": f"{row.group}, {row.label}",
            "repeat": str(number),
            "images/s": f"{repeat.rate:,.1f}" + (" *" if number - 1 in row.outliers else ""),
            "warm-up, batches": f"{repeat.warmup}" if repeat.is_steady else f"{repeat.warmup} (no plateau)",
            "last loss": "" if repeat.loss is None else f"{repeat.loss:.4f}",
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
            found.append((where, f"repeat {number + 1} is an outlier: {row.repeats[number].rate:,.1f} images/s"))
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
        if value is None or (value == option.default and option.key != "plan.mode") or option.key == "run.runs":
            continue
        if isinstance(value, bool):
            words.append(option.flag if value else option.flag.replace("--", "--no-", 1))
        else:
            words += [option.flag, str(value)]
    return shlex.join(words)


def show(console: Console, outcome: Outcome, folder: Path) -> None:
    """Print the outcome in 80 columns, and where its reports are."""
    for name, rows in outcome.groups().items():
        say(console, name, soft_wrap=True)
        console.print(_terminal_table(rows))
    if published := [row for row in outcome.published if row.published]:
        console.print(_published_table(published))
    for line in summary(outcome):
        say(console, line)
    if any(row.kind == "predicted" for row in outcome.rows):
        say(console, "p: predicted by the simulator, not measured")
    if any(row.outliers for row in outcome.rows):
        say(console, "*: a repeat is an outlier; it still counts")
    say(console, f"report: {folder / 'report.md'}\n        {folder / 'report.html'}", soft_wrap=True)


def _terminal_table(rows: list[Row]) -> TerminalTable:
    base = next((row.name for row in rows if row.is_baseline), "first")
    has_intervals = any(row.rate and row.rate.low < row.rate.high for row in rows)  # predictions are points
    interval = ("95 % interval",) if has_intervals else ()
    columns = ("configuration", "data", "images/s", *interval, f"x {base}", *interval)
    table = plain_table(*columns, left=("configuration", "data"), no_wrap=columns[1:])
    for row in rows:
        if row.rate is None:
            table.add_row(row.name, row.data, row.kind)
            continue
        marks = ("p" if row.kind == "predicted" else "") + ("*" if row.outliers else "")
        rate = [f"{row.rate.value:,.0f}{marks}", _span(row.rate, 0)]
        speedup = [f"{row.speedup.value:.2f}", _span(row.speedup, 2)] if row.speedup else ["", ""]
        kept = 2 if has_intervals else 1
        table.add_row(row.name, row.data, *rate[:kept], *speedup[:kept])
    return table


def _span(interval: Interval, digits: int) -> str:
    """The ends of an interval, unless it is a point."""
    is_point = interval.low == interval.high
    return "" if is_point else f"{interval.low:,.{digits}f} - {interval.high:,.{digits}f}"


def _published_table(rows: list[PublishedRow]) -> TerminalTable:
    """Published runs of these models and clusters, and what is predicted for the software that ran them."""
    figures = ("images/s", "predicted", "off by")
    table = plain_table("published run", *figures, left=("published run",), no_wrap=figures)
    for row in rows:
        assert row.published is not None
        table.add_row(
            f"{row.system}, {row.model}, {row.mode} {row.batch}, {row.data}",
            f"{row.published:,.0f}",
            f"{row.predicted:,.0f}p",
            f"{row.predicted / row.published - 1:+.1%}",
        )
    return table


def write_reports(outcome: Outcome, folder: Path) -> None:
    """Write bench.json, report.html and report.md."""
    write_outcome(outcome, folder)
    write_page(outcome_page(outcome), folder / "report.html")


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
