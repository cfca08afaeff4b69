"""A study of learning as a page, as a table for the terminal, and as one object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from stagewright.bench.learning.findings import Finding, in_points
from stagewright.report.page import Block, Curve, Curves, Listing, Page, Point, Summary, Table


@dataclass(frozen=True, slots=True)
class Study:
    """What a study found."""

    title: str
    date: str
    command: str
    machine: Mapping[str, str]
    findings: tuple[Finding, ...]
    targets: Mapping[str, float]  # top-1 by group
    elsewhere: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # machines of runs that were taken over

    def groups(self) -> dict[str, list[Finding]]:
        found: dict[str, list[Finding]] = {}
        for finding in self.findings:
            found.setdefault(finding.group, []).append(finding)
        return found


def describe_study(study: Study) -> dict[str, Any]:
    return {
        "title": study.title,
        "date": study.date,
        "command": study.command,
        "machine": dict(study.machine),
        "elsewhere": {origin: dict(machine) for origin, machine in study.elsewhere.items()},
        "targets": dict(study.targets),
        "findings": [
            asdict(finding)
            | {
                "accuracy": finding.accuracy and asdict(finding.accuracy),
                "difference": finding.difference and asdict(finding.difference),
                "verdict": finding.verdict,
                "epochs_to_target": finding.epochs_to(study.targets[finding.group])
                if finding.group in study.targets
                else None,
                "seconds_to_target": finding.seconds_to(study.targets[finding.group])
                if finding.group in study.targets
                else None,
            }
            for finding in study.findings
        ],
    }


def study_page(study: Study) -> Page:
    return Page(f"{study.title} ({study.date})", tuple(_blocks(study)))


def _blocks(study: Study) -> Iterator[Block]:
    yield Summary(tuple(_sentences(study)))
    for group, findings in study.groups().items():
        target = study.targets.get(group)
        yield Table(f"{group}: accuracy", _columns(target), tuple(_row(f, target) for f in findings), _note(findings))
        curves = tuple(map(_by_epoch, findings))
        yield Curves(f"{group}: top-1 against epochs", "epochs", "top-1 in %", curves)
        yield Curves(f"{group}: the last quarter of that", "epochs", "top-1 in %", _last_quarter(curves))
        timed = [finding for finding in findings if finding.speed]
        if timed:
            lasting = tuple(map(_by_time, timed))
            yield Curves(f"{group}: top-1 against time", f"seconds, {_source(timed)}", "top-1 in %", lasting)
    yield _every_run(study)
    if any(not run.origin for finding in study.findings for run in finding.learnt):
        yield Table("Environment", ("what", "value"), tuple(study.machine.items()))
    for machine, origins in _by_machine(study.elsewhere).items():
        yield Table("Environment of runs taken over", ("what", "value"), machine, f"Runs of {', '.join(origins)}.")
    yield Listing("Command", study.command)


def _by_machine(elsewhere: Mapping[str, Mapping[str, str]]) -> dict[tuple[tuple[str, str], ...], list[str]]:
    """Where runs were taken over from, by the rows of the machine that made them."""
    origins: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for origin, machine in elsewhere.items():
        origins.setdefault(tuple(machine.items()), []).append(origin)
    return origins


def _sentences(study: Study) -> Iterator[str]:
    yield from headlines(study)
    for finding in study.findings:
        if not finding.is_baseline:
            yield f"{finding.group}, {finding.trial}: {finding.verdict}."
    if any(len(finding.learnt) < 3 for finding in study.findings):
        yield "Fewer than three seeds: differences may be chance."


def headlines(study: Study) -> Iterator[str]:
    """Which mode reaches the target first, and how long the baseline takes."""
    for group, findings in study.groups().items():
        target = study.targets.get(group)
        times = {} if target is None else {f.trial: s for f in findings if (s := f.seconds_to(target)) is not None}
        base = next((finding.trial for finding in findings if finding.is_baseline), None)
        if target is None or not times:
            continue
        first = min(times, key=lambda trial: times[trial])
        after = {f.trial: _duration(f, times[f.trial]) for f in findings if f.trial in times}
        beside = f", {base} after {after[base]}" if base in times and base != first else ""
        source = _source([finding for finding in findings if finding.trial in times])
        yield f"{group} reaches {target:.1%} first with {first}: after {after[first]}{beside} ({source})."


def _duration(finding: Finding, seconds: float) -> str:
    """Seconds, on so many devices."""
    assert finding.speed is not None
    return f"{f'{seconds:,.0f}' if seconds >= 10 else f'{seconds:.2g}'} s on {finding.speed.devices}"


def _columns(target: float | None) -> tuple[str, ...]:
    goal = "target" if target is None else f"{target:.1%}"
    return ("mode", "top-1", "95 % interval", "against baseline", f"epochs to {goal}", f"time to {goal}", "verdict")


def _row(finding: Finding, target: float | None) -> tuple[str, ...]:
    accuracy, difference = finding.accuracy, finding.difference
    epochs = None if target is None else finding.epochs_to(target)
    seconds = None if target is None else finding.seconds_to(target)
    return (
        finding.trial,
        "-" if accuracy is None else f"{accuracy.value:.2%}",
        "-"
        if accuracy is None or len(finding.whole) < 2
        else f"{max(0.0, accuracy.low):.2%} - {min(1.0, accuracy.high):.2%}",
        "-" if difference is None else in_points(difference.value),
        "-" if target is None else "never" if epochs is None else f"{epochs:.0f}",
        "-" if seconds is None else _duration(finding, seconds),
        finding.verdict,
    )


def _note(findings: Sequence[Finding]) -> str:
    timed = [finding for finding in findings if finding.speed]
    counts = sorted({len(finding.whole) for finding in findings})
    seeds = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    about = f"Means over {seeds} seeds with Student's interval" if counts[-1] > 1 else "One seed, which has no interval"
    about += "; differences are paired by seed."
    return f"{about} Times are {_source(timed)}, on so many devices." if timed else about


def _source(findings: Sequence[Finding]) -> str:
    return ", ".join(sorted({finding.speed.source for finding in findings if finding.speed}))


def _by_epoch(finding: Finding) -> Curve:
    points = (
        Point(epoch, 100 * top1.value, 100 * max(0.0, top1.low), 100 * min(1.0, top1.high))
        for epoch, top1 in finding.curve()
    )
    return Curve(finding.trial, tuple(points))


def _last_quarter(curves: Sequence[Curve]) -> tuple[Curve, ...]:
    """Where the differences are that remain."""
    end = max((point.x for curve in curves for point in curve.points), default=0.0)
    return tuple(Curve(c.label, tuple(point for point in c.points if point.x >= 0.75 * end)) for c in curves)


def _by_time(finding: Finding) -> Curve:
    assert finding.speed is not None
    an_epoch = finding.samples / finding.speed.images_per_second
    points = (Point(epoch * an_epoch, 100 * top1.value) for epoch, top1 in finding.curve())
    return Curve(finding.trial, tuple(points))


def _every_run(study: Study) -> Table:
    rows = tuple(
        (run.group, run.trial, str(run.seed), f"{run.scores[-1][1]:.2%}" if run.scores else "-", run.diverged or "-")
        for finding in study.findings
        for run in finding.learnt
    )
    origins = Counter(run.origin for finding in study.findings for run in finding.learnt if run.origin)
    taken = (
        f"{count} run{'s are' if count > 1 else ' is'} taken over from {origin}." for origin, count in origins.items()
    )
    return Table("Every run", ("model", "mode", "seed", "top-1 at the end", "diverged"), rows, " ".join(taken))


def show_study(console: Console, study: Study, folder: Path) -> None:
    """The tables in 80 columns, the verdicts, and where the reports are."""
    for group, findings in study.groups().items():
        target = study.targets.get(group)
        console.print(group, highlight=False, markup=False)
        table = RichTable(box=None, pad_edge=False)
        goal = "target" if target is None else f"{target:.1%}"
        for name in ("mode", "top-1", "95 % interval", "points", f"epochs to {goal}", "time"):
            table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=name != "mode")
        for finding in findings:
            table.add_row(*_row(finding, target)[:-1])
        console.print(table)
        for finding in findings:
            if not finding.is_baseline:
                console.print(f"{finding.trial}: {finding.verdict}", highlight=False, markup=False)
        timed = [finding for finding in findings if finding.speed]
        if timed:
            console.print(f"times are {_source(timed)}, on so many devices", highlight=False, markup=False)
    for line in headlines(study):
        console.print(line, highlight=False, markup=False)
    console.print(f"report: {folder / 'report.md'}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"        {folder / 'report.html'}", highlight=False, markup=False, soft_wrap=True)
