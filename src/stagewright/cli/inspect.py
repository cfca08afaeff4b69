"""The command `inspect`: how a model can be cut, and what is proven of it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console

from stagewright.errors import counted
from stagewright.metrics import MIB
from stagewright.report.live.terminal import plain_table, say
from stagewright.run.inspect import Inspection, inspect_model

_WAYS = {
    "graph": "between the calls of its forward",
    "values": "between the calls of its forward, recorded on real tensors",
    "blocks": "between its like blocks, each stage running the author's code",
    "whole": "not at all",
}


def run(parsed: argparse.Namespace) -> None:
    with Console(stderr=True).status(f"tracing and proving {parsed.model}"):
        found = inspect_model(
            parsed.model,
            classes=parsed.classes,
            image=parsed.image,
            data=parsed.data,
            cut=parsed.cut,
            stages=parsed.stages,
            seed=parsed.seed,
        )
    if parsed.json:
        print(json.dumps(asdict(found)))
    else:
        show(Console(), found)


def show(console: Console, found: Inspection) -> None:
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
    shape = "x".join(map(str, found.sample))
    say(
        console, f"{found.model}: {counted(len(found.units), 'unit')}, {total:,} trained parameters, samples of {shape}"
    )
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
