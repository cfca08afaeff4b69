"""Commands about this machine and a model.

`doctor` describes the machine, `selftest` trains on it and compares, `profile` measures every unit here, and `inspect`
shows how a model is cut.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from stagewright.errors import UserError, counted
from stagewright.hardware.doctor.check import check_machine, show
from stagewright.hardware.doctor.selftest import Check, CheckState, find_machine, run_checks, usual_effort
from stagewright.hardware.environment import read_environment
from stagewright.metrics import MIB, format_rate
from stagewright.planning.traced import rate_of
from stagewright.profile.profile import Profile, Unit
from stagewright.report.columns import Column
from stagewright.report.live.terminal import open_console, print_lines, print_table, say, speaking
from stagewright.run.inspect import Inspection, UnitFacts, inspect_model
from stagewright.run.profile import Subject, import_profile, measure_profile

_WAYS = {
    "graph": "between the calls of its forward",
    "values": "between the calls of its forward, recorded on real tensors",
    "blocks": "between its like blocks, each stage running the author's code",
    "whole": "not at all",
}


_UNITS: tuple[Column[Unit], ...] = (
    Column("unit", lambda unit: unit.name, is_text=True),
    Column("kind", lambda unit: unit.kind, is_text=True, spare=4),
    Column("fwd ms", lambda unit: unit.forward * 1e3, "{:.3f}"),
    Column("bwd ms", lambda unit: unit.backward * 1e3, "{:.3f}"),
    Column("weights MiB", lambda unit: unit.parameters * 4 / MIB, "{:.2f}", spare=1),
    Column("live MiB", lambda unit: unit.live / MIB, "{:.2f}", spare=3),
    Column("saved MiB", lambda unit: unit.saved / MIB, "{:.2f}", spare=2),
)

_STYLES = {CheckState.PASSED: "green", CheckState.FAILED: "bold red", CheckState.NOT_CHECKED: "yellow"}
_CHECKS: tuple[Column[Check], ...] = (
    Column("check", lambda check: f"{check.part}: {check.name}", is_text=True, wraps=True),
    Column("", lambda check: check.state, is_text=True, style=lambda check: _STYLES[check.state]),
    Column("found", lambda check: check.line, is_text=True, wraps=True),
)


def run_doctor(parsed: argparse.Namespace) -> None:
    with speaking("checking this machine", as_json=parsed.json) as voice:
        found = check_machine(parsed.data, measures=not parsed.fast, voice=voice)
    if parsed.json:
        print(json.dumps(found.describe()))
    else:
        show(open_console(), found)


def run_selftest(parsed: argparse.Namespace) -> None:
    machine = find_machine(share_gpu=parsed.share_gpu)
    with speaking("selftest", as_json=parsed.json, patience=0) as voice:
        checks = list(run_checks(machine, usual_effort(machine), parsed.minutes, parsed.row, voice))
    if parsed.json:
        about = {"machine": asdict(machine), "environment": dict(read_environment().rows())}
        print(json.dumps(about | {"checks": [asdict(check) for check in checks]}))
    else:
        show_checks(open_console(), checks)
    if failed := [check for check in checks if check.state is CheckState.FAILED]:
        first = f"{failed[0].part}, {failed[0].name}: {failed[0].line}"
        raise UserError(f"{len(failed)} of {len(checks)} checks failed, first {first}")


def show_checks(console: Console, checks: Sequence[Check]) -> None:
    """A table in a terminal, lines anywhere else."""
    if not console.is_terminal:
        print_lines(*(f"{check.state}: {check.part}, {check.name}: {check.line}" for check in checks))
        return
    print_table(console, _CHECKS, checks)


def run_profile(parsed: argparse.Namespace) -> None:
    with speaking(f"profiling {parsed.model}", as_json=parsed.json) as voice:
        if parsed.pipedream:
            profile = import_profile(parsed.pipedream, parsed.model, parsed.samples)
        else:
            profile = measure_profile(Subject.of(vars(parsed)), voice)
    if parsed.output:
        profile.write(parsed.output)
    if parsed.json:
        print(json.dumps(asdict(profile)))
        return
    show_profile(open_console(), profile)
    if parsed.output:
        print_lines(f"written to {parsed.output}")


def show_profile(console: Console, profile: Profile) -> None:
    """Print the largest measured microbatch, unit by unit, and the device's ceilings."""
    table = profile.tables[-1]
    together = f", {profile.together} processes at once" if profile.together > 1 else ""
    say(console, f"{profile.model} on {profile.device}, {table.precision}, microbatch of {table.samples}{together}")
    print_table(console, _UNITS, table.units)
    say(console, "fwd, bwd: forward, backward; live: crosses a cut after it; saved: kept for backward", style="dim")
    rate = table.samples / table.seconds if table.seconds else float("inf")
    say(console, f"{table.seconds * 1e3:.1f} ms per microbatch, {format_rate(rate)} {_rate_of(profile)}")
    ceilings = profile.ceilings
    if ceilings is not None:
        matrix = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in ceilings.matrix.items())
        rates = f"copies {ceilings.copy / 1e9:.1f} GB/s, updates {ceilings.update / 1e9:.1f} GB/s of weights"
        say(console, f"device: {matrix}, {rates}")
        for transfer in ceilings.transfers:
            speed = f"{transfer.bandwidth / 1e9:.2f} GB/s, {transfer.latency * 1e6:.0f} us"
            say(console, f"link {transfer.source}-{transfer.target}: {speed}")


