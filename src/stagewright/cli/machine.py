"""Commands about this machine and a model: `doctor`, `profile` (measure every unit here), `inspect` (how it is cut)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.status import Status

from stagewright.errors import counted
from stagewright.hardware.doctor.check import check_machine, show
from stagewright.metrics import MIB
from stagewright.report.live.terminal import plain, plain_table, print_lines, say
from stagewright.run.inspect import Inspection, inspect_model
from stagewright.run.profile import import_profile, measure_profile

_WAYS = {
    "graph": "between the calls of its forward",
    "values": "between the calls of its forward, recorded on real tensors",
    "blocks": "between its like blocks, each stage running the author's code",
    "whole": "not at all",
}


def run_doctor(parsed: argparse.Namespace) -> None:
    with Console(stderr=True).status("checking") as status:
        found = check_machine(parsed.data, measures=not parsed.fast, progress=_progress(status))
    if parsed.json:
        print(json.dumps(found.describe()))
    else:
        show(Console(), found)


def _progress(status: Status) -> Callable[[str], None]:
    return lambda text: status.update(plain(text))


def run_profile(parsed: argparse.Namespace) -> None:
    with Console(stderr=True).status("profiling") as status:
        profile = import_profile(parsed) if parsed.pipedream else measure_profile(parsed, _progress(status))
    if parsed.output:
        profile.write(parsed.output)
    if parsed.json:
        print(json.dumps(asdict(profile)))
        return
    show_profile(Console(), profile)
    if parsed.output:
        print_lines(f"written to {parsed.output}")


def show_profile(console: Console, profile: Any) -> None:
    """Print the largest measured microbatch, unit by unit, and the device's ceilings."""
    table = profile.tables[-1]
    together = f", {profile.together} processes at once" if profile.together > 1 else ""
    say(console, f"{profile.model} on {profile.device}, {table.precision}, microbatch of {table.samples}{together}")
    columns = ("unit", "kind", "fwd ms", "bwd ms", "weights MiB", "live MiB", "saved MiB")
    shown = plain_table(*columns, left=("unit", "kind"), no_wrap=columns)
    for unit in table.units:
        shown.add_row(
            unit.name,
            unit.kind,
            f"{unit.forward * 1e3:.3f}",
            f"{unit.backward * 1e3:.3f}",
            f"{unit.parameters * 4 / MIB:.2f}",
            f"{unit.live / MIB:.2f}",
            f"{unit.saved / MIB:.2f}",
        )
    console.print(shown)
    rate = table.samples / table.seconds if table.seconds else float("inf")
    say(console, f"{table.seconds * 1e3:.1f} ms per microbatch, {rate:,.1f} images/s")
    ceilings = profile.ceilings
    if ceilings is not None:
        matrix = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in ceilings.matrix.items())
        rates = f"copies {ceilings.copy / 1e9:.1f} GB/s, updates {ceilings.update / 1e9:.1f} GB/s of weights"
        say(console, f"device: {matrix}, {rates}")
        for transfer in ceilings.transfers:
            speed = f"{transfer.bandwidth / 1e9:.2f} GB/s, {transfer.latency * 1e6:.0f} us"
            say(console, f"link {transfer.source}-{transfer.target}: {speed}")


def run_inspect(parsed: argparse.Namespace) -> None:
    with Console(stderr=True).status(f"tracing and proving {parsed.model}"):
        found = inspect_model(
            parsed.model,
            classes=parsed.classes,
            image=parsed.image,
            data=parsed.data,
            inputs=parsed.inputs,
            cut=parsed.cut,
            stages=parsed.stages,
            seed=parsed.seed,
        )
    if parsed.json:
        print(json.dumps(asdict(found)))
    else:
        show_inspection(Console(), found)


def show_inspection(console: Console, found: Inspection) -> None:
    """Print the units as a table, and in lines how the model is cut and what is proven."""
    columns = ("unit", "parameters", "MFLOPs", "MiB after it", "a stage can begin")
    table = plain_table(*columns, left=("unit", "a stage can begin"))
    for index, unit in enumerate(found.units):
        begins = "" if index == 0 else f"no: {unit.impossible}" if unit.impossible else "yes"
        table.add_row(
            unit.name,
            f"{unit.parameters:,}",
            f"{unit.flops / 1e6:,.2f}",
            f"{unit.bytes_across / MIB:,.3f}",
            begins if found.way != "whole" else "",
        )
    console.print(table)
    total = sum(unit.parameters for unit in found.units)
    shapes = {name: "x".join(map(str, shape)) or "one number" for name, shape in found.inputs.items()}
    samples = ", ".join(shapes.values() if len(shapes) == 1 else map(" ".join, shapes.items()))
    units = counted(len(found.units), "unit")
    say(console, f"{found.model}: {units}, {total:,} trained parameters, samples of {samples}")
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
