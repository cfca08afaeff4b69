"""The sections of a run's page: configuration, stages, memory, epochs, environment and usage of the machines."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

from stagewright.events import GpuUsage, Usage
from stagewright.metrics import GIB, MIB
from stagewright.report.columns import Column, page_table, used
from stagewright.report.figures import memory_kind, no_memory, peak_memory, training_seconds
from stagewright.report.page import Block, Curve, Curves, Listing, Note, Point, Stack, Stacks, Table
from stagewright.report.read import Run
from stagewright.report.words import format_number, format_seconds

_MOST_EPOCHS = 100
_MOST_CURVES = 16
_MOST_SAMPLES = 2000  # that curves are drawn from; totals count all
_GPU_CURVES = (
    ("GPU utilisation", "% of the time", "utilisation", 100),
    ("GPU memory", "MiB", "memory", 1 / MIB),
    ("GPU power", "watts", "power", 1),
)
_CONFIGURED = (
    ("model", "model", "name"),
    ("data", "data", "source"),
    ("image side", "data", "image"),
    ("precision", "run", "precision"),
    ("device", "run", "device"),
    ("metrics", "run", "metrics"),
    ("optimizer", "optimizer", "name"),
    ("learning rate", "optimizer", "lr"),
    ("momentum", "optimizer", "momentum"),
    ("weight decay", "optimizer", "weight_decay"),
    ("decay of averaged weights", "optimizer", "ema"),
    ("schedule", "schedule", "kind"),
    ("seed", "run", "seed"),
    ("machines", "nodes", "list"),
)


def configuration(run: Run) -> Table:
    """What a reader must know to compare the run with another one."""
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
    if plan.get("cuts"):
        rows.append(("cut", _proven(run)))
    flags = ("dynamic", "emulate", "compile", "deterministic", "share_gpu")
    rows += [(flag.replace("_", " "), "yes") for flag in flags if run.section("run").get(flag) is True]
    return Table("Configuration", ("what", "value"), tuple(rows))


def _proven(run: Run) -> str:
    """What was proven of the cut before the first step."""
    if (proof := run.proof) is None:
        return "not proven"
    return (
        f"proven against the whole model in {proof['seconds']:.1f} s: {proof['samples']} samples in "
        f"{proof['precision']}, largest difference {proof['difference']:.1e} (cut by {proof['way']})"
    )


def stages(run: Run) -> Table:
    """The plan and the memory of each stage: that of its fullest rank, where ranks are processes."""
    ranks, cuts = run.rank_map.stages, run.plan.get("cuts") or []
    predicted = {rank: sum(parts.values()) for rank, parts in enumerate(run.memory or ())}
    peaks: dict[int, float] = {} if run.is_emulated else {**peak_memory(run.own_usage)}

    def of_plan(name: str, stage: int) -> Any:
        values = run.plan.get(name)
        return values[stage] if isinstance(values, list) and stage < len(values) else "?"

    def fullest(sizes: dict[int, float], stage: int) -> float | None:
        return max((sizes[rank] / MIB for rank in ranks[stage] if rank in sizes), default=None)

    columns: tuple[Column[int], ...] = (
        Column("stage", lambda stage: stage),
        Column("devices", lambda stage: run.rank_map.devices[stage]),
        Column("from", lambda stage: "" if stage == 0 else cuts[stage - 1] if stage <= len(cuts) else "?"),
        Column("versions", lambda stage: of_plan("versions", stage)),
        Column("depth", lambda stage: of_plan("depths", stage)),
        Column("memory MiB, predicted", lambda stage: fullest(predicted, stage), format_number),
        Column("peak MiB, measured", lambda stage: fullest(peaks, stage), format_number),
    )
    return page_table("Stages", used(columns, range(len(ranks))), range(len(ranks)))


def memory(run: Run) -> Iterator[Block]:
    """Predicted memory by part and rank, and the peaks that the monitor measured."""
    if run.memory:
        stacks = tuple(
            Stack(label, tuple((name, size / MIB) for name, size in parts.items() if size))
            for label, parts in zip(run.rank_map.labels, run.memory, strict=False)
        )
        yield Stacks("Memory by part", "MiB", stacks, "Predicted by the planner.")
    if peaks := sorted(peak_memory(run.own_usage).items()):
        stacks = tuple(Stack(run.label(rank), (("peak", size / MIB),)) for rank, size in peaks)
        yield Stacks("Memory", "MiB", stacks, f"Measured peak of each process: {memory_kind(run)}.")
    else:
        yield Note("Memory", f"No measured memory: {no_memory(run)}.")


def epochs(run: Run) -> Table | None:
    """How long each epoch took, without steps that a pause delayed."""
    took = training_seconds(run)
    grouped: dict[int, list[Any]] = {}
    for step in run.steps:
        grouped.setdefault(step.epoch, []).append(step)
    rows = []
    for epoch, steps in sorted(grouped.items()):
        timed = [took[step.batch] for step in steps if step.batch in took]
        spent, mean = sum(timed), sum(step.loss for step in steps) / len(steps)
        rate = run.unit.of(len(timed) * run.batch) / spent if spent else 0.0
        rows.append((str(epoch + 1), str(len(steps)), format_seconds(spent), format_number(rate), f"{mean:.4g}"))
    left_out = max(0, len(rows) - _MOST_EPOCHS)
    note = f"The first {left_out:,} epochs are left out; metrics.jsonl has their steps." if left_out else ""
    columns = ("epoch", "steps", "time", run.unit.rate, "mean loss")
    return Table("Epochs", columns, tuple(rows[left_out:]), note) if rows else None


def environment(run: Run) -> Iterator[Block]:
    """The machine and its software, the connections of its GPUs, and the command."""
    known = dict(run.environment)
    matrix, command = known.pop("topology", None), known.pop("command", None)
    if rows := tuple(_flat("", known)):
        yield Table("Machine", ("what", "value"), rows)
    if isinstance(matrix, list) and matrix and all(isinstance(row, list) for row in matrix):
        names = [f"GPU{index}" for index in range(len(matrix))]
        cells = tuple((name, *map(str, row)) for name, row in zip(names, matrix, strict=True))
        yield Table("Topology", ("", *names), cells)
    elif isinstance(matrix, str) and matrix:
        yield Listing("Topology", matrix)
    if isinstance(command, list) and command:
        program, *rest = map(str, command)
        # the script, `python -m stagewright`, or `python -m stagewright.cli` in runs written before
        if os.path.basename(program) in ("stagewright", "__main__.py", "cli.py"):  # noqa: PTH119
            program = "stagewright"
        yield Listing("Command", shlex.join([program, *rest]))


def _flat(before: str, value: Any) -> Iterator[tuple[str, str]]:
    """Nested values as rows; unknown ones are left out."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(f"{before}, {name}" if before else str(name).replace("_", " "), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _flat(f"{before} {index}", inner)
    elif value is not None:
        is_size = before.endswith("memory") and isinstance(value, int)
        yield before, f"{value / GIB:.1f} GiB" if is_size else str(value)