def _rate_of(profile: Profile) -> str:
    """What its speed counts; of an imported profile the model may be unknown."""
    return "images/s" if profile.is_imported else rate_of(profile.model)


def run_inspect(parsed: argparse.Namespace) -> None:
    with speaking(f"tracing {parsed.model} and proving its cut"):
        found = inspect_model(
            parsed.model,
            classes=parsed.classes,
            image=parsed.image,
            data=parsed.data,
            inputs=parsed.inputs,
            init=parsed.init,
            freeze=parsed.freeze,
            cut=parsed.cut,
            stages=parsed.stages,
            seed=parsed.seed,
        )
    if parsed.json:
        print(json.dumps(asdict(found)))
    else:
        show_inspection(open_console(), found)


def _beginning(found: Inspection, unit: UnitFacts) -> str:
    """Whether a stage can begin with a unit."""
    if unit is found.units[0] or found.way == "whole":
        return ""
    return f"no: {unit.impossible}" if unit.impossible else "yes"


def show_inspection(console: Console, found: Inspection) -> None:
    """Print the units as a table, and in lines how the model is cut and what is proven."""
    columns: tuple[Column[UnitFacts], ...] = (
        Column("unit", lambda unit: unit.name, is_text=True, wraps=True),
        Column("parameters", lambda unit: unit.parameters, "{:,}", wraps=True),
        Column("frozen", lambda unit: unit.frozen, "{:,}", wraps=True),
        Column("MFLOPs", lambda unit: unit.flops / 1e6, "{:,.2f}", wraps=True),
        Column("MiB after it", lambda unit: unit.bytes_across / MIB, "{:,.3f}", wraps=True),
        Column("a stage can begin", lambda unit: _beginning(found, unit), is_text=True, wraps=True),
    )
    has_frozen = any(unit.frozen for unit in found.units)
    print_table(console, [column for column in columns if has_frozen or column.head != "frozen"], found.units)
    total, frozen = (sum(numbers) for numbers in zip(*((u.parameters, u.frozen) for u in found.units), strict=True))
    shapes = {name: "x".join(map(str, shape)) or "one number" for name, shape in found.inputs.items()}
    samples = ", ".join(shapes.values() if len(shapes) == 1 else map(" ".join, shapes.items()))
    units = counted(len(found.units), "unit")
    shown = f"{total:,} trained parameters{f' and {frozen:,} frozen ones' if frozen else ''}"
    say(console, f"{found.model}: {units}, {shown}, samples of {samples}")
    if found.weights is not None:
        say(console, f"starts from {found.weights}", *found.weights.remarks)
    why = f" ({found.why})" if found.why else ""
    say(console, f"cut {_WAYS[found.way]}{why}; at most {counted(found.most_stages, 'stage')}")
    for name, reason in list(found.whole.items())[:5]:
        say(console, f"kept whole: {name}, since {reason}")
    if len(found.whole) > 5:
        say(console, f"kept whole: {len(found.whole) - 5} more")
    if found.proof is not None:
        say(console, f"proven: {found.proof}, cut before {', '.join(found.cuts)}")
    elif found.refused:
        say(console, f"not proven: {found.refused}")
