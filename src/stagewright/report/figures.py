"""The figures of a run that several parts of a report show, each made here once: tiles, sentences and tables agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from stagewright.events import Usage
from stagewright.metrics import LOSS, MIB, ThroughputUnit, batch_seconds, format_metric, format_rate, metric_label
from stagewright.report.page import Mark, Point, Tile, Tiles
from stagewright.report.read import Run
from stagewright.report.timeline import busy_shares
from stagewright.report.words import NONE, format_duration, format_number, format_share, upper_first

ONE_PROCESS = "all ranks ran in one process (--emulate)"
_MOST_POINTS = 400  # of a curve of throughput


def waiting(shares: Sequence[float]) -> float:
    """The share of the ranks' time that is not spent computing, by `busy_shares`."""
    return 1 - sum(shares) / len(shares)


def prediction_error(run: Run) -> str | None:
    """How far the prediction was off, as in `5.0% above`; None where nothing can be compared."""
    speed, predicted = run.images_per_second, run.predicted
    if not speed or not predicted or run.is_emulated:
        return None
    off = predicted / speed - 1
    return f"{abs(off):.1%} {'above' if off > 0 else 'below'}"


def peak_memory(samples: Iterable[Usage]) -> dict[int, int]:
    """The peak bytes of each rank: what torch held on its device where known, else resident memory.

    An emulated run is one process, which counts as rank 0.
    """
    peaks: dict[int, int] = {}
    for rank in (rank for sample in samples for rank in sample.ranks):
        held = rank.memory if rank.torch_memory is None else rank.torch_memory
        peaks[rank.rank] = max(peaks.get(rank.rank, 0), held)
    return peaks


def fullest_rank(run: Run) -> tuple[int, str] | None:
    """The rank with the highest peak and that peak in MiB; None without a monitor."""
    if not (peaks := peak_memory(run.own_usage)):
        return None
    rank = max(peaks, key=lambda rank: peaks[rank])
    return rank, format_number(peaks[rank] / MIB)


def memory_kind(run: Run) -> str:
    """What the monitor measured as memory."""
    held = any(rank.torch_memory is not None for sample in run.own_usage for rank in sample.ranks)
    return "allocated by torch on the device" if held else "resident, with Python and torch"


def steps_words(run: Run) -> str:
    """How many steps were trained: `60 steps`, `30 of 60 steps`, `steps 7-20` of a resumed run."""
    done, own = run.steps[-1].batch + 1, run.own_steps
    if run.summary is None:
        return f"{done:,} of {_steps(run.batches)}" if run.batches else _steps(done)
    first = own[0].batch + 1 if own else 1
    return _steps(done) if first == 1 else f"step {done:,}" if first == done else f"steps {first:,}-{done:,}"


def _steps(number: int) -> str:
    return f"{number:,} step{'' if number == 1 else 's'}"


def no_timeline(run: Run) -> str:
    """Why a run has no timeline."""
    if run.is_emulated:
        return f"{ONE_PROCESS}, so nothing ran at the same time"
    if not run.steps:
        return "no step was trained"
    if run.summary is None:
        return "ranks write it when the run ends"
    return "trace.json is missing or can't be read"


def no_memory(run: Run) -> str:
    """Why a run has no measured memory."""
    if run.section("run").get("monitor_every") == 0:
        return "nothing was sampled (--monitor-every 0)"
    return "the monitor has no sample of these ranks: the run was shorter than --monitor-every"


def tiles(run: Run) -> Tiles:
    """The figures that a run's page begins with."""
    return Tiles((_speed_tile(run), _score_tile(run), _time_tile(run), _memory_tile(run), _waiting_tile(run)))


