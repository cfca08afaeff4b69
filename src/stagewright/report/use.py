"""What a run used of its machines, over time and in total."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from stagewright.metrics import GpuUse, Use
from stagewright.report.figures import shown
from stagewright.report.page import Block, Curve, Curves, Point, Table
from stagewright.report.record import Run

_MOST_CURVES = 16
_MOST_MOMENTS = 2000  # that curves are drawn from; totals are over all
_MIB = 2**20


def uses_of(run: Run) -> Iterator[Block]:
    """Cores and GPUs over time, then totals; nothing where no monitor looked on."""
    for number, all_uses in enumerate(run.uses):
        uses = all_uses[:: 1 + len(all_uses) // _MOST_MOMENTS]
        where = f", machine {number}" if len(run.uses) > 1 else ""
        ranks = sorted({rank.rank for use in uses for rank in use.ranks})
        cores = [Curve(run.label(rank), _points(uses, partial(_cores, rank=rank))) for rank in ranks[:_MOST_CURVES]]
        whole = Curve("everything on the machine", _points(uses, lambda use: use.cores))
        if len(uses) > 1:
            yield Curves(f"Cores kept busy{where}", "seconds", "cores", (*cores, whole))
        yield from _gpu_blocks(uses, where)
        if any(use.gpus for use in all_uses):
            yield _gpu_table(all_uses, where)


def _gpu_blocks(uses: Sequence[Use], where: str) -> Iterator[Block]:
    indices = sorted({gpu.index for use in uses for gpu in use.gpus})
    for title, y, read in (
        ("GPU utilisation", "% of the time", lambda gpu: None if gpu.utilisation is None else 100 * gpu.utilisation),
        ("GPU memory in use", "MiB", lambda gpu: None if gpu.memory is None else gpu.memory / _MIB),
        ("GPU power", "watts", lambda gpu: gpu.power),
    ):
        curves = tuple(
            Curve(f"GPU {index}", _points(uses, partial(_of_gpu, index=index, read=read)))
            for index in indices[:_MOST_CURVES]
        )
        if any(len(curve.points) > 1 for curve in curves):
            yield Curves(f"{title}{where}", "seconds", y, curves)


def _gpu_table(uses: Sequence[Use], where: str) -> Table:
    indices = sorted({gpu.index for use in uses for gpu in use.gpus})
    return Table(
        f"GPUs over the run{where}",
        ("GPU", "utilisation", "peak MiB", "watts", "kJ", "hottest", "slowed down by", "others"),
        tuple(_gpu_row(uses, index) for index in indices),
        "Utilisation and watts are means over the moments that the monitor looked; others: processes not of this run.",
    )


def _gpu_row(uses: Sequence[Use], index: int) -> tuple[str, ...]:
    seen = [gpu for use in uses for gpu in use.gpus if gpu.index == index]
    utilisation, power = (_known(getattr(gpu, name) for gpu in seen) for name in ("utilisation", "power"))
    memory, heat, energy = (_known(getattr(gpu, name) for gpu in seen) for name in ("memory", "temperature", "energy"))
    reasons = sorted({reason for gpu in seen for reason in gpu.throttled})
    return (
        str(index),
        f"{sum(utilisation) / len(utilisation):.0%}" if utilisation else "-",
        shown(max(memory) / _MIB) if memory else "-",
        f"{sum(power) / len(power):.0f}" if power else "-",
        f"{(energy[-1] - energy[0]) / 1e3:.2f}" if len(energy) > 1 else "-",
        f"{max(heat):.0f} °C" if heat else "-",
        ", ".join(reasons) or "nothing",
        str(max(gpu.foreign for gpu in seen)),
    )


def _known(values: Iterator[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _points(uses: Sequence[Use], read: Callable[[Use], float | None]) -> tuple[Point, ...]:
    return tuple(Point(use.seconds, value) for use in uses if (value := read(use)) is not None)


def _cores(use: Use, rank: int) -> float | None:
    return next((one.cores for one in use.ranks if one.rank == rank), None)


def _of_gpu(use: Use, index: int, read: Callable[[GpuUse], float | None]) -> float | None:
    return next((read(gpu) for gpu in use.gpus if gpu.index == index), None)
