"""A study for people and programs: its page, its tables in the terminal, and its JSON object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.learning.findings import Finding, Study, in_points
from stagewright.bench.statistics import Interval
from stagewright.errors import counted
from stagewright.metrics import format_metric, is_percentage, metric_label
from stagewright.report.columns import Column, page_table
from stagewright.report.live.terminal import print_table, say
from stagewright.report.page import Block, Curve, Curves, Listing, Page, Point, Summary, Table


def describe_study(study: Study) -> dict[str, Any]:
    """The study as one JSON object, which learning.json holds."""
    findings = [_describe(finding, study.targets.get(finding.group)) for finding in study.findings]
    return asdict(study) | {"findings": findings}


def _describe(finding: Finding, target: float | None) -> dict[str, Any]:
    fields = asdict(finding)
    return {"learnt" if name == "runs" else name: value for name, value in fields.items()} | {
        "accuracy": finding.accuracy and asdict(finding.accuracy),
        "difference": finding.difference and asdict(finding.difference),
        "verdict": finding.summary,
        "epochs_to_target": None if target is None else finding.epochs_to(target),
        "seconds_to_target": None if target is None else finding.seconds_to(target),
    }


def study_page(study: Study) -> Page:
    return Page(f"{study.title} ({study.date})", tuple(_blocks(study)))


def _blocks(study: Study) -> Iterator[Block]:
    yield Summary(tuple(_sentences(study)))
    for group, findings in study.groups().items():
        target, metric = study.targets.get(group), findings[0].metric
        label, axis = metric_label(metric), _axis(metric)
        title = "accuracy" if is_percentage(metric) else label
        yield page_table(f"{group}: {title}", (*_columns(target, metric), _SUMMARY), findings, note=_note(findings))
        curves = tuple(map(_by_epoch, findings))
        yield Curves(f"{group}: {label} against epochs", "epochs", axis, curves)
        yield Curves(f"{group}: the last quarter", "epochs", axis, _last_quarter(curves))
        timed = [finding for finding in findings if finding.speed]
        if timed:
            lasting = tuple(map(_by_time, timed))
            yield Curves(f"{group}: {label} against time", f"seconds, {_source(timed)}", axis, lasting)
    yield _every_run(study)
    if any(not run.origin for finding in study.findings for run in finding.runs):
        yield Table("Environment", ("what", "value"), tuple(study.machine.items()))
    by_machine: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for origin, machine in study.elsewhere.items():
        by_machine.setdefault(tuple(machine.items()), []).append(origin)
    for rows, origins in by_machine.items():
        yield Table("Environment of reused runs", ("what", "value"), rows, f"Runs of {', '.join(origins)}.")
    yield Listing("Command", study.command)


def _sentences(study: Study) -> Iterator[str]:
    yield from headlines(study)
    for finding in study.findings:
        if not finding.is_baseline:
            yield f"{finding.group}, {finding.trial}: {finding.summary}."
    if any(len(finding.runs) < 3 for finding in study.findings):
        yield "Fewer than three seeds: differences may be due to chance."


def headlines(study: Study) -> Iterator[str]:
    """Per group: which mode reaches the target first, and how long the baseline takes."""
    for group, findings in study.groups().items():
        target = study.targets.get(group)
        times = {} if target is None else {f.trial: s for f in findings if (s := f.seconds_to(target)) is not None}
        base = next((finding.trial for finding in findings if finding.is_baseline), None)
        if target is None or not times:
            continue
        first = min(times, key=lambda trial: times[trial])
        after = {f.trial: _duration(f, times[f.trial], "device") for f in findings if f.trial in times}
        compared = f", {base} after {after[base]}" if base in times and base != first else ""
        source = _source([finding for finding in findings if finding.trial in times])
        goal = _goal(findings[0].metric, target)
        yield f"{group} reaches {goal} first with {first}: after {after[first]}{compared} ({source})."


def _duration(finding: Finding, seconds: float, unit: str = "") -> str:
    """Seconds, and on how many devices."""
    assert finding.speed is not None
    devices = counted(finding.speed.devices, unit) if unit else f"{finding.speed.devices}"
    return f"{f'{seconds:,.0f}' if seconds >= 10 else f'{seconds:.2g}'} s on {devices}"


def _axis(metric: str) -> str:
    return f"{metric_label(metric)} in %" if is_percentage(metric) else metric_label(metric)


def _goal(metric: str, target: float | None) -> str:
    """A target for people: 71.5%, or perplexity 20."""
    if target is None:
        return "target"
    shown = format_metric(metric, target)
    return shown if is_percentage(metric) else f"{metric_label(metric)} {shown}"


def _columns(target: float | None, metric: str) -> tuple[Column[Finding], ...]:
    goal = _goal(metric, target)

    def reached(finding: Finding) -> str | None:
        if target is None:
            return None
        epochs = finding.epochs_to(target)
        return "never" if epochs is None else f"{epochs:.1f}".removesuffix(".0")

    def lasting(finding: Finding) -> str | None:
        seconds = None if target is None else finding.seconds_to(target)
        return None if seconds is None else _duration(finding, seconds)

    def interval(finding: Finding) -> str | None:
        if len(finding.finished) < 2 or finding.accuracy is None:
            return None
        within = _within(metric, finding.accuracy)
        return " - ".join(format_metric(metric, end, 2) for end in (within.low, within.high))

    short = goal.rpartition(" ")[2]  # a terminal's table is narrow
    apart = "points" if is_percentage(metric) else "difference"
    return (
        Column("mode", lambda finding: finding.trial, is_text=True, wraps=True),
        Column(metric_label(metric), lambda f: f.accuracy and format_metric(metric, f.accuracy.value, 2)),
        Column("95 % interval", interval),
        Column(apart, lambda f: f.difference and in_points(f.difference.value, metric), title="against baseline"),
        Column(f"epochs to {short}", reached, title=f"epochs to {goal}"),
        Column("time", lasting, title=f"time to {goal}"),
    )


_SUMMARY: Column[Finding] = Column("summary", lambda finding: finding.summary)


def _within(metric: str, around: Interval) -> Interval:
    """An interval without what no share can be."""
    return Interval(around.value, max(0.0, around.low), min(1.0, around.high)) if is_percentage(metric) else around


def _note(findings: Sequence[Finding]) -> str:
    timed = [finding for finding in findings if finding.speed]
    counts = sorted({len(finding.finished) for finding in findings})
    seeds = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    about = f"Means over {seeds} seeds with Student's interval" if counts[-1] > 1 else "One seed, so no interval"
    about += "; differences are paired by seed."
    return f"{about} Times are {_source(timed)}; 'on N' is the number of devices." if timed else about


def _source(findings: Sequence[Finding]) -> str:
    return ", ".join(sorted({finding.speed.source for finding in findings if finding.speed}))


def _by_epoch(finding: Finding) -> Curve:
    factor = 100 if is_percentage(finding.metric) else 1
    means = [(epoch, _within(finding.metric, mean)) for epoch, mean in finding.curve()]
    points = (Point(epoch, *(factor * one for one in (mean.value, mean.low, mean.high))) for epoch, mean in means)
    return Curve(finding.trial, tuple(points))


def _last_quarter(curves: Sequence[Curve]) -> tuple[Curve, ...]:
    """The end of the curves, where the lasting differences show."""
    end = max((point.x for curve in curves for point in curve.points), default=0.0)
    return tuple(Curve(c.label, tuple(point for point in c.points if point.x >= 0.75 * end)) for c in curves)


def _by_time(finding: Finding) -> Curve:
    assert finding.speed is not None
    epoch_seconds = finding.samples / finding.speed.images_per_second
    factor = 100 if is_percentage(finding.metric) else 1
    points = (Point(epoch * epoch_seconds, factor * mean.value) for epoch, mean in finding.curve())
    return Curve(finding.trial, tuple(points))


def _every_run(study: Study) -> Table:
    runs = [run for finding in study.findings for run in finding.runs]
    rows = tuple(
        (
            *(run.group, run.trial, str(run.seed)),
            format_metric(run.metric, run.scores[-1][1], 2) if run.scores else "-",
            run.diverged or "-",
        )
        for run in runs
    )
    origins = Counter(run.origin for run in runs if run.origin)
    reused = (
        f"{count} run{'s are' if count > 1 else ' is'} reused from {origin}." for origin, count in origins.items()
    )
    labels = dict.fromkeys(metric_label(finding.metric) for finding in study.findings)
    shown = f"{' or '.join(labels)} at the end"
    return Table("Every run", ("model", "mode", "seed", shown, "diverged"), rows, " ".join(reused))


def show_study(console: Console, study: Study, folder: Path) -> None:
    """Print the tables in 80 columns, a sentence per trial, and where the reports are."""
    for group, findings in study.groups().items():
        target, metric = study.targets.get(group), findings[0].metric
        say(console, group)
        print_table(console, _columns(target, metric), findings)
        for finding in findings:
            if not finding.is_baseline:
                say(console, f"{finding.trial}: {finding.summary}")
        timed = [finding for finding in findings if finding.speed]
        if timed:
            say(console, f"times are {_source(timed)}; 'on N' is the number of devices")
    for line in headlines(study):
        say(console, line)
    say(console, f"report: {folder / 'report.md'}", f"        {folder / 'report.html'}", soft_wrap=True)
