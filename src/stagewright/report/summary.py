"""A run in a few sentences: how fast, what its time went to, what it learnt, what went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stagewright.report.charts import seconds, shown
from stagewright.report.page import Summary
from stagewright.report.read import Run
from stagewright.report.timeline import measure_busy

_FULL = 0.85  # computing so much of its time, a rank is what the others wait for
_MIB = 2**20


def summarize_run(run: Run) -> Summary:
    """What a reader should take away."""
    return Summary(
        (
            _outcome(run),
            *where_it_began(run),
            *_prediction(run),
            *where_time_went(run),
            *_learning(run),
            *_faults(run),
            *_machine(run),
        )
    )


def _outcome(run: Run) -> str:
    if not run.steps:
        return "No step was trained." if run.summary is None else "The run had no steps to train."
    done = run.steps[-1].batch + 1
    own = run.own_steps
    speed = run.images_per_second
    rate = f" at {shown(speed)} images/s" if speed else ""
    what = f"{run.model}, {run.mode} {run.shape}"
    if run.summary is not None and own:
        first = own[0].batch + 1
        which = f"{done:,} steps" if first == 1 else f"steps {first:,}-{done:,}"
        return f"{what}: {which} of {run.batch:,} images{rate}, in {seconds(_spent(run))}."
    of = f" of {run.batches:,}" if run.batches else ""
    return f"{what}: not finished; {done:,}{of} steps of {run.batch:,} images{rate} so far."


def _spent(run: Run) -> float:
    """Seconds that the run's own steps took."""
    before = len(run.steps) - len(run.own_steps)
    return run.steps[-1].seconds - (run.steps[before - 1].seconds if before else 0.0)


def where_it_began(run: Run) -> Iterator[str]:
    """What a run went on from, and which plans made the steps before."""
    if not run.resumes:
        return
    checkpoint = Path(run.resumes[-1].checkpoint)
    others = dict.fromkeys(past.plan for past in run.resumes if past.plan != f"{run.mode} {run.shape}")
    plans = f"; steps before were made under {', '.join(others)}" if others else ""
    yield f"Resumed from {checkpoint.parent.parent.name} at step {checkpoint.name}{plans}."


def _prediction(run: Run) -> Iterator[str]:
    speed, predicted = run.images_per_second, run.predicted
    if speed and predicted:
        if run.is_emulated:
            yield f"Predicted for real devices are {shown(predicted)} images/s."
            return
        off = predicted / speed - 1
        word = "above" if off > 0 else "below"
        yield f"Predicted were {shown(predicted)} images/s, {abs(off):.1%} {word} what was measured."


def where_time_went(run: Run) -> Iterator[str]:
    """Which rank is the busiest, and what that means for the others."""
    if run.is_emulated:
        yield "All ranks ran in one process (--emulate), one after the other: the speed says nothing of real devices."
        return
    busy = measure_busy(run)
    if busy is None:
        return
    most = busy.busiest
    label = run.rank_map.labels[most]
    if len(busy.shares) == 1:
        yield f"The only rank computes {busy.shares[0]:.0%} of the time."
        return
    yield (
        f"The busiest is {label}: it computes {busy.shares[most]:.0%} of the time; over all ranks "
        f"{busy.bubble:.0%} of the time is not computing."
    )
    if busy.shares[most] < _FULL:
        yield "No rank is busy all the time: messages, data, or other processes hold the pipeline up."
    elif busy.bubble > 0.2:
        yield "The other ranks wait for it: give its stage more devices, or fewer layers."


def _learning(run: Run) -> Iterator[str]:
    if len(run.steps) > 1:
        yield f"The loss went from {run.steps[0].loss:.4g} to {run.steps[-1].loss:.4g}."
    if run.evaluations:
        last = run.evaluations[-1]
        yield (
            f"Evaluated after step {last.batch:,} on {last.samples:,} samples: loss {last.loss:.4g}, "
            f"top-1 {last.top1:.1%}, top-5 {last.top5:.1%}."
        )


def _faults(run: Run) -> Iterator[str]:
    skipped = (run.summary or {}).get("skipped_updates")
    if isinstance(skipped, list) and any(skipped):
        parts = [f"{count} of stage {stage}" for stage, count in enumerate(skipped) if count]
        yield f"Updates that overflowed and were skipped: {', '.join(parts)}."
    if run.replaced:
        yield f"{run.replaced:,} bad records were replaced; log.txt and metrics.jsonl name them."
    if run.restarts:
        last = run.restarts[-1]
        times = "once" if len(run.restarts) == 1 else f"{len(run.restarts)} times"
        yield f"Ranks had to start again {times}, last after step {last.batch:,}: {last.cause}"


def _machine(run: Run) -> Iterator[str]:
    """What the monitor saw that a reader should know before he trusts the figures."""
    moments = run.own_usage
    peaks = peak_memory(run)
    if peaks:
        rank = max(peaks, key=lambda rank: peaks[rank])
        most = f"{shown(peaks[rank] / _MIB)} MiB"
        if run.is_emulated:
            yield f"The one process with all ranks held {most} at most."
        else:
            yield f"The most memory had {run.label(rank)}: {most}."
    throttled = {(gpu.index, reason) for use in moments for gpu in use.gpus for reason in gpu.throttled}
    if throttled:
        parts = [f"GPU {index} ({reason})" for index, reason in sorted(throttled)]
        yield f"Slowed down by themselves: {', '.join(parts)}."
    if any(gpu.foreign for use in moments for gpu in use.gpus):
        yield "Processes of others used the same GPUs meanwhile: repeat on a quiet machine."


def peak_memory(run: Run) -> dict[int, int]:
    """The most bytes that each rank held: what torch held on its device where it told, else resident.

    An emulated run is one process, which counts as rank 0.
    """
    peaks: dict[int, int] = {}
    for use in run.own_usage:
        for rank in use.ranks:
            held = rank.memory if rank.torch_memory is None else rank.torch_memory
            peaks[rank.rank] = max(peaks.get(rank.rank, 0), held)
    return peaks