def usage_blocks(run: Run) -> Iterator[Block]:
    """Cores and GPUs over time, then totals; nothing for a run without a monitor."""
    for number, every in enumerate(run.usage):
        samples = every[:: 1 + len(every) // _MOST_SAMPLES]
        where = f", machine {number}" if len(run.usage) > 1 else ""
        cores = _over_time((run.label(one.rank), one.rank, s.seconds, one.cores) for s in samples for one in s.ranks)
        whole = Curve("everything on the machine", tuple(Point(sample.seconds, sample.cores) for sample in samples))
        if len(samples) > 1:
            yield Curves(f"Cores{where}", "seconds", "cores kept busy", (*cores, whole))
        for title, unit, name, scale in _GPU_CURVES:
            gpus = [(gpu.index, s.seconds, getattr(gpu, name)) for s in samples for gpu in s.gpus]
            curves = _over_time((f"GPU {index}", index, at, scale * x) for index, at, x in gpus if x is not None)
            if any(len(curve.points) > 1 for curve in curves):
                yield Curves(f"{title}{where}", "seconds", unit, curves)
        if any(sample.gpus for sample in every):
            yield _gpu_table(every, where)


def _over_time(values: Iterable[tuple[str, int, float, float]]) -> tuple[Curve, ...]:
    """A curve for each rank or GPU, in the order of their numbers: its label, its number, seconds, a value."""
    points: dict[tuple[int, str], list[Point]] = {}
    for label, number, at, value in values:
        points.setdefault((number, label), []).append(Point(at, value))
    return tuple(Curve(key[1], tuple(points[key])) for key in sorted(points)[:_MOST_CURVES])


def _over(how: Callable[[list[float]], float | None], name: str) -> Callable[[list[GpuUsage]], float | None]:
    """A figure of all samples of a GPU that have it."""

    def figure(seen: list[GpuUsage]) -> float | None:
        known = [value for gpu in seen if (value := getattr(gpu, name)) is not None]
        return how(known) if known else None

    return figure


_GPUS: tuple[Column[list[GpuUsage]], ...] = (
    Column("GPU", lambda seen: seen[0].index),
    Column("utilisation", _over(fmean, "utilisation"), "{:.0%}"),
    Column("peak MiB", _over(max, "memory"), lambda size: format_number(size / MIB)),
    Column("watts", _over(fmean, "power"), "{:.0f}"),
    Column("kJ", _over(lambda energy: (energy[-1] - energy[0]) / 1e3 if energy[1:] else None, "energy"), "{:.2f}"),
    Column("hottest", _over(max, "temperature"), "{:.0f} °C"),
    Column("throttled by", lambda seen: ", ".join(sorted({why for gpu in seen for why in gpu.throttled})) or "nothing"),
    Column("others", lambda seen: max(gpu.foreign for gpu in seen)),
)


def _gpu_table(samples: Sequence[Usage], where: str) -> Table:
    by_gpu: dict[int, list[GpuUsage]] = {}
    for sample in samples:
        for gpu in sample.gpus:
            by_gpu.setdefault(gpu.index, []).append(gpu)
    note = "Utilisation and watts are means over the monitor's samples; others: processes that are not of this run."
    return page_table(f"GPUs{where}", _GPUS, [by_gpu[index] for index in sorted(by_gpu)], note=note)
