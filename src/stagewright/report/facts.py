"""What a run was: its configuration, plan, epochs, environment, topology and command, as tables and listings."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from typing import Any

from stagewright.report.figures import seconds, shown
from stagewright.report.page import Block, Listing, Stack, Stacks, Table
from stagewright.report.record import Run
from stagewright.report.verdict import peak_memory

_MIB, _GIB = 2**20, 2**30
_MOST_EPOCHS = 100
_CONFIGURED = (
    ("model", "model", "name"),
    ("data", "data", "source"),
    ("image side", "data", "image"),
    ("precision", "run", "precision"),
    ("device", "run", "device"),
    ("optimizer", "optimizer", "name"),
    ("learning rate", "optimizer", "lr"),
    ("momentum", "optimizer", "momentum"),
    ("weight decay", "optimizer", "weight_decay"),
    ("schedule", "schedule", "kind"),
    ("seed", "run", "seed"),
    ("machines", "nodes", "list"),
)


def configuration(run: Run) -> Table:
    """What a reader must know to compare the run with another."""
    rows = [
        (label, str(run.section(section)[name]))
        for label, section, name in _CONFIGURED
        if run.section(section).get(name) not in (None, "")
    ]
    plan = run.plan
    rows[1:1] = [
        ("mode", run.mode),
        ("placement", str(plan.get("placement", "?"))),
        ("batch", f"{run.batch} samples in {plan.get('microbatches', '?')} microbatches"),
    ]
    for word in ("dynamic", "emulate", "compile", "deterministic", "share_gpu"):
        if run.section("run").get(word) is True:
            rows.append((word.replace("_", " "), "yes"))
    return Table("Configuration", ("what", "value"), tuple(rows))


def stages(run: Run) -> Table:
    """The plan and the memory of each stage: of its rank that holds most, where ranks are processes."""
    peaks = {} if run.is_emulated else peak_memory(run)
    cuts = run.plan.get("cuts") or []
    rows = []
    for stage, ranks in enumerate(run.layout.stages):
        first = "" if stage == 0 else str(cuts[stage - 1]) if stage <= len(cuts) else "?"
        row = [
            str(stage),
            run.layout.devices[stage],
            first,
            *(_of_stage(run, name, stage) for name in ("versions", "depths")),
        ]
        if run.memory:
            modelled = [sum(run.memory[rank].values()) for rank in ranks if rank < len(run.memory)]
            row.append(shown(max(modelled) / _MIB) if modelled else "-")
        if peaks:
            known = [peaks[rank] for rank in ranks if rank in peaks]
            row.append(shown(max(known) / _MIB) if known else "-")
        rows.append(tuple(row))
    extra = [("memory MiB, by the model", run.memory), ("peak MiB, measured", peaks)]
    columns = ("stage", "devices", "from", "versions", "depth", *(name for name, known in extra if known))
    return Table("Stages", columns, tuple(rows))


def _of_stage(run: Run, name: str, stage: int) -> str:
    values = run.plan.get(name)
    return str(values[stage]) if isinstance(values, list) and stage < len(values) else "?"


def memory(run: Run) -> Iterator[Block]:
    """Memory by part and rank, and what the monitor saw beside it."""
    peaks = peak_memory(run)
    if run.memory:
        stacks = tuple(
            Stack(label, tuple((name, size / _MIB) for name, size in parts.items() if size))
            for label, parts in zip(run.layout.ranks, run.memory, strict=False)
        )
        yield Stacks("Memory by part, by the planner's model", "MiB", stacks)
    if peaks:
        held = any(rank.torch_memory is not None for use in run.own_uses for rank in use.ranks)
        title = (
            "Memory, measured peak: what torch held"
            if held
            else "Memory, measured peak: resident, with Python and torch"
        )
        stacks = tuple(Stack(run.label(rank), (("peak", size / _MIB),)) for rank, size in sorted(peaks.items()))
        yield Stacks(title, "MiB", stacks)


def epochs(run: Run) -> Table | None:
    """How long each epoch took, pauses left out."""
    grouped: dict[int, list[Any]] = {}
    for step in run.steps:
        grouped.setdefault(step.epoch, []).append(step)
    rows = []
    for epoch, steps in sorted(grouped.items()):
        spent = sum(run.batch / step.images_per_second for step in steps if step.images_per_second > 0)
        rate = len(steps) * run.batch / spent if spent else 0.0
        mean = sum(step.loss for step in steps) / len(steps)
        rows.append((str(epoch + 1), str(len(steps)), seconds(spent), shown(rate), f"{mean:.4g}"))
    left_out = max(0, len(rows) - _MOST_EPOCHS)
    note = f"{left_out:,} epochs before these are left out; metrics.jsonl has their steps." if left_out else ""
    columns = ("epoch", "steps", "time", "images/s", "mean loss")
    return Table("Epochs", columns, tuple(rows[left_out:]), note) if rows else None


def environment(run: Run) -> Iterator[Block]:
    """The machine and its software, how its GPUs reach each other, and the command."""
    rows = tuple(
        _flat("", {name: value for name, value in run.environment.items() if name not in ("command", "topology")})
    )
    if rows:
        yield Table("Environment", ("what", "value"), rows)
    matrix = run.environment.get("topology")
    if isinstance(matrix, list) and matrix and all(isinstance(row, list) for row in matrix):
        yield Listing("Topology", _matrix([[str(cell) for cell in row] for row in matrix]))
    elif isinstance(matrix, str) and matrix:
        yield Listing("Topology", matrix)
    command = run.environment.get("command")
    if isinstance(command, list) and command:
        program, *rest = map(str, command)
        if os.path.basename(program) in ("cli.py", "stagewright"):  # noqa: PTH119
            program = "stagewright"
        yield Listing("Command", shlex.join([program, *rest]))


def _matrix(rows: list[list[str]]) -> str:
    names = [f"GPU{index}" for index in range(len(rows))]
    width = max(len(cell) for row in [names, *rows] for cell in row)
    lines = ["  ".join([" " * width, *(name.rjust(width) for name in names)])]
    lines += [
        "  ".join([name.ljust(width), *(cell.rjust(width) for cell in row)])
        for name, row in zip(names, rows, strict=True)
    ]
    return "\n".join(lines)


def _flat(before: str, value: Any) -> Iterator[tuple[str, str]]:
    """Nested facts as rows; what is not known is left out."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(f"{before}, {name}" if before else str(name).replace("_", " "), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _flat(f"{before} {index}", inner)
    elif value is not None:
        is_size = before.endswith("memory") and isinstance(value, int)
        yield before, f"{value / _GIB:.1f} GiB" if is_size else str(value)
