"""`python -m tests.soak`: train plans under faults, print what each fault cost, and a minimal schedule on failure."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from itertools import count
from pathlib import Path

import pytest

from tests.soak.processes import SoakFailed
from tests.soak.run import Happened, Outcome, record, run, run_for
from tests.soak.sample import Growth
from tests.soak.schedule import (
    PLANS,
    Kind,
    Schedule,
    SoakPlan,
    format_schedule,
    make_schedule,
    parse_schedule,
    steps_of,
)
from tests.soak.shrink import shrink


def main() -> int:
    options = _parser().parse_args()
    plans = [PLANS[name] for name in (options.plan or PLANS)]
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    happened: list[Happened] = []
    failed = False
    try:
        for plan in plans:
            here = folder / plan.mode
            outcome = _soak_for(plan, here, options) if options.minutes else _soak(plan, here, options)
            happened += outcome.happened
            failed |= bool(outcome.wrong)
    except (SoakFailed, pytest.skip.Exception) as reason:  # undisturbed, or for want of network namespaces
        print(f"FAILED: {reason}; files are in {folder}")
        return 1
    print("\n".join(table(happened)))
    if failed:
        print(f"FAILED; files are in {folder}")
    else:
        shutil.rmtree(folder)
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--plan", action="append", choices=list(PLANS), help="default: all, one after the other")
    parser.add_argument("--faults", type=int, default=20, help="per plan")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", help=f"only these, between commas: {', '.join(kind.label for kind in Kind)}")
    parser.add_argument("--schedule", type=parse_schedule, help="these faults, instead of those of a seed")
    parser.add_argument("--steps", type=int, help="batches to train (default: enough for the schedule)")
    parser.add_argument("--minutes", type=float, help="train for so long without faults, and print what grows")
    parser.add_argument("--attempts", type=int, default=8, help="to find a smaller schedule that fails")
    return parser


def _soak(plan: SoakPlan, folder: Path, options: argparse.Namespace) -> Outcome:
    kinds = None if options.kinds is None else [kind for kind in Kind if kind.label in options.kinds.split(",")]
    schedule = options.schedule or make_schedule(plan, options.faults, options.seed, kinds)
    steps = options.steps or steps_of(schedule)
    print(f"{plan.mode} {plan.placement}: {len(schedule)} faults in {steps} steps", flush=True)
    recorded = record(plan, folder / "undisturbed", steps)
    numbers = count(1)

    def attempt(part: Schedule) -> Outcome:
        return run(plan, part, recorded, folder / f"run-{next(numbers)}", steps, _say)

    outcome = attempt(schedule)
    _report(outcome, "the same bits and steps as undisturbed; nothing left behind")
    if outcome.wrong and options.attempts:
        _print_minimal(plan, shrink(schedule, lambda part: bool(attempt(part).wrong), options.attempts), steps)
    return outcome


def _soak_for(plan: SoakPlan, folder: Path, options: argparse.Namespace) -> Outcome:
    print(f"{plan.mode} {plan.placement}: {options.minutes:g} minutes without faults", flush=True)
    outcome = run_for(plan, options.minutes, folder / "run", _say)
    _report(outcome, "nothing grows; nothing left behind")
    return outcome


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


def _report(outcome: Outcome, fine: str) -> None:
    _say(f"{outcome.steps} steps; at most {outcome.most_partial} checkpoints were being written at a time")
    _say(f"load of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())} on {os.cpu_count()} cores")
    for role in outcome.used:
        _say(_describe_growth(role))
    for line in [f"WRONG: {wrong}" for wrong in outcome.wrong] or [fine]:
        _say(line)


def _describe_growth(role: Growth) -> str:
    def slope(value: float | None, unit: float = 1.0) -> str:
        return "     -" if value is None else f"{value / unit:+6.2f}"

    most = f"{role.most_rss / 2**20:6.1f} MiB {role.most_threads:3} threads {role.most_files:3} files"
    rss, threads, files = slope(role.rss_slope, 2**20), slope(role.threads_slope), slope(role.files_slope)
    grows = f"{rss} MiB {threads} threads {files} files"
    return f"{role.role:13} {role.samples:5} samples: at most {most}; per 1000 steps {grows}"


def _print_minimal(plan: SoakPlan, schedule: Schedule, steps: int) -> None:
    words = f"--plan {plan.mode} --steps {steps} --schedule {format_schedule(schedule)}"
    print(f"  fails with {len(schedule)} faults: python -m tests.soak {words}", flush=True)


def table(happened: Iterable[Happened]) -> list[str]:
    """A Markdown table: per kind of fault, how often, what was lost, and how long training stood still."""
    kinds: dict[Kind, list[Happened]] = defaultdict(list)
    for one in happened:
        kinds[one.fault.kind].append(one)
    if not kinds:
        return []
    lines = [
        "| fault | times | steps repeated (median, most) | seconds of standstill (median, most) |",
        "|---|---|---|---|",
    ]
    for kind in Kind:
        if own := kinds.get(kind):
            repeated, still = [one.repeated for one in own], [one.standstill for one in own]
            lines.append(
                f"| {kind.about} | {len(own)} | {statistics.median(repeated):g}, {max(repeated)} "
                f"| {statistics.median(still):.1f}, {max(still):.1f} |"
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