def _speed_tile(run: Run) -> Tile:
    speed, predicted, unit = run.images_per_second, run.predicted, run.unit
    shown = None if predicted is None else format_rate(unit.of(predicted))
    if run.is_emulated:
        more = f"; {shown} {unit.rate} predicted on real devices" if shown else ""
        return Tile("Throughput", NONE, "", f"not comparable: {ONE_PROCESS}{more}")
    if speed is None:
        return Tile("Throughput", NONE, "", "no step was timed")
    detail = f"predicted {shown}, {prediction_error(run)}" if shown else "not predicted: no --profile was given"
    if run.steady_steps == 0:
        return Tile("Throughput", f"~{format_rate(unit.of(speed))}", unit.rate, "no step was steady: a rough figure")
    return Tile("Throughput", format_rate(unit.of(speed)), unit.rate, detail)


def _score_tile(run: Run) -> Tile:
    if not run.evaluations:
        why = "no evaluation yet" if run.summary is None else "no evaluation in this run"
        return Tile("Evaluation", NONE, "", why)
    last, metric = run.evaluations[-1], run.metric
    value = f"{last.loss:.4g}" if metric is None else format_metric(metric, last.metrics[metric])
    label = upper_first(metric_label(metric or LOSS))
    return Tile(label, value, "", f"on {measured_on(run)}, after step {last.batch:,}")


def measured_on(run: Run) -> str:
    """Which data the last evaluation used: `512 samples of the training data`."""
    named = f" ({run.validation})" if run.validation else ""
    return f"{run.evaluations[-1].samples:,} samples of the {run.evaluated_on}{named}"


def _time_tile(run: Run) -> Tile:
    if not run.steps:
        return Tile("Time", NONE, "", "no step was trained")
    size = f"{run.unit.of(run.batch):,} {run.unit.name}"
    return Tile("Time", format_duration(run.seconds), "", f"{steps_words(run)} of {size}")


def _memory_tile(run: Run) -> Tile:
    if (found := fullest_rank(run)) is None:
        return Tile("Memory", NONE, "", no_memory(run))
    rank, size = found
    return Tile("Memory", size, "MiB", f"peak of {run.label(rank)}, {memory_kind(run)}")


def _waiting_tile(run: Run) -> Tile:
    shares = busy_shares(run)
    if shares is None:
        return Tile("Waiting", NONE, "", f"no timeline: {no_timeline(run)}")
    busiest = f"; {busiest_rank(run, shares)} computes most: {format_share(max(shares))}" if len(shares) > 1 else ""
    return Tile("Waiting", format_share(waiting(shares)), "", f"of the ranks' time{busiest}")


def busiest_rank(run: Run, shares: Sequence[float]) -> str:
    return run.rank_map.labels[shares.index(max(shares))]


def training_seconds(run: Run) -> dict[int, float]:
    """The seconds of each batch that no pause delayed."""
    delayed = run.interrupted
    return {batch: took for batch, took in batch_seconds(run.steps).items() if batch not in delayed}


def throughput(run: Run, unit: ThroughputUnit) -> tuple[Point, ...]:
    """Throughput over groups of consecutive steps; steps that a pause delayed are left out."""
    took = training_seconds(run)
    steps = [step for step in run.steps if step.batch in took]
    size = max(1, -(-len(steps) // _MOST_POINTS))
    groups = [steps[first : first + size] for first in range(0, len(steps), size)]
    return tuple(
        Point(group[-1].seconds, unit.of(len(group) * run.batch) / spent)
        for group in groups
        if (spent := sum(took[step.batch] for step in group)) > 0
    )


def training_pauses(run: Run) -> Iterator[Mark]:
    """Evaluations and checkpoints, in seconds of training.

    A step right after an evaluation took longer than others by the time of the evaluation.
    """
    took, ended = batch_seconds(run.steps), {step.batch + 1: step.seconds for step in run.steps}
    usual = median(took.values()) if took else 0.0
    saved = {record.batch: record.seconds for record in run.saved}
    evaluated = {record.batch for record in run.evaluations}
    for batch in sorted({batch for batch in evaluated | saved.keys() if batch in ended}):
        at, pause = ended[batch], saved.get(batch, 0.0)
        if batch in evaluated and took.get(batch, 0.0) > usual + pause:
            yield Mark("evaluation", at, at := at + took[batch] - usual - pause)
        if batch in saved:
            yield Mark("checkpoint", at, at + pause)
